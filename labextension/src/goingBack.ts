/** Going back to a save point: asks before; the notebook goes back with its kernel if the user wants that. */

import { Dialog, showDialog } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';

import type { IBackJob, ISavePoint } from './api';
import { Refused } from './client';
import type { IContext } from './context';
import { type Choices, chooseFiles } from './filesQuestion';
import { followed } from './jobs';
import type { KernelModel } from './kernel';
import type { Notifier } from './notifications';
import { type Document, documents, savePages } from './pages';

export async function goBack(
  context: IContext,
  notifier: Notifier,
  kernel: KernelModel,
  point: ISavePoint
): Promise<void> {
  const { client, kernels, trans } = context;
  const label = trans.__('The notebook goes back, too; unsaved changes are saved before');
  const { button, isChecked } = await showDialog({
    title: trans.__('Go back to %1?', point.name),
    body: trans.__('The present variables are saved before, as a save point of their own.'),
    checkbox: point.has_notebook ? { label } : null,
    buttons: [Dialog.cancelButton(), Dialog.okButton({ label: trans.__('Go back') })]
  });
  const withNotebook = isChecked === true;
  if (!button.accept) {
    return;
  }
  const unsaved = withNotebook ? await savePages(documents(context, kernel)) : null;
  if (unsaved !== null) {
    notifier.undone(trans.__('%1 was not saved, so its kernel does not go back.', unsaved.name), unsaved.error);
    return;
  }
  const send = async (files: Choices | null) => {
    const begun = client.back(kernel.id, point.name, files, withNotebook);
    await kernels.request(kernel.id, 'back', () => begun);
    return begun;
  };
  const job = await begin(context, send).catch((error: unknown) => {
    notifier.refused(kernel, 'back', error);
    return null;
  });
  if (withNotebook && job !== null) {
    await show(context, notifier, kernel, job);
  }
}

/** Begin to go back, after a question about files as long as some differ; null: the user does not want it. */
async function begin(
  context: IContext,
  send: (files: Choices | null) => Promise<IBackJob>,
  files: Choices | null = null
): Promise<IBackJob | null> {
  try {
    return await send(files);
  } catch (error) {
    if (!(error instanceof Refused && error.detail?.code === 'FILES_DIFFER')) {
      throw error;
    }
    const chosen = await chooseFiles(context, error);
    return chosen && begin(context, send, { ...files, ...chosen }); // others may have changed while the user chose
  }
}

/** Show the notebook as it is on the disk once the kernel is back. */
async function show(context: IContext, notifier: Notifier, kernel: KernelModel, begun: IBackJob): Promise<void> {
  const { client, trans } = context;
  try {
    const { result } = await followed(begun, id => client.backJob(id)); // a failure of the kernel comes as an event
    if (result?.notebook_error) {
      throw new Refused(409, result.notebook_error.message, result.notebook_error);
    }
    for (const document of documents(context, kernel)) {
      if (document.localPath === result?.notebook && (await mayLoad(context, document))) {
        await document.revert();
      }
    }
  } catch (error) {
    notifier.undone(trans.__('The notebook did not go back with its kernel.'), error);
  }
}

/** Whether nothing was typed since the notebook was saved, or the user gives it up. */
async function mayLoad({ trans }: IContext, { localPath, model }: Document): Promise<boolean> {
  if (!model.dirty) {
    return true;
  }
  const { button } = await showDialog({
    title: trans.__('%1 was changed meanwhile', PathExt.basename(localPath)),
    body: trans.__('The notebook of the save point is on the disk now. To load it loses the changes.'),
    buttons: [
      Dialog.cancelButton({ label: trans.__('Keep the changes') }),
      Dialog.warnButton({ label: trans.__('Load') })
    ]
  });
  return button.accept;
}
