/** "Why can't I?": preflight in plain words. */

import { Dialog, showDialog } from '@jupyterlab/apputils';
import * as React from 'react';

import type { IFinding } from './api';
import { Refused } from './client';
import type { IContext } from './context';
import type { KernelModel } from './kernel';
import { nameOf } from './notebooks';

interface IAnswer {
  head: string;
  findings: IFinding[];
}

/** Ask the server, and show what it says. */
export async function explain(context: IContext, kernel: KernelModel): Promise<void> {
  const { trans } = context;
  const { head, findings } = await answer(context, kernel);
  await showDialog({
    title: trans.__('Can %1 leave the GPU?', nameOf(context.services, kernel.id)),
    body: (
      <div className="jp-gpuCkpt-explain">
        <p>{head}</p>
        {findings.length > 0 && (
          <ul>
            {findings.map(finding => (
              <li key={finding.code + finding.text} className={finding.blocks ? 'jp-mod-blocks' : ''}>
                {finding.text} <em>{finding.hint}</em>
              </li>
            ))}
          </ul>
        )}
      </div>
    ),
    buttons: [Dialog.okButton({ label: trans.__('Close') })]
  });
}

async function answer({ client, host, trans }: IContext, kernel: KernelModel): Promise<IAnswer> {
  if (host.reason !== '') {
    return { head: trans.__('No: this server cannot checkpoint kernels. %1', host.reason), findings: [] };
  }
  try {
    const { ok, findings } = await client.preflight(kernel.id);
    if (!ok) {
      return { head: trans.__('Not now. The kernel runs on; this is in the way:'), findings };
    }
    return findings.length > 0
      ? { head: trans.__('Yes. But:'), findings }
      : { head: trans.__('Yes: nothing is in the way.'), findings };
  } catch (error) {
    const hint = error instanceof Refused ? (error.detail?.hint ?? '') : '';
    return { head: `${(error as Error).message} ${hint}`.trim(), findings: [] };
  }
}
