/** Objects that every part of the front end works with. */

import type { INotebookTracker } from '@jupyterlab/notebook';
import type { ServiceManager } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';

import type { Client } from './client';
import type { Host } from './host';
import type { Kernels } from './kernels';
import type { Preferences } from './preferences';

export interface IContext {
  client: Client;
  commands: CommandRegistry;
  host: Host;
  kernels: Kernels;
  /** The open ones; null where the application has none. */
  notebooks: INotebookTracker | null;
  preferences: Preferences;
  services: ServiceManager.IManager;
  trans: TranslationBundle;
}
