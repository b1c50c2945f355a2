/** In the status bar, where nothing pushes it out of sight: that the kernel of the document in front sleeps; a click wakes it. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ISessionContext } from '@jupyterlab/apputils';
import { type ISignal, Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import type { IContext } from './context';
import { phaseIcon } from './icons';
import { IDS } from './ids';
import type { NotebookKernel, NotebookKernels } from './notebooks';
import { nameOf } from './notebooks';
import { status } from './words';

export class StatusItem extends Widget {
  constructor(
    private readonly context: IContext,
    private readonly shell: JupyterFrontEnd.IShell,
    private readonly open: NotebookKernels
  ) {
    super();
    this.addClass('jp-gpuCkpt-status');
    this._button.type = 'button';
    this._button.append(this._icon, this._label);
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
    const said = kernel && status(kernel, nameOf(services, kernel.id), trans);
    if (kernel !== null && said !== null) {
      this._label.textContent = said.text;
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
    if (kernel) {
      const command = kernel.resting ? IDS.wake : IDS.stay;
      void this.context.commands.execute(command, { kernelId: kernel.id });
    }
  }

  private readonly _button = document.createElement('button');
  private readonly _icon = document.createElement('span');
  private readonly _label = document.createElement('span');
  private readonly _activeChanged = new Signal<this, void>(this);
  private _active = true;
  private _kernel: NotebookKernel | null = null;
}
