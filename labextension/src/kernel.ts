/** Facts about one kernel: its document, moved on by the server's events. */

import type { IChild, IFailure, IJob, IKernel, IOutlook, IRecord, IWait, Plan, ServerEvent, State, Verb } from './api';

/**
 * The state shown to the user; `plain`: a kernel that cannot be checkpointed, `off_gpu`: one that runs cells while others
 * use its GPU, so that calls of CUDA wait.
 */
export type Phase =
  'plain' | 'running' | 'off_gpu' | 'suspending' | 'suspended' | 'checkpointing' | 'checkpointed' | 'waking' | 'dead';

const PHASES: Record<State, Phase> = {
  starting: 'running',
  running: 'running',
  suspending: 'suspending',
  suspended: 'suspended',
  yielding: 'off_gpu',
  off_gpu: 'off_gpu',
  resuming: 'waking',
  dumping: 'checkpointing',
  saving: 'running',
  checkpointed: 'checkpointed',
  restoring: 'waking',
  dead: 'dead'
};

const BECOMING: Record<Verb, Phase> = {
  suspend: 'suspending',
  checkpoint: 'checkpointing',
  save: 'running',
  back: 'waking',
  resume: 'waking',
  restore: 'waking'
};

/** A verb under way.  `fraction` is of the whole verb, `bytes` of `expected` are those of the step. */
export interface IProgress {
  verb: Verb;
  step: string;
  fraction: number;
  bytes: number | null;
  expected: number;
  began: number;
}

/** A verb that ended: well, or with what went wrong.  `seconds` since it began. */
export interface IOutcome {
  verb: Verb;
  seconds: number;
  freed: number;
  failure: IFailure | null;
}

export class KernelModel {
  constructor(readonly id: string) {}

  name = '';
  state: State | null = null;
  checkpointable = false;
  reason: string | null = null;
  image: string | null = null;
  /** Seconds since the epoch at which the kernel came into its state; null if unknown. */
  since: number | null = null;
  /** Device memory in use now; null where it is unknown. */
  deviceBytes: number | null = null;
  /** Host memory, that of child processes included; null where it is unknown. */
  hostBytes: number | null = null;
  children: IChild[] = [];
  /** Device memory that is off the GPUs. */
  swappedOut = 0;
  progress: IProgress | null = null;
  failure: IFailure | null = null;
  policy: IOutlook | null = null;
  /** What the idle policy does soon, and when (seconds since the epoch); null: nothing soon. */
  due: { plan: Plan; at: number } | null = null;
  /** A verb that was requested here and that the server has not begun yet. */
  requested: Verb | null = null;
  /** The job of a verb that the server has accepted, until an event of it comes. */
  accepted: IJob | null = null;
  /** The job that suspends or checkpoints the kernel when its cells have finished. */
  waiting: IJob | null = null;
  /** The kernel's place in the queue for a GPU, as of `at` (seconds since the epoch). */
  queued: (IWait & { at: number }) | null = null;

  /** The last failures, newest first: the server's, and refusals that only this page has heard of. */
  get failures(): IRecord[] {
    return [...this._recorded, ...this._refusals].sort((a, b) => b.at - a.at);
  }

  get phase(): Phase {
    if (this.requested !== null) {
      return BECOMING[this.requested];
    }
    if (this.state === 'resuming' && this._offGpu) {
      return 'off_gpu';
    }
    return this.state === null || !this.checkpointable ? 'plain' : PHASES[this.state];
  }

  /** Cells run at once. */
  get awake(): boolean {
    return this.phase === 'running' || this.phase === 'off_gpu';
  }

  /** Off the GPU, or on the way there: a cell that is run now waits. */
  get asleep(): boolean {
    return this.phase !== 'plain' && !this.awake && this.phase !== 'dead';
  }

  /** Off the GPU, and nothing is under way. */
  get resting(): boolean {
    return this.phase === 'suspended' || this.phase === 'checkpointed';
  }

  /** The server said that a verb is under way. */
  get becoming(): boolean {
    return this.state !== null && VERBS[this.state] !== undefined;
  }

  /** Apply the server's document.  One that was requested before an event came may be older than it. */
  load(document: IKernel, now: number): void {
    this.name = document.name;
    this.state = document.state;
    this.checkpointable = document.checkpointable;
    this.reason = document.reason;
    this.image = document.image;
    this.since = document.since;
    this.swappedOut = document.device_bytes_swapped_out;
    this._offGpu = document.off_gpu;
    this.queued = document.gpu_wait && { ...document.gpu_wait, at: now };
    this.failure = document.failure;
    this._recorded = document.failures;
    this.plan(document.policy, now);
    this.waiting = document.job?.status === 'waiting' ? document.job : null;
    if (document.device_bytes !== undefined) {
      this.deviceBytes = document.device_bytes && sum(document.device_bytes);
    }
    if (document.host_bytes !== undefined) {
      this.hostBytes = document.host_bytes;
      this.children = document.children ?? [];
    }
    const verb = this._offGpu ? undefined : VERBS[document.state]; // others decide when it comes back to a GPU
    if (document.progress === null || verb === undefined) {
      this.progress = null;
    } else {
      const begun = { verb, step: '', fraction: 0, bytes: null, expected: 0, began: document.since ?? now };
      const known = this.progress?.verb === verb ? this.progress : begun;
      this.progress = { ...known, fraction: Math.max(known.fraction, document.progress) };
    }
  }

  /** What the idle policy will do, as the server says at `now` (seconds). */
  plan(policy: IOutlook | null, now: number): void {
    this.policy = policy;
    this._protectedUntil = now + (policy?.protected_s ?? 0);
    this.due =
      policy?.imminent && policy.next !== null && policy.next_in_s !== null
        ? { plan: policy.next, at: now + policy.next_in_s }
        : null;
  }

  /** Remember a failure that the server does not: a request that it refused. */
  refuse(failure: IRecord): void {
    const others = this._refusals.filter(({ verb, code }) => verb !== failure.verb || code !== failure.code);
    this._refusals = [failure, ...others].slice(0, REMEMBERED);
  }

  /** No policy touches the kernel until then (seconds since the epoch); null: it may. */
  protect(until: number | null): void {
    this._protectedUntil = until ?? 0;
    this.due = until === null ? this.due : null;
  }

  /** Seconds from `now` on for which no policy touches the kernel. */
  protectedFor(now: number): number {
    return Math.max(0, this._protectedUntil - now);
  }

  /** Move on by an event at `now` (seconds); what ended with it, if something did. */
  receive(event: ServerEvent, now: number): IOutcome | null {
    switch (event.kind) {
      case 'state': {
        const progress = this.progress;
        const wasOffGpu = this._offGpu;
        this.state = event.state;
        this._offGpu = event.state === 'off_gpu' || (event.state === 'resuming' && event.previous === 'off_gpu');
        this.queued = event.state === 'resuming' || event.state === 'restoring' ? this.queued : null;
        this.since = now;
        this.image = event.image;
        this.checkpointable = true;
        this.requested = this.accepted = this.waiting = this.due = null;
        const verb = this._offGpu ? undefined : VERBS[event.state]; // others decide when it comes back to a GPU
        if (verb !== undefined) {
          this.progress = { verb, step: '', fraction: 0, bytes: null, expected: 0, began: now };
          return null;
        }
        this.progress = null;
        if (event.state === 'resuming') {
          return null;
        }
        this.swappedOut = event.state === 'running' || event.state === 'dead' ? 0 : event.device_bytes;
        if (this.swappedOut > 0 || event.state !== 'running') {
          this.deviceBytes = 0;
        }
        const done = event.previous === null ? undefined : VERBS[event.previous];
        if (done === undefined || event.state !== GOALS[done] || wasOffGpu) {
          return null; // a failure's own event follows, or it had its turn
        }
        this.failure = null;
        const seconds = progress?.verb === done ? now - progress.began : event.seconds;
        return { verb: done, seconds, freed: this.swappedOut, failure: null };
      }
      case 'step':
        if (event.verb !== '' && this.progress !== null) {
          const fraction = Math.max(this.progress.fraction, event.fraction);
          const { verb, step, bytes } = event;
          this.progress = { ...this.progress, verb, step, bytes, fraction, expected: event.expected_bytes };
        }
        return null;
      case 'failure':
        this.failure = event;
        this.requested = this.accepted = this.waiting = null;
        return { verb: event.verb, seconds: 0, freed: 0, failure: event };
      case 'protection':
        this.protect(event.protected_until);
        return null;
      case 'plan':
        this.due =
          event.next !== null && event.due_in_s !== null ? { plan: event.next, at: now + event.due_in_s } : null;
        return null;
      case 'gpus':
        if (this.checkpointable && this.state === 'running') {
          this.deviceBytes = event.gpus.reduce((bytes, gpu) => bytes + (gpu.kernels[this.id] ?? 0), 0);
        }
        return null;
    }
  }

  /** Whether it runs cells while its device memory is off the GPU. */
  private _offGpu = false;
  private _protectedUntil = 0;
  private _recorded: IRecord[] = [];
  private _refusals: IRecord[] = [];
}

/** How many refusals a page remembers of a kernel; the server remembers as many failures. */
const REMEMBERED = 5;

const VERBS: Partial<Record<State, Verb>> = {
  suspending: 'suspend',
  dumping: 'checkpoint',
  saving: 'save',
  resuming: 'resume',
  restoring: 'restore'
};

const GOALS: Record<Verb, State> = {
  suspend: 'suspended',
  checkpoint: 'checkpointed',
  save: 'running',
  back: 'running',
  resume: 'running',
  restore: 'running'
};

export function sum(byGpu: Record<string, number>): number {
  return Object.values(byGpu).reduce((total, bytes) => total + bytes, 0);
}
