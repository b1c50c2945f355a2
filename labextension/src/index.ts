/** The plugin: makes the parts and puts them into JupyterLab, or into Notebook 7, which is built from the same. */

import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import { INotebookTracker, type NotebookPanel } from '@jupyterlab/notebook';
import { IRunningSessionManagers } from '@jupyterlab/running';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { Badge } from './badge';
import { CheckpointButton } from './button';
import { Client } from './client';
import { addCommands, PROTECTIONS } from './commands';
import type { IContext } from './context';
import { follow } from './events';
import { GpuPanel } from './gpuPanel';
import { Gpus } from './gpus';
import { Host } from './host';
import { IDS } from './ids';
import { introduce } from './introduction';
import { Kernels } from './kernels';
import { NotebookKernels } from './notebooks';
import { Notifier } from './notifications';
import { Preferences } from './preferences';
import { Sleepers } from './sleepers';
import { followWidgets } from './sleepingWidgets';
import { StatusItem } from './statusItem';
import { WakingCells } from './wakingCells';

const ID = 'jupyter-gpu-ckpt:plugin';

function activate(
  app: JupyterFrontEnd,
  translator: ITranslator | null,
  settings: ISettingRegistry | null,
  toolbars: IToolbarWidgetRegistry | null,
  notebooks: INotebookTracker | null,
  palette: ICommandPalette | null,
  running: IRunningSessionManagers | null,
  statusBar: IStatusBar | null
): void {
  const trans = (translator ?? nullTranslator).load('jupyter_gpu_ckpt');
  const services = app.serviceManager;
  const client = new Client(services.serverSettings);
  const preferences = new Preferences();
  const kernels = new Kernels(client, { standby: () => (preferences.values.pollHidden ? 'never' : 'when-hidden') });
  const host = new Host(client);
  const gpus = new Gpus(client);
  const { commands } = app;
  const context: IContext = { client, commands, host, kernels, notebooks, preferences, services, trans };
  const notifier = new Notifier(context, kernelId => {
    addPanel();
    app.shell.activateById(panel.id);
    panel.showFailures(kernelId);
  });

  if (settings !== null) {
    preferences
      .load(settings, ID)
      .catch((error: unknown) =>
        console.warn('The settings of sleeping kernels could not be loaded; defaults apply.', error)
      );
  }
  follow(services, {
    receive: event => {
      kernels.receive(event);
      gpus.receive(event);
    },
    doubt: () => kernels.doubt()
  });
  kernels.changed.connect(() => host.retry());
  kernels.doubted.connect(() => gpus.doubt());
  void host.load(trans.__('The extension jupyter_gpu_ckpt is not enabled on this server.'));

  // JupyterLab remembers where the last context menu was opened, also when that was closed long ago.
  const pointed = () => {
    const node = app.contextMenuHitTest(node => node.dataset.context?.startsWith('gpu-ckpt:') ?? false);
    return node?.dataset.context?.slice('gpu-ckpt:'.length);
  };
  addCommands(context, notifier, isPointed => {
    const id = isPointed ? pointed() : notebooks?.currentWidget?.sessionContext.session?.kernel?.id;
    return id ?? null;
  });
  notebooks?.currentChanged.connect(() => app.commands.notifyCommandChanged());

  if (palette !== null) {
    const category = trans.__('Sleeping kernels');
    for (const command of [IDS.checkpoint, IDS.suspend, IDS.wake, IDS.save, IDS.stay, IDS.keep, IDS.explain]) {
      palette.addItem({ command, category });
    }
    for (const seconds of PROTECTIONS) {
      palette.addItem({ command: IDS.protect, category, args: { seconds } });
    }
  }

  const open = new NotebookKernels(kernels);
  const kernelOf = (panel: NotebookPanel) => open.of(panel.sessionContext);
  toolbars?.addFactory<NotebookPanel>('Notebook', 'gpu-ckpt-badge', panel => new Badge(context, kernelOf(panel)));
  toolbars?.addFactory<NotebookPanel>(
    'Notebook',
    'gpu-ckpt-button',
    panel => new CheckpointButton(context, kernelOf(panel))
  );
  new WakingCells(context);
  if (notebooks !== null) {
    followWidgets(context, notebooks, open);
  }
  const item = new StatusItem(context, app.shell, open);
  if (statusBar !== null) {
    const shown = { isActive: () => item.active, activeStateChanged: item.activeChanged };
    statusBar.registerStatusItem('gpu-ckpt:status', { item, align: 'left', rank: 1.5, priority: 1, ...shown });
  } else {
    item.id = 'gpu-ckpt-status';
    app.shell.add(item, 'menu', { rank: 10000 }); // Notebook 7 has no status bar; beside the kernel's status
  }
  running?.add(new Sleepers(context));

  const panel = new GpuPanel(context, notifier, gpus);
  const addPanel = () => {
    if (!panel.isAttached) {
      app.shell.add(panel, 'right', { rank: 600, type: 'GPU' });
    }
  };
  const showPanel = () => {
    if (preferences.values.showGpuPanel) {
      addPanel();
    } else {
      panel.parent = null;
    }
  };
  preferences.changed.connect(showPanel);
  void app.started.then(() => {
    showPanel();
    introduce(context);
  });
}

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'Suspend, checkpoint and wake notebook kernels with their GPU memory.',
  autoStart: true,
  optional: [
    ITranslator,
    ISettingRegistry,
    IToolbarWidgetRegistry,
    INotebookTracker,
    ICommandPalette,
    IRunningSessionManagers,
    IStatusBar
  ],
  activate
};

export default plugin;
