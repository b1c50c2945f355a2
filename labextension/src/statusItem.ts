/**
 * In the status bar, where nothing pushes it out of sight: that the kernel of the document in front sleeps, and a click
 * wakes it; or that it is idle and sleeps soon, and a click keeps it.
 */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ISessionContext } from '@jupyterlab/apputils';
import { type ISignal, Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import type { IContext } from './context';
import { phaseIcon } from './icons';
import { IDS } from './ids';
import type { NotebookKernel, NotebookKernels } from './notebooks';
import { nameOf } from './notebooks';
import { type IStatusText, status } from './words';

/** Milliseconds between two steps of a countdown. */
const SECOND = 1000;

export class StatusItem extends Widget {
  constructor(
    private readonly context: IContext,
    private readonly shell: JupyterFrontEnd.IShell,
    private readonly open: NotebookKernels
  ) {
    super();
    this.addClass('jp-gpuCkpt-status');
    this._button.type = 'button';
    this._label.className = 'jp-gpuCkpt-status-label';
    this._offer.className = 'jp-gpuCkpt-status-offer';
    this._button.append(this._icon, this._label, this._offer);
    this._button.onclick = () => this._press();
    this.node.append(this._button);
    shell.currentChanged?.connect(this._follow, this);
    context.kernels.changed.connect(this._renew, this);
    this._follow();
  }

  /** Whether there is something to say. */
  get active(): boolean {
    return this._active;
  }

  get activeChanged(): ISignal<this, void> {
    return this._activeChanged;
  }

  /** Another document is in front. */
  private _follow(): void {
    this._kernel?.changed.disconnect(this._renew, this);
    const shown = this.shell.currentWidget as { sessionContext?: ISessionContext } | null; // notebooks, consoles
    this._kernel = shown?.sessionContext ? this.open.of(shown.sessionContext) : null;
    this._kernel?.changed.connect(this._renew, this);
    this._renew();
  }

  private _renew(): void {
    const { services, trans } = this.context;
    const kernel = this._kernel?.model ?? null;
    const said = kernel && status(kernel, nameOf(services, kernel.id), trans, Date.now() / 1000);
    window.clearTimeout(this._clock);
    if (said?.does === 'keep') {
      this._clock = window.setTimeout(() => this._renew(), SECOND);
    }
    if (kernel !== null && said !== null) {
      this._does = said.does;
      this._label.textContent = said.text;
      this._offer.textContent = said.offer ?? '';
      this._button.title = said.title;
      this._button.setAttribute('aria-label', said.title);
      this._button.disabled = said.does === null;
      if (this.node.dataset.phase !== kernel.phase) {
        this.node.dataset.phase = kernel.phase;
        this._icon.replaceChildren(phaseIcon(kernel.phase).element({ tag: 'span' }));
      }
    }
    if (this._active !== (said !== null)) {
      this._active = said !== null;
      this.setHidden(!this._active);
      this._activeChanged.emit();
    }
  }

  private _press(): void {
    const kernel = this._kernel?.model;
    if (kernel && this._does !== null) {
      void this.context.commands.execute(IDS[this._does], { kernelId: kernel.id });
    }
  }

  private readonly _button = document.createElement('button');
  private readonly _icon = document.createElement('span');
  private readonly _label = document.createElement('span');
  private readonly _offer = document.createElement('span');
  private readonly _activeChanged = new Signal<this, void>(this);
  private _active = true;
  private _clock = 0;
  private _does: IStatusText['does'] = null;
  private _kernel: NotebookKernel | null = null;
}
