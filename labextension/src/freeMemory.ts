/** One click that frees a GPU: every idle kernel on it is suspended. */

import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';

import type { IGpu } from './api';
import type { IContext } from './context';
import { isProtected } from './commands';
import type { KernelModel } from './kernel';
import { nameOf } from './notebooks';
import type { Notifier } from './notifications';
import { bytes } from './words';

/** Suspend the idle kernels of a GPU, after a question if the settings say so. */
export async function freeMemory(context: IContext, notifier: Notifier, gpu: IGpu): Promise<void> {
  const { kernels, preferences, services, trans } = context;
  try {
    await kernels.reload();
  } catch (error) {
    notifier.undone(trans.__('No memory was freed on %1.', gpu.name), error);
    return;
  }
  const idle = Object.keys(gpu.kernels)
    .map(id => kernels.get(id))
    .filter(kernel => isIdle(context, kernel));
  if (idle.length === 0) {
    Notification.info(trans.__('No kernel on this GPU is idle and unprotected.'), { autoClose: 5000 });
    return;
  }
  const freed = bytes(idle.reduce((total, kernel) => total + (gpu.kernels[kernel.id] ?? 0), 0));
  if (preferences.values.confirmFreeMemory) {
    const names = idle.map(kernel => nameOf(services, kernel.id)).join(', ');
    const answer = await showDialog({
      title: trans.__('Free memory on %1?', gpu.name),
      body: trans.__('%1 would be suspended, which frees %2. The next cell brings a kernel back.', names, freed),
      buttons: [Dialog.cancelButton(), Dialog.okButton({ label: trans.__('Suspend') })]
    });
    if (!answer.button.accept) {
      return;
    }
  }
  await Promise.all(
    idle.map(kernel =>
      kernels.begin(kernel.id, 'suspend').catch((error: unknown) => notifier.refused(kernel, 'suspend', error))
    )
  );
}

function isIdle({ services }: IContext, kernel: KernelModel): boolean {
  if (kernel.phase !== 'running' || isProtected(kernel) || kernel.policy?.idle_s === 0) {
    return false;
  }
  for (const session of services.sessions.running()) {
    if (session.kernel?.id === kernel.id && session.kernel.execution_state === 'busy') {
      return false;
    }
  }
  return true;
}
