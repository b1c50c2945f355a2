/** Sizes, times and states in words. */

import type { TranslationBundle } from '@jupyterlab/translation';

import type { Plan, Verb } from './api';
import type { KernelModel, Phase } from './kernel';

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

/** `3.2 GiB`. */
export function bytes(count: number): string {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 || count >= 100 ? count.toFixed(0) : count.toFixed(1)} ${UNITS[unit]}`;
}

/** `0.8 s`, `42 s`, `7 min`, `3 h`, `2 d`. */
export function duration(seconds: number): string {
  if (seconds < 9.95) {
    return `${seconds.toFixed(1)} s`;
  }
  if (seconds < 99.5) {
    return `${seconds.toFixed(0)} s`;
  }
  if (seconds < 5970) {
    return `${(seconds / 60).toFixed(0)} min`;
  }
  return seconds < 172800 ? `${(seconds / 3600).toFixed(0)} h` : `${(seconds / 86400).toFixed(0)} d`;
}

/** `1 s`, `42 s`, `7 min`: an estimate. */
export function estimate(seconds: number): string {
  return seconds < 9.95 ? `${Math.max(1, Math.round(seconds))} s` : duration(seconds);
}

/** `2026-11-26 20:04:05`, where the user is. */
export function localTime(at: Date): string {
  return new Date(at.getTime() - 60_000 * at.getTimezoneOffset()).toISOString().slice(0, 19).replace('T', ' ');
}

/** `0:45`: whole seconds that are left. */
export function countdown(seconds: number): string {
  const left = Math.max(0, Math.ceil(seconds));
  return `${Math.floor(left / 60)}:${String(left % 60).padStart(2, '0')}`;
}

/** The state of a kernel, in one or two words. */
export function phase(of: Phase, trans: TranslationBundle): string {
  switch (of) {
    case 'plain':
      return trans.__('cannot sleep');
    case 'running':
      return trans.__('running');
    case 'off_gpu':
      return trans.__('off the GPU (others use it)');
    case 'suspending':
      return trans.__('suspending');
    case 'suspended':
      return trans.__('suspended');
    case 'checkpointing':
      return trans.__('checkpointing');
    case 'checkpointed':
      return trans.__('checkpointed');
    case 'waking':
      return trans.__('waking');
    case 'dead':
      return trans.__('dead');
  }
}

/** `waiting for GPU 0: next, about 20 s`; null: the kernel waits for no GPU.  `now`: seconds since the epoch. */
export function place(kernel: KernelModel, trans: TranslationBundle, now: number): string | null {
  if (kernel.queued === null) {
    return null;
  }
  const { index, seconds, at } = kernel.queued;
  const where = kernel.queued.place === 1 ? trans.__('next') : trans.__('place %1', kernel.queued.place);
  const left = seconds === null ? null : Math.max(0, seconds - (now - at));
  const when = left === null ? where : trans.__('%1, about %2', where, estimate(left));
  return index === null ? trans.__('waiting for a GPU: %1', when) : trans.__('waiting for GPU %1: %2', index, when);
}

/** The operation under way, as the beginning of a sentence. */
export function doing(verb: Verb, notebook: string, trans: TranslationBundle): string {
  switch (verb) {
    case 'suspend':
      return trans.__('Suspending %1', notebook);
    case 'checkpoint':
      return trans.__('Checkpointing %1', notebook);
    case 'save':
      return trans.__('Saving %1', notebook);
    default:
      return trans.__('Waking %1', notebook);
  }
}

/** That a verb failed. */
export function failed(verb: Verb, notebook: string, trans: TranslationBundle): string {
  switch (verb) {
    case 'suspend':
      return trans.__('%1 was not suspended.', notebook);
    case 'checkpoint':
      return trans.__('%1 was not put to sleep.', notebook);
    case 'save':
      return trans.__('The variables of %1 were not saved.', notebook);
    case 'back':
      return trans.__('%1 did not go back to its save point.', notebook);
    default:
      return trans.__('%1 could not be woken.', notebook);
  }
}

/** A step, in the user's words.  `onGpu`: the kernel has device memory, on a GPU or swapped out, or may have. */
export function step(name: string, onGpu: boolean, trans: TranslationBundle): string {
  switch (name) {
    case 'preflight':
    case 'drain':
    case 'quiesce':
      return trans.__('preparing the kernel');
    case 'cuda_suspend':
      return onGpu ? trans.__('saving GPU memory') : trans.__('preparing the kernel');
    case 'dump':
      return trans.__('writing the image');
    case 'publish':
      return trans.__('flushing the image to disk');
    case 'match':
    case 'reserve':
      return trans.__('reserving memory');
    case 'criu_restore':
      return trans.__('reading the image');
    case 'cuda_resume':
      return onGpu ? trans.__('restoring GPU memory') : trans.__('finishing');
    case '':
      return '';
    default:
      return trans.__('finishing');
  }
}

/** Characters of a notification that JupyterLab shows. */
const SHOWN = 140;

/** A failure in as many characters as are shown: what happened, what to do, and as much of the cause as fits. */
export function failure(what: string, cause: string, hint: string): string {
  const left = SHOWN - what.length - hint.length - 2;
  const shown = left < cause.length / 3 ? '' : cut(cause, left); // a few words of it say nothing
  return cut([what, shown, hint].filter(Boolean).join(' '), SHOWN);
}

/** The words of `text` that fit into `length` characters; none if that would be hardly more than the first. */
export function cut(text: string, length: number): string {
  if (text.length <= length) {
    return text;
  }
  const end = text.lastIndexOf(' ', length - 1);
  return end < 16 ? '' : `${text.slice(0, end)}…`;
}

/** The status bar's text, the effect of a click, and its name where the text has to end with it. */
export interface IStatusText {
  text: string;
  title: string;
  does: 'wake' | 'stay' | 'keep' | null;
  offer?: string;
}

/** What the status bar says of a kernel at `now` (seconds since the epoch); null: nothing. */
export function status(
  kernel: KernelModel,
  notebook: string,
  trans: TranslationBundle,
  now: number
): IStatusText | null {
  if (kernel.resting) {
    const title = trans.__('The kernel of %1 is asleep. Wake it now; the next cell does that, too.', notebook);
    return { text: trans.__('Kernel asleep'), title, does: 'wake' };
  }
  const percent = Math.round(100 * (kernel.progress?.fraction ?? 0));
  let text = place(kernel, trans, now) ?? '';
  if (text !== '') {
    const title = trans.__('The kernel of %1 is %2. An interrupt of its cell gives the place back.', notebook, text);
    return { text, title, does: null };
  }
  switch (kernel.phase) {
    case 'suspending':
      text = trans.__('Suspending kernel, %1 %', percent);
      break;
    case 'checkpointing':
      text = trans.__('Checkpointing kernel, %1 %', percent);
      break;
    case 'waking':
      text = trans.__('Waking kernel, %1 %', percent);
      break;
    default: {
      if (kernel.waiting === null) {
        return kernel.phase === 'running' && kernel.due !== null ? leaves(kernel.due, notebook, trans, now) : null;
      }
      const title = trans.__('The kernel of %1 sleeps when its cells have finished. Click to keep it awake.', notebook);
      return { text: trans.__('Kernel sleeps after this cell'), title, does: 'stay' };
    }
  }
  return { text, title: `${notebook}: ${text}`, does: null };
}

function leaves(due: { plan: Plan; at: number }, notebook: string, trans: TranslationBundle, now: number): IStatusText {
  const title =
    due.plan === 'suspend'
      ? trans.__('The kernel of %1 is idle and leaves the GPU soon. Click to keep it for now.', notebook)
      : trans.__('The kernel of %1 is idle and goes to sleep soon. Click to keep it for now.', notebook);
  const text = trans.__('sleeps in %1', countdown(due.at - now));
  return { text, title, does: 'keep', offer: trans.__('keep it') };
}

/** The badge's text; may be empty. */
export function badge(kernel: KernelModel, trans: TranslationBundle): string {
  if (kernel.phase === 'suspended' || kernel.phase === 'checkpointed') {
    return kernel.swappedOut > 0 ? trans.__('asleep, %1 freed', bytes(kernel.swappedOut)) : trans.__('asleep');
  }
  if (kernel.phase === 'off_gpu') {
    return kernel.swappedOut > 0 ? trans.__('%1 off the GPU', bytes(kernel.swappedOut)) : trans.__('off the GPU');
  }
  return kernel.phase === 'running' && kernel.deviceBytes ? bytes(kernel.deviceBytes) : '';
}
