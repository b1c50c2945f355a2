/** "Why can't this kernel sleep?": preflight in plain words. */

import { Dialog, showDialog } from '@jupyterlab/apputils';
import * as React from 'react';

import { BUSY, type IFinding } from './api';
import { Refused } from './client';
import type { IContext } from './context';
import type { KernelModel } from './kernel';
import { nameOf } from './notebooks';

interface IAnswer {
  head: string;
  findings: IFinding[];
  /** A cell is all that is in the way. */
  busy?: boolean;
}

/** Show the server's preflight.  Returns whether the kernel is to sleep when its cell has finished. */
export async function explain(context: IContext, kernel: KernelModel): Promise<boolean> {
  const { trans } = context;
  const { head, findings, busy } = await answer(context, kernel);
  const close = Dialog.okButton({ label: trans.__('Close') });
  const later = Dialog.okButton({ label: trans.__('Sleep when the cell has finished') });
  const { button } = await showDialog({
    title: trans.__('Can %1 sleep?', nameOf(context.services, kernel.id)),
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
    buttons: busy ? [Dialog.cancelButton({ label: trans.__('Close') }), later] : [close]
  });
  return busy === true && button.accept;
}

async function answer({ client, host, trans }: IContext, kernel: KernelModel): Promise<IAnswer> {
  if (host.reason !== '') {
    return { head: trans.__('No: this server cannot checkpoint kernels. %1', host.reason), findings: [] };
  }
  try {
    const { ok, findings } = await client.preflight(kernel.id);
    if (!ok) {
      const busy = findings.every(({ blocks, code }) => !blocks || code === BUSY);
      return { head: trans.__('Not now. The kernel runs on. The reasons:'), findings, busy };
    }
    return findings.length > 0
      ? { head: trans.__('Yes, but note:'), findings }
      : { head: trans.__('Yes, it can be put to sleep now.'), findings };
  } catch (error) {
    const hint = error instanceof Refused ? (error.detail?.hint ?? '') : '';
    return { head: `${(error as Error).message} ${hint}`.trim(), findings: [] };
  }
}
