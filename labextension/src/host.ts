/** The doctor's result for the host: requested once, since it rarely changes. */

import { type ISignal, Signal } from '@lumino/signaling';

import type { IHost, IPolicy, IStatus } from './api';

export class Host {
  constructor(private readonly source: { status(): Promise<IStatus> }) {}

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Null until the doctor has spoken. */
  get facts(): IHost | null {
    return this._facts;
  }

  /** The idle policy's settings; null until they are known. */
  get policy(): IPolicy | null {
    return this._policy;
  }

  /** The page that explains an error; null if the server names none. */
  errorPage(code: string): string | null {
    return this._errorPage?.replace('{code}', encodeURIComponent(code.toLowerCase())) ?? null;
  }

  /** Why no kernel can be checkpointed; empty if they can, or if it is not known yet. */
  get reason(): string {
    return this._facts === null || this._facts.fit.cpu ? this._missing : this._facts.reason.cpu;
  }

  /** Whether there may be a GPU; true until the doctor has spoken. */
  get gpus(): boolean {
    return this._facts?.fit.gpu ?? true;
  }

  /** Request the doctor's result.  A server without the extension is a host that cannot. */
  async load(missing: string): Promise<void> {
    try {
      const { host, policy, error_page } = await this.source.status();
      this._facts = host;
      this._policy = policy;
      this._errorPage = error_page;
      this._missing = '';
    } catch (error) {
      this._missing = (error as { status?: number }).status === 404 ? missing : (error as Error).message;
    }
    this._changed.emit();
  }

  private _facts: IHost | null = null;
  private _policy: IPolicy | null = null;
  private _errorPage: string | null = null;
  private _missing = '';
  private readonly _changed = new Signal<this, void>(this);
}
