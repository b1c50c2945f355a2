/** A card that says, once for each user, what happens to idle kernels and how to keep one. */

import { ReactWidget } from '@jupyterlab/ui-components';
import { Widget } from '@lumino/widgets';
import * as React from 'react';

import type { IPolicy } from './api';
import type { IContext } from './context';
import { duration } from './words';

/** Show the card once the settings and the policy are known, unless it was closed before, or nothing would happen. */
export function introduce(context: IContext): void {
  const { host, preferences } = context;
  let card: Introduction | null = null;
  const renew = () => {
    const { policy } = host;
    const wanted = preferences.loaded && preferences.values.introduction && host.reason === '';
    if (wanted && policy !== null && acts(policy, host.gpus)) {
      if (card === null) {
        card = new Introduction(context, policy);
        // The first stop of the Tab key: at the end of the page nobody would come by.
        Widget.attach(card, document.body, document.body.firstElementChild as HTMLElement | null);
      }
    } else {
      card?.dispose();
      card = null;
    }
  };
  preferences.changed.connect(renew);
  host.changed.connect(renew);
  renew();
}

function acts(policy: IPolicy, gpus: boolean): boolean {
  return (gpus || policy.without_device_memory) && (policy.suspend_after > 0 || policy.checkpoint_after > 0);
}

class Introduction extends ReactWidget {
  constructor(
    private readonly context: IContext,
    private readonly policy: IPolicy
  ) {
    super();
    this.addClass('jp-gpuCkpt-card');
    this.node.setAttribute('role', 'dialog');
    this.node.setAttribute('aria-labelledby', 'gpu-ckpt-card-title');
  }

  protected override render(): React.JSX.Element {
    const { host, trans } = this.context;
    const { suspend_after, checkpoint_after, without_device_memory, notice } = this.policy;
    return (
      <div onKeyDown={event => event.key === 'Escape' && this._close()}>
        <h2 id="gpu-ckpt-card-title">{trans.__('Idle kernels go to sleep')}</h2>
        <ul>
          {host.gpus && suspend_after > 0 && (
            <li>
              {trans.__(
                'A kernel with GPU memory that is idle for %1 leaves the GPU. Its process stays in host memory.',
                duration(suspend_after)
              )}
            </li>
          )}
          {checkpoint_after > 0 && (
            <li>
              {without_device_memory
                ? trans.__(
                    'After %1, every idle kernel is saved to disk, and its process ends.',
                    duration(checkpoint_after)
                  )
                : trans.__('After %1, it is saved to disk, and its process ends.', duration(checkpoint_after))}
            </li>
          )}
          <li>{trans.__('The next cell that you run brings it back, with every variable.')}</li>
        </ul>
        <p>
          {notice > 0 && trans.__('The status bar counts down before, and can keep the kernel.')}{' '}
          {trans.__(
            'To keep one for longer, choose "Protect kernel for" in the menu of the GPU button of its notebook, or run %1 in it.',
            '%gpu_checkpoint --protect 2h'
          )}
        </p>
        <div className="jp-gpuCkpt-card-actions">
          <button className="jp-Button jp-mod-styled jp-mod-accept" onClick={() => this._close()}>
            {trans.__('Got it')}
          </button>
        </div>
      </div>
    );
  }

  private _close(): void {
    this.context.preferences.set('introduction', false).catch((error: unknown) => {
      console.warn('The introduction to idle kernels will be shown again.', error);
    });
    this.hide();
  }
}
