/** The toolbar button: its icon and tooltip say what the kernel is, its menu what can be done. */

import { ReactWidget, ToolbarButtonComponent } from '@jupyterlab/ui-components';
import { Menu } from '@lumino/widgets';
import * as React from 'react';

import { PROTECTIONS } from './commands';
import type { IContext } from './context';
import { phaseIcon } from './icons';
import { IDS } from './ids';
import type { NotebookKernel } from './notebooks';
import { duration, phase as word, place } from './words';

export class CheckpointButton extends ReactWidget {
  constructor(
    private readonly context: IContext,
    private readonly kernel: NotebookKernel
  ) {
    super();
    this.addClass('jp-gpuCkpt-button');
    kernel.changed.connect(this._renew, this);
    context.host.changed.connect(this._renew, this);
    context.preferences.changed.connect(this._renew, this);
  }

  override dispose(): void {
    this.context.host.changed.disconnect(this._renew, this);
    this.context.preferences.changed.disconnect(this._renew, this);
    super.dispose();
  }

  protected override render(): React.JSX.Element {
    const phase = this.kernel.model?.phase ?? 'plain';
    const busy = phase === 'suspending' || phase === 'checkpointing' || phase === 'waking';
    return (
      <div
        onKeyDown={event => this._key(event)}
        onContextMenu={event => this._contextMenu(event)}
        onMouseEnter={() => this.update()}
        onFocus={() => this.update()}
      >
        <ToolbarButtonComponent
          className={busy ? 'jp-mod-busy' : ''}
          dataset={{ 'data-phase': phase }}
          icon={phaseIcon(phase)}
          tooltip={this._tooltip()}
          enabled={phase !== 'plain' && phase !== 'dead'}
          onClick={() => this._press()}
          aria-haspopup="menu"
        />
      </div>
    );
  }

  private _tooltip(): string {
    const { host, trans } = this.context;
    const { model } = this.kernel;
    if (model === null) {
      return trans.__('No kernel');
    }
    if (model.phase === 'plain') {
      const reason = host.reason || model.reason;
      return reason ? trans.__('This kernel cannot sleep. %1', reason) : trans.__('This kernel cannot sleep');
    }
    const state = trans.__('Kernel %1', place(model, trans, Date.now() / 1000) ?? word(model.phase, trans));
    if (model.progress !== null) {
      return `${state}, ${Math.round(100 * model.progress.fraction)} %`;
    }
    if (model.waiting !== null) {
      return trans.__('%1, sleeps when its cells have finished', state);
    }
    const rest = model.protectedFor(Date.now() / 1000);
    return rest > 0 ? trans.__('%1, protected for %2', state, duration(rest)) : state;
  }

  private _press(): void {
    const { commands, preferences } = this.context;
    const kernel = this.kernel.model;
    const action = preferences.values.defaultAction;
    if (kernel === null || action === 'menu') {
      this._open();
      return;
    }
    const args = { kernelId: kernel.id };
    const id = kernel.awake ? IDS[action] : IDS.wake;
    if (commands.isEnabled(id, args)) {
      void commands.execute(id, args);
    } else {
      this._open();
    }
  }

  private _key(event: React.KeyboardEvent): void {
    if (event.key === 'ArrowDown' && this.kernel.model !== null) {
      event.preventDefault();
      this._open();
    }
  }

  private _contextMenu(event: React.MouseEvent): void {
    if (this.kernel.model !== null) {
      event.preventDefault();
      event.stopPropagation();
      this._open();
    }
  }

  private _open(): void {
    const { commands, trans } = this.context;
    const kernelId = this.kernel.model?.id ?? '';
    const menu = new Menu({ commands });
    menu.addClass('jp-gpuCkpt-menu');
    for (const command of [IDS.suspend, IDS.checkpoint, IDS.wake]) {
      menu.addItem({ command, args: { kernelId } });
    }
    if (commands.isEnabled(IDS.stay, { kernelId })) {
      menu.addItem({ command: IDS.stay, args: { kernelId } });
    }
    menu.addItem({ type: 'separator' });
    const protections = new Menu({ commands });
    protections.title.label = trans.__('Protect kernel for');
    for (const seconds of PROTECTIONS) {
      protections.addItem({ command: IDS.protect, args: { kernelId, seconds, isMenu: true } });
    }
    menu.addItem({ type: 'submenu', submenu: protections });
    menu.addItem({ type: 'separator' });
    menu.addItem({ command: IDS.explain, args: { kernelId } });
    menu.aboutToClose.connect(() => this.node.querySelector<HTMLElement>('[aria-haspopup]')?.focus());
    const { left, bottom } = this.node.getBoundingClientRect();
    menu.open(left, bottom);
    menu.activeIndex = 0;
  }

  private _renew(): void {
    this.update();
  }
}
