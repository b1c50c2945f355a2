/** Going back to a save point: asks before; the notebook goes back with its kernel if the user wants that. */

import { Dialog, showDialog } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';

import type { FilesChoice, IBackJob, ISavePoint } from './api';
import { Refused } from './client';
import type { IContext } from './context';
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
  const back = async (files: FilesChoice | null) => {
    const begun = client.back(kernel.id, point.name, files, withNotebook);
    await kernels.request(kernel.id, 'back', () => begun);
    return begun;
  };
  let job: IBackJob | null = null;
  try {
    job = await back(null);
  } catch (error) {
    const files = isAboutFiles(error) ? await chooseFiles(context, error) : null;
    if (files !== null) {
      job = await back(files).catch((second: unknown) => {
        notifier.refused(kernel, 'back', second);
        return null;
      });
    } else if (!isAboutFiles(error)) {
      notifier.refused(kernel, 'back', error);
    }
  }
  if (withNotebook && job !== null) {
    await show(context, notifier, kernel, job);
  }
}

function isAboutFiles(error: unknown): error is Refused {
  return error instanceof Refused && error.detail?.code === 'FILES_DIFFER';
}

/** What the kernel gets of files that are not as they were; null: the user does not go back. */
/** Ask what becomes of files, among the choices that can be done for all of them; without one, say what to do. */
async function chooseFiles({ trans }: IContext, error: Refused): Promise<FilesChoice | null> {
  const files = error.detail?.details?.files ?? [];
  const labels: Record<FilesChoice, string> = {
    then: trans.__('Put files back'),
    now: trans.__('Leave files as they are')
  };
  const choices = (['then', 'now'] as const).filter(choice => files.every(file => file.choices.includes(choice)));
  const { button } = await showDialog({
    title: trans.__('Some files are not as they were'),
    body: choices.length > 0 ? error.message : `${error.message} ${error.detail?.hint ?? ''}`,
    buttons: [Dialog.cancelButton(), ...choices.map(choice => Dialog.okButton({ label: labels[choice] }))]
  });
  return choices.find(choice => labels[choice] === button.label) ?? null;
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
