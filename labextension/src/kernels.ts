/**
 * All kernels this page knows: loaded once, then moved on by events.
 *
 * The event bus drops what happens while its socket is down and does not say that it was.  So whenever that is possible
 * (a kernel's own connection came back, a request failed, the page was hidden) the events count as doubtful: everything
 * is loaded again, at least once, and polled until an event shows that they flow, or for a minute.  A verb under way
 * without events is polled, too.  A hidden tab polls nothing.
 */

import { Poll } from '@lumino/polling';
import { type ISignal, Signal } from '@lumino/signaling';

import type { IJob, IKernel, IOutlook, IRecord, ServerEvent, Verb, When } from './api';
import { type IOutcome, KernelModel } from './kernel';

/** The part of the REST client that is needed here. */
export interface IKernelSource {
  kernels(): Promise<IKernel[]>;
  kernel(id: string): Promise<IKernel>;
  begin(id: string, verb: Verb, when: When): Promise<IJob>;
  cancel(job: string): Promise<IJob>;
  job(id: string): Promise<IJob>;
  keep(id: string): Promise<{ policy: IOutlook | null }>;
}

/** A verb ended. */
export interface IEnded {
  kernel: KernelModel;
  outcome: IOutcome;
}

/** Milliseconds between two polls while events are unreliable, and for how long these continue. */
const LOOK = 3000;
const DOUBT = 60000;

/** Milliseconds after which a verb that was accepted must have shown in an event. */
const SETTLED = 1000;

/** Milliseconds without an event after which a verb under way is polled: its end may have been missed. */
const SILENCE = 10000;

/** Milliseconds between two requests for the place of a kernel that waits for a GPU: no event reports it. */
const PLACE = 2000;

/** Milliseconds between two polls of a kernel that seems awake, and their number. */
const HEARD = 200;
const TRIES = 20;

export class Kernels {
  constructor(
    private readonly source: IKernelSource,
    options: { standby?: Poll.Standby | (() => boolean | Poll.Standby); now?: () => number } = {}
  ) {
    this._now = options.now ?? (() => Date.now());
    const { standby = 'when-hidden' } = options;
    this._standby = typeof standby === 'function' ? standby : () => standby;
    this._poll = new Poll({
      auto: false,
      name: 'gpu-ckpt:doubt',
      factory: () => this.reload(),
      frequency: { interval: LOOK, backoff: true, max: 10 * LOOK },
      standby: () => (this.doubtful ? this._standby() : true)
    });
  }

  /** A kernel changed; null: more than one may have. */
  get changed(): ISignal<this, KernelModel | null> {
    return this._changed;
  }

  /** Events may have been missed, also by others. */
  get doubted(): ISignal<this, void> {
    return this._doubted;
  }

  get ended(): ISignal<this, IEnded> {
    return this._ended;
  }

  /** Whether events may be missing. */
  get doubtful(): boolean {
    return this._owed || this._now() < this._doubtUntil;
  }

  *[Symbol.iterator](): Iterator<KernelModel> {
    yield* this._models.values();
  }

  /** The kernel if it is known. */
  find(id: string): KernelModel | undefined {
    return this._models.get(id);
  }

  /** The kernel; one that was not known is loaded, unless the server has said that it has none of that id. */
  get(id: string): KernelModel {
    let model = this._models.get(id) ?? this._gone.get(id);
    if (model === undefined) {
      model = new KernelModel(id);
      this._models.set(id, model);
      this._news.set(id, ++this._time);
      void this.load(id);
    }
    return model;
  }

  /** Load one kernel from the server, with its device memory. */
  async load(id: string): Promise<void> {
    const at = ++this._time;
    try {
      const document = await this.source.kernel(id);
      const model = this._apply(document, at);
      if (model !== null) {
        this._changed.emit(model);
        return;
      }
    } catch (error) {
      if (!isGone(error)) {
        this.doubt();
        return;
      }
      if (!this._isOvertaken(id, at)) {
        this._remove(id, at);
        this._changed.emit(null);
        return;
      }
    }
    if (!this._gone.has(id)) {
      await this.load(id); // the reply is older than what came meanwhile
    }
  }

  /** Request all kernels of the server. */
  async reload(): Promise<void> {
    const at = ++this._time;
    this._owed = false;
    let documents: IKernel[];
    try {
      documents = await this.source.kernels();
    } catch (error) {
      this._owed = true;
      throw error;
    }
    const there = new Set(documents.map(document => document.id));
    for (const id of [...this._models.keys()]) {
      if (!there.has(id) && !this._isOvertaken(id, at)) {
        this._remove(id, at);
      }
    }
    for (const document of documents) {
      if (this._apply(document, at) === null) {
        this._owed = true; // what came meanwhile may be a step's event only
      }
    }
    this._changed.emit(null);
  }

  /**
   * Begin a verb; what the user sees changes at once.  Throws what the client throws.
   *
   * `idle`: when the kernel's cells have finished; the answer is whether that has to be waited for.
   */
  begin(id: string, verb: Verb, when: When = 'now'): Promise<boolean> {
    return this.request(id, verb, () => this.source.begin(id, verb, when));
  }

  /** Begin a verb by `send`, which requests it from the server; all else as `begin`. */
  async request(id: string, verb: Verb, send: () => Promise<IJob>): Promise<boolean> {
    const model = this.get(id);
    model.requested = verb;
    this._changed.emit(model);
    try {
      const job = await send();
      if (model.requested === verb) {
        if (job.status === 'waiting') {
          model.requested = null;
          model.waiting = job;
          this._attend(model);
          this._changed.emit(model);
        } else {
          model.accepted = job;
          this._expect(model, job, SETTLED);
        }
      }
      return job.status === 'waiting';
    } catch (error) {
      model.requested = null;
      this._changed.emit(model);
      if ((error as { status?: number }).status === undefined) {
        this.doubt(); // without a reply it may have begun
      }
      throw error;
    }
  }

  /** Keep the kernel awake after its cells.  Throws the client's errors, also if the verb has begun. */
  async cancel(id: string): Promise<void> {
    const model = this.get(id);
    const job = model.waiting;
    if (job !== null) {
      try {
        await this.source.cancel(job.id);
      } finally {
        await this.load(id);
      }
    }
  }

  /** Keep the kernel for one more time of idleness.  Throws the client's errors. */
  async keep(id: string): Promise<void> {
    const { policy } = await this.source.keep(id);
    const model = this.get(id);
    model.plan(policy, this._now() / 1000);
    this._changed.emit(model);
  }

  /** Remember that the server refused something. */
  refused(id: string, failure: Omit<IRecord, 'at'>): void {
    const model = this.get(id);
    model.refuse({ ...failure, at: this._now() / 1000 });
    this._changed.emit(model);
  }

  /** Put what the server said of a protection where the document would have it. */
  protected(id: string, until: number | null): void {
    const model = this.get(id);
    model.protect(until);
    this._changed.emit(model);
  }

  /**
   * The kernel printed something, so it is awake.
   *
   * Should it count as asleep, then the events of its wake were missed: those of a kernel arrive before its outputs.
   * Its last step is done only after the outputs begin, so several requests may be needed.
   */
  async heard(id: string): Promise<void> {
    const used = this._models.get(id);
    if (used?.due) {
      used.due = null; // the policy notices that a moment later
      this._changed.emit(used);
    }
    const missed = (model = this._models.get(id)) => model?.asleep && (model.resting || this.doubtful);
    if (!missed() || this._heard.has(id)) {
      return;
    }
    this._heard.add(id);
    try {
      await this.load(id);
      for (let looks = 1; looks < TRIES && this._models.get(id)?.asleep; looks++) {
        await new Promise(resolve => setTimeout(resolve, HEARD));
        await this.load(id);
      }
    } finally {
      this._heard.delete(id);
    }
  }

  /** Move on by an event. */
  receive(event: ServerEvent): void {
    this._doubtUntil = 0;
    const now = this._now() / 1000;
    if (event.kind === 'gpus') {
      for (const model of this._models.values()) {
        model.receive(event, now);
      }
      this._changed.emit(null);
      return;
    }
    const known = this._models.get(event.kernel_id);
    const model = known ?? new KernelModel(event.kernel_id);
    this._models.set(model.id, model);
    this._gone.delete(model.id);
    this._news.set(model.id, ++this._time);
    const outcome = model.receive(event, now);
    this._attend(model);
    this._changed.emit(model);
    if (outcome?.failure) {
      // The event has the error's code and hint; only the document has its text.
      void this.load(model.id).then(() => this._ended.emit({ kernel: model, outcome }));
    } else if (outcome !== null) {
      this._ended.emit({ kernel: model, outcome });
    }
    if (event.kind === 'state' && event.state === 'dead') {
      this._remove(model.id, this._time);
      this._changed.emit(null);
    } else if (known === undefined || (event.kind === 'state' && event.state === 'running')) {
      void this.load(model.id); // its name, its memory, the policy's plan
    }
  }

  /** Events may have been missed. */
  doubt(): void {
    this._owed = true; // an event before the poll shows only that events flow again
    this._doubtUntil = this._now() + DOUBT;
    void this._poll.refresh();
    this._doubted.emit();
  }

  dispose(): void {
    for (const timer of this._silences.values()) {
      clearTimeout(timer);
    }
    this._poll.dispose();
    Signal.clearData(this);
  }

  /** Apply a document that was requested at `at`; null if what is known is newer. */
  private _apply(document: IKernel, at: number): KernelModel | null {
    const { id } = document;
    if (this._isOvertaken(id, at)) {
      return null;
    }
    const model = this._models.get(id) ?? new KernelModel(id);
    this._models.set(id, model);
    this._gone.delete(id);
    this._news.set(id, at);
    model.load(document, this._now() / 1000);
    this._attend(model);
    return model;
  }

  /** Whether an event, or the reply to a later request, came before that to the request at `at`. */
  private _isOvertaken(id: string, at: number): boolean {
    return (this._news.get(id) ?? 0) > at;
  }

  /** Remember that there was no such kernel at `at`: what shows it all the same must not request it again and again. */
  private _remove(id: string, at: number): void {
    this._models.delete(id);
    this._gone.set(id, new KernelModel(id));
    this._news.set(id, at);
  }

  /** The server accepted a verb.  Without an event it has failed before it began, or events are missing. */
  private _expect(model: KernelModel, accepted: IJob, after: number): void {
    const { id, verb } = accepted;
    const missing = () => model.accepted?.id === id; // a verb's first event, whatever it says of the state, ends that
    const look = async () => {
      if (!missing()) {
        return;
      }
      if (this._isHidden()) {
        this._expect(model, accepted, LOOK);
        return;
      }
      const job = await this.source.job(id).catch(() => null); // without a reply, or by another server
      if (!missing()) {
        return;
      }
      model.requested = null;
      if (job !== null && job.error !== null) {
        model.accepted = null;
        const failure = { verb, step: '', ...job.error };
        this.refused(model.id, failure);
        this._ended.emit({ kernel: model, outcome: { verb, seconds: 0, freed: 0, failure } });
        return;
      }
      this.doubt();
      if (job !== null && job.ended === null) {
        this._expect(model, job, LOOK);
      } else {
        model.accepted = null;
      }
    };
    setTimeout(() => void look(), after);
  }

  /** Request the kernel if nothing is heard of it while a verb is under way, or waits, or after one was due. */
  private _attend(model: KernelModel): void {
    const { id } = model;
    clearTimeout(this._silences.get(id));
    this._silences.delete(id);
    const until = model.becoming || model.waiting !== null ? 0 : model.due && 1000 * model.due.at - this._now();
    if (until !== null) {
      const isQueued = model.phase === 'off_gpu' || model.queued !== null;
      const silence = Math.max(0, until) + (isQueued ? PLACE : SILENCE);
      const look = () => {
        if (this._models.get(id) !== model) {
          return;
        }
        if (this._isHidden()) {
          this._attend(model);
        } else {
          void this.load(id);
        }
      };
      this._silences.set(id, setTimeout(look, silence));
    }
  }

  /** Whether nobody sees the page, and the user has not said that it polls all the same. */
  private _isHidden(): boolean {
    const standby = this._standby();
    return standby === 'when-hidden' ? typeof document !== 'undefined' && document.hidden : standby === true;
  }

  private readonly _models = new Map<string, KernelModel>();
  /** Kernels that the server does not know: as they are shown. */
  private readonly _gone = new Map<string, KernelModel>();
  /** Counts events and requests. */
  private _time = 0;
  /** When each kernel had its last event, or what is known of it was requested. */
  private readonly _news = new Map<string, number>();
  private readonly _now: () => number;
  private readonly _standby: () => boolean | Poll.Standby;
  private readonly _poll: Poll;
  private readonly _changed = new Signal<this, KernelModel | null>(this);
  private readonly _doubted = new Signal<this, void>(this);
  private readonly _ended = new Signal<this, IEnded>(this);
  private readonly _silences = new Map<string, ReturnType<typeof setTimeout>>();
  /** Kernels that are looked at because they were heard. */
  private readonly _heard = new Set<string>();
  private _doubtUntil = 0;
  /** Whether events may be missing since the last poll began, or that failed. */
  private _owed = false;
}

function isGone(error: unknown): boolean {
  return (error as { status?: number }).status === 404;
}
