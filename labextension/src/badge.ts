/** The badge beside the kernel's name: its device memory, or that it sleeps and the memory freed. */

import { Widget } from '@lumino/widgets';

import type { IContext } from './context';
import type { NotebookKernel } from './notebooks';
import { badge } from './words';

export class Badge extends Widget {
  constructor(
    private readonly context: IContext,
    private readonly kernel: NotebookKernel
  ) {
    super({ node: document.createElement('span') });
    this.addClass('jp-gpuCkpt-badge');
    this.node.setAttribute('role', 'status');
    this.node.setAttribute('aria-label', context.trans.__('GPU memory of this kernel'));
    kernel.changed.connect(this._renew, this);
    context.preferences.changed.connect(this._renew, this);
    this._renew();
  }

  override dispose(): void {
    this.context.preferences.changed.disconnect(this._renew, this);
    super.dispose();
  }

  private _renew(): void {
    const { preferences, trans } = this.context;
    const kernel = this.kernel.model;
    const text = kernel !== null && preferences.values.showBadge ? badge(kernel, trans) : '';
    if (text !== this.node.textContent) {
      this.node.textContent = text;
    }
    // The memory in use changes all the time: nobody wants to hear that.
    this.node.setAttribute('aria-live', kernel?.asleep ? 'polite' : 'off');
    this.node.title = kernel?.asleep ? trans.__('The next cell that you run wakes the kernel') : '';
    this.node.dataset.phase = kernel?.phase ?? 'plain';
    this.setHidden(text === '');
  }
}
