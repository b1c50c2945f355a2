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

  async load(): Promise<void> {
    const { gpus, gpu_seconds_freed } = await this.source.gpus();
    this.list = gpus;
    this.gpuSecondsFreed = gpu_seconds_freed;
    this._changed.emit();
  }

  receive(event: ServerEvent): void {
    if (event.kind === 'gpus' && this.list !== null) {
      this.list = this.list.map(gpu => moved(gpu, event));
      this.gpuSecondsFreed = event.gpu_seconds_freed;
      this._changed.emit();
    }
  }

  private readonly _changed = new Signal<this, void>(this);
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
