/** Another kernel from a save point: what it would have otherwise is shown before; its copy of the notebook is opened. */

import { Dialog, showDialog, showErrorMessage } from '@jupyterlab/apputils';
import * as React from 'react';

import type { IBranchJob, IBranchPlan } from './api';
import { Refused } from './client';
import type { IContext } from './context';
import type { KernelModel } from './kernel';

/** Milliseconds between two questions whether the kernel has started. */
const POLL = 500;

/** Ask, start the kernel, and open its notebook. */
export async function branch(context: IContext, kernel: KernelModel, name: string): Promise<void> {
  const { client, commands, trans } = context;
  try {
    if (!(await confirm(context, name, await client.branchPlan(kernel.id, name)))) {
      return;
    }
    let job: IBranchJob = await client.branch(kernel.id, name);
    while (job.ended === null) {
      await new Promise(resolve => setTimeout(resolve, POLL));
      job = await client.branchJob(job.id);
    }
    if (job.error !== null) {
      throw new Refused(409, job.error.message, job.error);
    }
    if (job.result?.notebook) {
      await commands.execute('docmanager:open', { path: job.result.notebook });
    }
  } catch (error) {
    const hint = error instanceof Refused ? (error.detail?.hint ?? '') : '';
    await showErrorMessage(trans.__('No kernel was started from %1', name), `${(error as Error).message} ${hint}`);
  }
}

async function confirm({ trans }: IContext, name: string, { differs, shared }: IBranchPlan): Promise<boolean> {
  const { button } = await showDialog({
    title: trans.__('Start another kernel from %1?', name),
    body: (
      <div className="jp-gpuCkpt-explain">
        <p>{trans.__('It has all variables of the save point, and a copy of the notebook. This kernel runs on.')}</p>
        {differs.length > 0 && <p>{trans.__('This cannot exist twice, and is otherwise in the new kernel:')}</p>}
        <ul>
          {differs.map(({ kind, what, becomes }) => (
            <li key={`${kind} ${what}`}>
              {what} ({becomes})
            </li>
          ))}
        </ul>
        {shared.length > 0 && <p>{trans.__('Both kernels can write to: %1', shared.join(', '))}</p>}
      </div>
    ),
    buttons: [Dialog.cancelButton(), Dialog.okButton({ label: trans.__('Start') })]
  });
  return button.accept;
}
