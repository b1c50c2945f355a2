/** The kernel of each notebook, and the notebooks of each kernel. */

import type { ISessionContext } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import type { Kernel, KernelMessage, ServiceManager } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { type ISignal, Signal } from '@lumino/signaling';

import type { KernelModel } from './kernel';
import type { Kernels } from './kernels';

/** Messages that only a kernel that is awake sends; the server sends all others for it, too. */
const SPOKEN = new Set(['execute_input', 'execute_result', 'display_data', 'stream']);

/** The kernels of all open documents. */
export class NotebookKernels {
  constructor(private readonly kernels: Kernels) {}

  /** The kernel of a document: one object as long as that is open. */
  of(context: ISessionContext): NotebookKernel {
    let found = this._open.get(context);
    if (found === undefined) {
      const kernel = (found = new NotebookKernel(context, this.kernels));
      this._open.set(context, kernel);
      context.disposed.connect(() => kernel.dispose());
    }
    return found;
  }

  private readonly _open = new WeakMap<ISessionContext, NotebookKernel>();
}

/** The kernel one open notebook has now. */
export class NotebookKernel implements IDisposable {
  constructor(
    private readonly context: ISessionContext,
    private readonly kernels: Kernels
  ) {
    context.kernelChanged.connect(this._replaced, this);
    context.connectionStatusChanged.connect(this._connected, this);
    context.iopubMessage.connect(this._heard, this);
    kernels.changed.connect(this._moved, this);
  }

  /** The notebook has another kernel, or the kernel changed. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get model(): KernelModel | null {
    const id = this.context.session?.kernel?.id;
    return id === undefined ? null : this.kernels.get(id);
  }

  get isDisposed(): boolean {
    return this._disposed;
  }

  dispose(): void {
    this._disposed = true;
    Signal.clearData(this);
  }

  private _replaced(): void {
    this._changed.emit();
  }

  private _moved(_: Kernels, model: KernelModel | null): void {
    this._reconnect();
    if (model === null || model.id === this.context.session?.kernel?.id) {
      this._changed.emit();
    }
  }

  private _heard(context: ISessionContext, { header }: KernelMessage.IMessage): void {
    const id = context.session?.kernel?.id;
    if (id !== undefined && SPOKEN.has(header.msg_type)) {
      void this.kernels.heard(id);
    }
  }

  /** A connection that comes back was away: so may the server have been. */
  private _connected(_: ISessionContext, status: Kernel.ConnectionStatus): void {
    if (status === 'connected') {
      if (this._lost) {
        this._lost = false;
        this.kernels.doubt();
      }
      this._had = true;
    } else {
      this._lost = this._had;
    }
  }

  /**
   * The server has been heard of while the connection to the kernel is down.
   *
   * JupyterLab tries seven times, after ever longer pauses (up to a minute), and then no more: a server that was away
   * for longer would have to be waited for, or the page reloaded.
   */
  private _reconnect(): void {
    const kernel = this.context.session?.kernel;
    if (!this._lost || !kernel || !this.kernels.find(kernel.id) || Date.now() - this._reconnected < PATIENCE) {
      return;
    }
    this._reconnected = Date.now();
    kernel.reconnect().catch(() => undefined); // it retries by itself
  }

  private readonly _changed = new Signal<this, void>(this);
  private _disposed = false;
  private _had = false;
  private _reconnected = 0;
  private _lost = false;
}

/** Milliseconds that a connection is given to come about. */
const PATIENCE = 5000;

/** The path of the notebook (or console) that has a kernel; empty if none has. */
export function pathOf(services: ServiceManager.IManager, kernelId: string): string {
  for (const session of services.sessions.running()) {
    if (session.kernel?.id === kernelId) {
      return session.path;
    }
  }
  return '';
}

/** The name of a kernel for its user: its notebook's name, else the beginning of its id. */
export function nameOf(services: ServiceManager.IManager, kernelId: string): string {
  return PathExt.basename(pathOf(services, kernelId)) || kernelId.slice(0, 8);
}
