/** The user's settings, with the schema's defaults until they are loaded. */

import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import { type ISignal, Signal } from '@lumino/signaling';

export interface ISettings {
  defaultAction: 'menu' | 'suspend' | 'checkpoint';
  showBadge: boolean;
  showGpuPanel: boolean;
  notifications: 'all' | 'failures' | 'none';
  confirmCheckpoint: boolean;
  confirmFreeMemory: boolean;
  pollHidden: boolean;
  introduction: boolean;
}

export class Preferences {
  values: ISettings = {
    defaultAction: 'menu',
    showBadge: true,
    showGpuPanel: true,
    notifications: 'all',
    confirmCheckpoint: false,
    confirmFreeMemory: true,
    pollHidden: false,
    introduction: true
  };

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Follow the settings of `plugin`; without them the defaults stay. */
  async load(registry: ISettingRegistry, plugin: string): Promise<void> {
    const settings = (this._settings = await registry.load(plugin));
    const update = () => {
      this.values = { ...this.values, ...(settings.composite as unknown as ISettings) };
      this._changed.emit();
    };
    settings.changed.connect(update);
    update();
  }

  /** Whether the user's own settings are known, and can be changed. */
  get loaded(): boolean {
    return this._settings !== null;
  }

  /** Change a setting for good. */
  async set<K extends keyof ISettings>(name: K, value: ISettings[K]): Promise<void> {
    await this._settings?.set(name, value);
  }

  private _settings: ISettingRegistry.ISettings | null = null;
  private readonly _changed = new Signal<this, void>(this);
}
