/** The GPUs: loaded when they are shown, then updated by events. */

import { type ISignal, Signal } from '@lumino/signaling';

import type { IGpu, IGpuEvent, IGpus, ServerEvent } from './api';

/** Seconds of history that are shown. */
export const WINDOW = 3600;

export class Gpus {
  constructor(private readonly source: { gpus(): Promise<IGpus> }) {}

  /** Null until they were loaded. */
  list: IGpu[] | null = null;
  /** GPU-seconds for which kernels with device memory were off their GPUs. */
  gpuSecondsFreed = 0;

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Whether they are to be loaded: they never were, or events may have been missed since. */
  get isOwed(): boolean {
    return this._isOwed;
  }

  async load(): Promise<void> {
    const at = ++this._requests;
    this._isOwed = false;
    let loaded: IGpus;
    try {
      loaded = await this.source.gpus();
    } catch (error) {
      this._isOwed = true;
      throw error;
    }
    if (at < this._loaded) {
      return; // the reply to a later request came first
    }
    this._loaded = at;
    this.list = loaded.gpus;
    this.gpuSecondsFreed = loaded.gpu_seconds_freed;
    if (this._last !== null && loaded.gpus.every(gpu => isNews(gpu, this._last))) {
      this._move(this._last); // it came while the reply was under way
    }
    this._changed.emit();
  }

  receive(event: ServerEvent): void {
    if (event.kind === 'gpus') {
      this._last = event;
      if (this.list !== null) {
        this._move(event);
        this._changed.emit();
      }
    }
  }

  /** Events may have been missed. */
  doubt(): void {
    this._isOwed = true;
  }

  private _move(event: IGpuEvent): void {
    this.list = (this.list ?? []).map(gpu => moved(gpu, event));
    this.gpuSecondsFreed = event.gpu_seconds_freed;
  }

  private _isOwed = true;
  /** The last event. */
  private _last: IGpuEvent | null = null;
  /** The number of requests, and that of the one whose reply is shown. */
  private _requests = 0;
  private _loaded = 0;

  private readonly _changed = new Signal<this, void>(this);
}

function isNews(gpu: IGpu, event: IGpuEvent | null): boolean {
  return event !== null && event.at > (gpu.history[gpu.history.length - 1]?.[0] ?? Infinity);
}

function moved(gpu: IGpu, event: IGpuEvent): IGpu {
  const now = event.gpus.find(({ uuid }) => uuid === gpu.uuid);
  if (now === undefined) {
    return gpu;
  }
  const last = gpu.history[gpu.history.length - 1];
  const flat: [number, number][] = last === undefined ? [] : [[event.at, last[1]]];
  const history = [...gpu.history, ...flat, [event.at, now.used] as [number, number]];
  return {
    ...gpu,
    used: now.used,
    kernels: now.kernels,
    history: history.filter(([at]) => at >= event.at - WINDOW)
  };
}
