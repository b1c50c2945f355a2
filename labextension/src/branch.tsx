/** Another kernel from a save point: what it would have otherwise is shown before; its copy of the notebook is opened. */

import { Dialog, Notification, showDialog, showErrorMessage } from '@jupyterlab/apputils';
import * as React from 'react';

import type { IBranchPlan } from './api';
import { Refused } from './client';
import type { IContext } from './context';
import { followed } from './jobs';
import type { KernelModel } from './kernel';
import type { Notifier } from './notifications';

/** Ask, start the kernel, and open its notebook. */
export async function branch(context: IContext, notifier: Notifier, kernel: KernelModel, name: string): Promise<void> {
  const { commands, trans } = context;
  let path: string | null;
  try {
    path = await start(context, notifier, kernel, name);
  } catch (error) {
    const hint = error instanceof Refused ? (error.detail?.hint ?? '') : '';
    await showErrorMessage(trans.__('No kernel was started from %1', name), `${(error as Error).message} ${hint}`);
    return;
  }
  if (path === '') {
    Notification.info(trans.__('No notebook is known for this kernel. It is among the running kernels now.'));
  } else if (path !== null) {
    await commands.execute('docmanager:open', { path });
  }
}

/** Start the kernel; the path of its notebook, empty if it has none, null if the user does not want it. */
async function start(context: IContext, notifier: Notifier, kernel: KernelModel, name: string): Promise<string | null> {
  const { client, trans } = context;
  if (!(await confirm(context, name, await client.branchPlan(kernel.id, name)))) {
    return null;
  }
  const begin = (acceptChangedFiles: boolean) =>
    notifier.during(trans.__('Starting another kernel from %1', name), async () =>
      followed(await client.branch(kernel.id, name, acceptChangedFiles), id => client.branchJob(id))
    );
  let { error, result } = await begin(false);
  if (error?.code === 'FILE_CHANGED') {
    const { button } = await showDialog({
      title: trans.__('Some files are not as they were'),
      body: error.message,
      buttons: [Dialog.cancelButton(), Dialog.okButton({ label: trans.__('Leave files as they are') })]
    });
    if (!button.accept) {
      return null;
    }
    ({ error, result } = await begin(true));
  }
  if (error !== null) {
    throw new Refused(409, error.message, error);
  }
  return result?.notebook ?? '';
}

async function confirm({ trans }: IContext, name: string, plan: IBranchPlan): Promise<boolean> {
  const { differs, shared, unsafe } = plan;
  if (unsafe.length > 0) {
    await showDialog({
      title: trans.__('No kernel can be started from %1', name),
      body: (
        <div className="jp-gpuCkpt-explain">
          <p>{trans.__('Two kernels must not continue with this:')}</p>
          <List lines={unsafe} />
          <p>{trans.__('End it in the kernel and save again.')}</p>
        </div>
      ),
      buttons: [Dialog.okButton({ label: trans.__('Close') })]
    });
    return false;
  }
  const { button } = await showDialog({
    title: trans.__('Start another kernel from %1?', name),
    body: (
      <div className="jp-gpuCkpt-explain">
        <p>{trans.__('It has all variables of the save point, and a copy of the notebook. This kernel runs on.')}</p>
        {differs.length > 0 && <p>{trans.__('This cannot exist twice, and is otherwise in the new kernel:')}</p>}
        <List lines={differs.map(({ what, becomes }) => `${what} (${becomes})`)} />
        {shared.length > 0 && <p>{trans.__('Both kernels can write to:')}</p>}
        <List lines={shared} />
      </div>
    ),
    buttons: [Dialog.cancelButton(), Dialog.okButton({ label: trans.__('Start') })]
  });
  return button.accept;
}

function List({ lines }: { lines: string[] }): React.JSX.Element | null {
  return lines.length === 0 ? null : (
    <ul>
      {lines.map((line, index) => (
        <li key={index}>{line}</li>
      ))}
    </ul>
  );
}
