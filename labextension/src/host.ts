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

  /** Request the doctor's result.  A server without the extension is a host that cannot, for the reason `missing`. */
  async load(missing: string): Promise<void> {
    this._retry = null;
    try {
      const { host, policy, error_page } = await this.source.status();
      this._facts = host;
      this._policy = policy;
      this._errorPage = error_page;
      this._missing = '';
    } catch (error) {
      const isMissing = (error as { status?: number }).status === 404;
      this._missing = isMissing ? missing : (error as Error).message;
      this._retry = isMissing ? null : () => void this.load(missing);
    }
    this._changed.emit();
  }

  /** Repeat the request if it has failed; called when the server is heard of. */
  retry(): void {
    this._retry?.();
  }

  private _facts: IHost | null = null;
  private _policy: IPolicy | null = null;
  private _errorPage: string | null = null;
  private _missing = '';
  private _retry: (() => void) | null = null;
  private readonly _changed = new Signal<this, void>(this);
}
