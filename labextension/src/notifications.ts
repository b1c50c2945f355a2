/** Shows how far a verb is if it takes long, and how it ended. */

import { Notification } from '@jupyterlab/apputils';

import { BUSY, type IFailure, type Verb } from './api';
import { Refused } from './client';
import type { IContext } from './context';
import { IDS } from './ids';
import type { IProgress, KernelModel } from './kernel';
import type { IEnded, Kernels } from './kernels';
import { nameOf } from './notebooks';
import { bytes, doing, duration, failed, failure as brief, step } from './words';

/** Milliseconds that a verb may take before it is worth a notification. */
const LONG = 1000;

/** Milliseconds that a failure stays in sight; then it is among JupyterLab's notifications only. */
const READ = 30000;

/**
 * Milliseconds that JupyterLab is given to draw a notification, or what became of it.
 *
 * It does both later than it says, and in no order: one that was dismissed right after an update stays for ever.
 */
const DRAWN = 500;

interface IShown {
  timer: number;
  id: string | null;
  at: number;
}

function dismiss(id: string): void {
  window.setTimeout(() => Notification.dismiss(id), DRAWN);
}

/** Whether the user has closed it; an update would open it again. */
function isClosed({ id, at }: IShown): boolean {
  return id !== null && Date.now() - at > 2 * DRAWN && document.getElementById(id) === null;
}

export class Notifier {
  /** `details` shows the failures of a kernel. */
  constructor(
    private readonly context: IContext,
    private readonly details: (kernelId: string) => void
  ) {
    context.kernels.changed.connect(this._follow, this);
    context.kernels.ended.connect(this._end, this);
  }

  /** The server refused a verb. */
  refused(kernel: KernelModel, verb: Verb, error: unknown): void {
    const detail = error instanceof Refused ? error.detail : null;
    const { code = '', hint = '', left = '' } = detail ?? {};
    const failure = { verb, step: '', code, hint, left };
    const { message } = error as Error;
    this.context.kernels.refused(kernel.id, { ...failure, message });
    this._fail(kernel, failure, message);
  }

  /** Notify that the kernel sleeps when its cells have finished. */
  waits(kernel: KernelModel): void {
    const { commands, preferences, services, trans } = this.context;
    if (preferences.values.notifications === 'all') {
      const name = nameOf(services, kernel.id);
      const stay = () => void commands.execute(IDS.stay, { kernelId: kernel.id });
      const id = Notification.info(trans.__('%1 sleeps when its cells have finished.', name), {
        autoClose: 8000,
        actions: [{ label: trans.__('Keep awake'), callback: stay }]
      });
      this._passing.set(kernel.id, { id, lasts: () => kernel.waiting !== null });
    }
  }

  /** Notify that the kernel could not be kept awake. */
  stays(kernel: KernelModel, error: unknown): void {
    const { services, trans } = this.context;
    this.undone(trans.__('%1 could not be kept awake.', nameOf(services, kernel.id)), error);
  }

  /** Notify that something other than a verb was not done; `what` says so. */
  undone(what: string, error: unknown): void {
    if (this.context.preferences.values.notifications !== 'none') {
      const hint = error instanceof Refused ? (error.detail?.hint ?? '') : '';
      Notification.error(brief(what, (error as Error).message, hint), { autoClose: READ });
    }
  }

  /** Notify of some work until it has ended. */
  async during<T>(text: string, work: () => Promise<T>): Promise<T> {
    const isShown = this.context.preferences.values.notifications === 'all';
    const id = isShown ? Notification.emit(text, 'in-progress', { autoClose: false }) : null;
    try {
      return await work();
    } finally {
      if (id !== null) {
        dismiss(id);
      }
    }
  }

  /** A protection was set, or ended. */
  protected(kernel: KernelModel, seconds: number): void {
    const { preferences, services, trans } = this.context;
    if (preferences.values.notifications === 'all') {
      const name = nameOf(services, kernel.id);
      const text =
        seconds > 0
          ? trans.__('%1 is protected from idle policies for %2.', name, duration(seconds))
          : trans.__('%1 is not protected any more.', name);
      Notification.info(text, { autoClose: 4000 });
    }
  }

  /** The kernel is kept for one more time of idleness. */
  kept(kernel: KernelModel): void {
    const { preferences, services, trans } = this.context;
    if (preferences.values.notifications === 'all') {
      const name = nameOf(services, kernel.id);
      const rest = kernel.policy?.next_in_s;
      const text =
        rest == null
          ? trans.__('%1 stays awake.', name)
          : trans.__('%1 stays awake, for %2 if nothing uses it.', name, duration(rest));
      Notification.info(text, { autoClose: 4000 });
    }
  }

  private _follow(_: Kernels, kernel: KernelModel | null): void {
    for (const [id, passing] of [...this._passing]) {
      if (this.context.kernels.find(id) === undefined || !passing.lasts()) {
        this._passing.delete(id);
        dismiss(passing.id);
      }
    }
    if (kernel === null) {
      for (const id of [...this._failures.keys()]) {
        if (this.context.kernels.find(id) === undefined) {
          this._dismissFailure(id);
        }
      }
      for (const id of [...this._shown.keys()]) {
        if (this.context.kernels.find(id)?.progress == null) {
          this._clear(id);
        }
      }
      return;
    }
    if (kernel.progress === null) {
      // How it ended comes at once, but for an end whose event was missed.
      queueMicrotask(() => kernel.progress === null && this._clear(kernel.id));
      return;
    }
    const shown = this._shown.get(kernel.id);
    if (shown === undefined) {
      const timer = window.setTimeout(() => this._begin(kernel), LONG);
      this._shown.set(kernel.id, { timer, id: null, at: 0 });
    } else if (shown.id !== null && !isClosed(shown)) {
      Notification.update({
        id: shown.id,
        message: this._sentence(kernel, kernel.progress),
        progress: kernel.progress.fraction
      });
    }
  }

  private _begin(kernel: KernelModel): void {
    const shown = this._shown.get(kernel.id);
    if (shown !== undefined && kernel.progress !== null && this.context.preferences.values.notifications === 'all') {
      shown.at = Date.now();
      shown.id = Notification.emit(this._sentence(kernel, kernel.progress), 'in-progress', {
        autoClose: false,
        progress: kernel.progress.fraction
      });
    }
  }

  private _mayBeOnGpu(kernel: KernelModel): boolean {
    return this.context.host.gpus && (kernel.deviceBytes !== 0 || kernel.swappedOut > 0);
  }

  private _sentence(kernel: KernelModel, progress: IProgress): string {
    const { services, trans } = this.context;
    const head = doing(progress.verb, nameOf(services, kernel.id), trans);
    const now = step(progress.step, this._mayBeOnGpu(kernel), trans);
    const percent = Math.round(100 * progress.fraction);
    const parts = [now ? trans.__('%1, %2 %: %3', head, percent, now) : trans.__('%1, %2 %', head, percent)];
    if (progress.expected > 0) {
      parts.push(
        progress.bytes === null
          ? bytes(progress.expected)
          : trans.__('%1 of about %2', bytes(progress.bytes), bytes(Math.max(progress.expected, progress.bytes)))
      );
    }
    return parts.join(', ');
  }

  private _end(_: Kernels, { kernel, outcome }: IEnded): void {
    const long = this._clear(kernel.id);
    if (outcome.failure !== null) {
      const { verb, code } = outcome.failure;
      const known = kernel.failures.find(failure => failure.verb === verb && failure.code === code);
      this._fail(kernel, outcome.failure, known?.message ?? code);
      return;
    }
    this._dismissFailure(kernel.id);
    const level = this.context.preferences.values.notifications;
    const leaves = outcome.verb === 'suspend' || outcome.verb === 'checkpoint';
    if (level === 'all' && (long || leaves)) {
      const { services, trans } = this.context;
      const name = nameOf(services, kernel.id);
      const seconds = duration(outcome.seconds);
      let text =
        outcome.verb === 'save'
          ? trans.__('The variables of %1 are saved, after %2.', name, seconds)
          : trans.__('%1 is awake again, after %2.', name, seconds);
      if (leaves) {
        const done = outcome.verb === 'suspend' ? trans.__('suspended') : trans.__('asleep');
        text =
          outcome.freed > 0
            ? trans.__('%1 is %2: %3 of GPU memory freed in %4.', name, done, bytes(outcome.freed), seconds)
            : this.context.host.gpus
              ? trans.__('%1 is %2, in %3. It had no GPU memory.', name, done, seconds)
              : trans.__('%1 is %2, in %3.', name, done, seconds);
      }
      const id = Notification.success(text, { autoClose: 5000 });
      if (leaves) {
        this._passing.set(kernel.id, { id, lasts: () => kernel.resting });
      }
    }
  }

  private _fail(kernel: KernelModel, { verb, code, hint }: IFailure, cause: string): void {
    const { commands, preferences, services, trans } = this.context;
    if (preferences.values.notifications === 'none') {
      return;
    }
    const name = nameOf(services, kernel.id);
    const lost = kernel.state === 'dead';
    const what = failed(verb, name, trans);
    const fate = lost ? trans.__('The kernel is gone.') : trans.__('Nothing was lost.');
    const actions: Notification.IAction[] = [{ label: trans.__('Details'), callback: () => this.details(kernel.id) }];
    const waits = code === BUSY && (verb === 'suspend' || verb === 'checkpoint');
    if (waits) {
      const later = () => void commands.execute(IDS[verb], { kernelId: kernel.id, when: 'idle' });
      const caption = trans.__('Sleep when the cell has finished');
      actions.unshift({ label: trans.__('Sleep after it'), caption, displayType: 'accent', callback: later });
    }
    const shown = { autoClose: READ, actions };
    const message = brief(`${what} ${fate}`, cause, waits ? '' : hint); // the button is the hint
    // One for each kernel: what failed again has the place of what failed before.
    const id = this._failures.get(kernel.id);
    if (id === undefined || !Notification.update({ id, message, type: 'error', ...shown })) {
      this._failures.set(kernel.id, Notification.error(message, shown));
    }
  }

  /** Dismiss a failure: the verb has succeeded since, or is not wanted any more. */
  private _dismissFailure(kernelId: string): void {
    const id = this._failures.get(kernelId);
    if (id !== undefined) {
      this._failures.delete(kernelId);
      dismiss(id);
    }
  }

  /** Remove the progress; whether there was some to see. */
  private _clear(kernelId: string): boolean {
    const shown = this._shown.get(kernelId);
    if (shown === undefined) {
      return false;
    }
    window.clearTimeout(shown.timer);
    this._shown.delete(kernelId);
    if (shown.id !== null) {
      dismiss(shown.id);
    }
    return shown.id !== null;
  }

  /** The newest failure of each kernel. */
  private readonly _failures = new Map<string, string>();
  /** Notifications that are true only as long as their kernel is so. */
  private readonly _passing = new Map<string, { id: string; lasts: () => boolean }>();
  private readonly _shown = new Map<string, IShown>();
}
