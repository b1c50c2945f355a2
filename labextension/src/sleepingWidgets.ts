/**
 * Widgets of a page that was loaded while their kernel sleeps say so, and offer to wake it.
 *
 * Their state is in the kernel alone: ipywidgets requests it, the request waits for the kernel, and until then each
 * of them would say that it is loading.
 */

import { CodeCell } from '@jupyterlab/cells';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { Panel, type Widget } from '@lumino/widgets';

import type { IContext } from './context';
import { phaseIcon } from './icons';
import { IDS } from './ids';
import type { KernelModel } from './kernel';
import type { NotebookKernel, NotebookKernels } from './notebooks';

const WIDGET = 'application/vnd.jupyter.widget-view+json';

/** Follow every notebook. */
export function followWidgets(context: IContext, tracker: INotebookTracker, open: NotebookKernels): void {
  const follow = (panel: NotebookPanel) => new SleepingWidgets(context, panel, open.of(panel.sessionContext));
  tracker.forEach(panel => follow(panel));
  tracker.widgetAdded.connect((_, panel) => follow(panel));
}

class SleepingWidgets {
  constructor(
    private readonly context: IContext,
    private readonly panel: NotebookPanel,
    private readonly kernel: NotebookKernel
  ) {
    this._observer = new MutationObserver(() => this._look());
    kernel.changed.connect(this._renew, this);
    panel.disposed.connect(() => {
      kernel.changed.disconnect(this._renew, this);
      this._observer.disconnect();
    });
    this._renew();
  }

  private _renew(): void {
    const model = this.kernel.model;
    if (model?.asleep) {
      this._observer.observe(this.panel.content.node, { subtree: true, childList: true });
      this._look();
    } else {
      this._observer.disconnect();
      this._shown.forEach(shown => shown.end());
      this._shown.clear();
    }
  }

  /** Outputs come late: when the kernel is known, when they are scrolled to, when a view is made anew. */
  private _look(): void {
    const model = this.kernel.model;
    if (!model?.asleep) {
      return;
    }
    for (const output of loading(this.panel)) {
      this._shown.set(output, new Placeholder(this.context, output));
    }
    for (const [output, shown] of this._shown) {
      if (shown.isThere) {
        shown.showState(model);
      } else {
        this._shown.delete(output); // the widget has come, or the output is gone
      }
    }
    this._observer.takeRecords(); // of what was done here
  }

  private readonly _observer: MutationObserver;
  private readonly _shown = new Map<HTMLElement, Placeholder>();
}

/** Outputs that are to show a widget and show a text so far. */
function* loading(panel: NotebookPanel): Iterable<HTMLElement> {
  for (const cell of panel.content.widgets) {
    if (!(cell instanceof CodeCell)) {
      continue;
    }
    const { model, widgets } = cell.outputArea;
    for (const [index, child] of widgets.entries()) {
      const output: Widget | undefined =
        child instanceof Panel ? child.widgets.find(part => part.hasClass('jp-OutputArea-output')) : undefined;
      if (output && index < model.length && WIDGET in model.get(index).data && isLoading(output.node)) {
        yield output.node;
      }
    }
  }
}

/** ipywidgets marks what it has shown, and what it has given up. */
function isLoading(node: HTMLElement): boolean {
  return node.textContent !== '' && node.firstElementChild === null && !node.classList.contains('jupyter-widgets');
}

/** Stands in an output instead of its text. */
class Placeholder {
  constructor(
    private readonly context: IContext,
    private readonly output: HTMLElement
  ) {
    this._text = output.textContent ?? '';
    this._node.className = 'jp-gpuCkpt-sleepingWidget';
    this._button.type = 'button';
    this._button.className = 'jp-gpuCkpt-link';
    this._node.append(phaseIcon('checkpointed').element({ tag: 'span' }), this._label, this._button);
    output.replaceChildren(this._node);
  }

  get isThere(): boolean {
    return this._node.parentNode === this.output && this.output.isConnected;
  }

  showState(kernel: KernelModel): void {
    const { commands, trans } = this.context;
    const waking = kernel.phase === 'waking';
    const text = waking
      ? trans.__('This widget wakes with its kernel …')
      : trans.__('This widget sleeps with its kernel.');
    if (this._label.textContent !== text) {
      this._label.textContent = text;
    }
    this._button.textContent ||= trans.__('Wake the kernel');
    this._button.hidden = !kernel.resting;
    this._button.onclick = () => void commands.execute(IDS.wake, { kernelId: kernel.id });
  }

  /** Put back what stood there, unless the widget has come. */
  end(): void {
    if (this._node.parentNode === this.output) {
      this.output.textContent = this._text;
    }
  }

  private readonly _button = document.createElement('button');
  private readonly _label = document.createElement('span');
  private readonly _node = document.createElement('div');
  private readonly _text: string;
}
