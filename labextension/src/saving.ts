/** Saving a kernel under a name that the user is asked for, and its notebook's page before. */

import { InputDialog } from '@jupyterlab/apputils';

import type { IContext } from './context';
import type { KernelModel } from './kernel';
import type { Notifier } from './notifications';
import { documents, savePages } from './pages';
import { localTime } from './words';

export async function save(context: IContext, notifier: Notifier, kernel: KernelModel): Promise<void> {
  const { client, kernels, trans } = context;
  const known = await client.saves(kernel.id).catch(() => []); // the server refuses a name that is used
  const { value } = await InputDialog.getText({
    title: trans.__('Save all variables'),
    label: trans.__('Name of the save point'),
    text: unused(
      localTime(new Date()),
      known.map(({ name }) => name)
    )
  });
  const name = value?.trim();
  if (!name) {
    return;
  }
  const unsaved = await savePages(documents(context, kernel).filter(({ canSave }) => canSave !== false));
  if (unsaved !== null) {
    const text = trans.__('%1 was not saved; the save point has it as it is on the disk.', unsaved.name);
    notifier.undone(text, unsaved.error);
  }
  await kernels
    .request(kernel.id, 'save', () => client.save(kernel.id, name))
    .catch((error: unknown) => notifier.refused(kernel, 'save', error));
}

/** `name`, followed by a number where it is one of `names`. */
export function unused(name: string, names: string[]): string {
  let found = name;
  for (let number = 2; names.includes(found); number += 1) {
    found = `${name} ${number}`;
  }
  return found;
}
