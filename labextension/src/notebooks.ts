/** Which notebook has which kernel, and the other way round. */

import type { ISessionContext } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import type { Kernel, ServiceManager } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { type ISignal, Signal } from '@lumino/signaling';

import type { KernelModel } from './kernel';
import type { Kernels } from './kernels';

/** The kernel one open notebook has now. */
export class NotebookKernel implements IDisposable {
  constructor(
    private readonly context: ISessionContext,
    private readonly kernels: Kernels
  ) {
    context.kernelChanged.connect(this._replaced, this);
    context.connectionStatusChanged.connect(this._connected, this);
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
    if (model === null || model.id === this.context.session?.kernel?.id) {
      this._changed.emit();
    }
  }

  /** A connection that comes back was away: so may the server have been. */
  private _connected(_: ISessionContext, status: Kernel.ConnectionStatus): void {
    if (status === 'connecting') {
      this._lost = true;
    } else if (status === 'connected' && this._lost) {
      this._lost = false;
      this.kernels.doubt();
    }
  }

  private readonly _changed = new Signal<this, void>(this);
  private _disposed = false;
  private _lost = false;
}

/** The path of the notebook (or console) that has a kernel; empty if none has. */
export function pathOf(services: ServiceManager.IManager, kernelId: string): string {
  for (const session of services.sessions.running()) {
    if (session.kernel?.id === kernelId) {
      return session.path;
    }
  }
  return '';
}

/** What to call a kernel: its notebook's name, else the beginning of its id. */
export function nameOf(services: ServiceManager.IManager, kernelId: string): string {
  return PathExt.basename(pathOf(services, kernelId)) || kernelId.slice(0, 8);
}
