/** Cells that wait for a kernel on its way back say so, and how far it is. */

import type { Cell } from '@jupyterlab/cells';
import { type Notebook, NotebookActions, NotebookPanel } from '@jupyterlab/notebook';
import { Panel, PanelLayout, Widget } from '@lumino/widgets';

import type { IContext } from './context';
import type { KernelModel } from './kernel';
import type { Kernels } from './kernels';

export class WakingCells {
  constructor(private readonly context: IContext) {
    NotebookActions.executionScheduled.connect((_, { notebook, cell }) => this._scheduled(notebook, cell));
    NotebookActions.executed.connect((_, { cell }) => this._drop(cell));
    context.kernels.changed.connect(this._moved, this);
  }

  private _scheduled(notebook: Notebook, cell: Cell): void {
    const panel = notebook.parent;
    const id = panel instanceof NotebookPanel ? panel.sessionContext.session?.kernel?.id : undefined;
    if (id === undefined || cell.model.type !== 'code') {
      return;
    }
    this._waiting.set(cell, { id, line: null });
    cell.disposed.connect(this._drop, this);
    this._show(cell, this.context.kernels.get(id));
  }

  private _moved(kernels: Kernels, model: KernelModel | null): void {
    for (const [cell, { id }] of [...this._waiting]) {
      if (model === null || model.id === id) {
        this._show(cell, kernels.get(id));
      }
    }
  }

  private _show(cell: Cell, kernel: KernelModel): void {
    const waiting = this._waiting.get(cell);
    if (waiting === undefined) {
      return;
    }
    if (!kernel.asleep) {
      waiting.line?.dispose();
      waiting.line = null;
      return;
    }
    if (waiting.line === null) {
      waiting.line = new Line(this.context.trans.__('Kernel of this cell'));
      insertLine(cell, waiting.line);
    }
    waiting.line.showProgress(this._text(kernel), kernel.progress?.fraction ?? 0);
  }

  private _text(kernel: KernelModel): string {
    const { trans } = this.context;
    const percent = Math.round(100 * (kernel.progress?.fraction ?? 0));
    switch (kernel.phase) {
      case 'suspending':
      case 'checkpointing':
        return trans.__('[*] the kernel is being put to sleep and wakes for this cell … %1 %', percent);
      default:
        return trans.__('[*] waking kernel … %1 %', percent);
    }
  }

  private _drop(cell: Cell): void {
    const waiting = this._waiting.get(cell);
    if (waiting !== undefined) {
      waiting.line?.dispose();
      this._waiting.delete(cell);
      cell.disposed.disconnect(this._drop, this);
    }
  }

  private readonly _waiting = new Map<Cell, { id: string; line: Line | null }>();
}

/** One line with a bar under it. */
class Line extends Widget {
  constructor(label: string) {
    super();
    this.addClass('jp-gpuCkpt-waking');
    this.node.setAttribute('role', 'progressbar');
    this.node.setAttribute('aria-label', label);
    this.node.setAttribute('aria-valuemin', '0');
    this.node.setAttribute('aria-valuemax', '100');
    this._bar.className = 'jp-gpuCkpt-waking-bar';
    this.node.append(this._label, this._bar);
  }

  showProgress(text: string, fraction: number): void {
    const percent = Math.round(100 * fraction);
    this._label.textContent = text;
    this._bar.style.width = `${percent}%`;
    this.node.setAttribute('aria-valuenow', String(percent));
    this.node.setAttribute('aria-valuetext', text);
  }

  private readonly _label = document.createElement('span');
  private readonly _bar = document.createElement('div');
}

/** Insert a line between the cell's input and its output. */
function insertLine(cell: Cell, line: Widget): void {
  const layout = cell.layout;
  if (layout instanceof PanelLayout) {
    const input = layout.widgets.findIndex(child => child instanceof Panel && child.hasClass('jp-Cell-inputWrapper'));
    layout.insertWidget(input + 1, line);
  }
}
