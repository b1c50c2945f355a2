/**
 * The server's answers: the documents of `openapi.yaml` and the events of `server/events`, as far as they are read here.
 *
 * Sizes are bytes, durations seconds, moments seconds since the epoch.
 */

export type State =
  | 'starting'
  | 'running'
  | 'suspending'
  | 'suspended'
  | 'yielding'
  | 'off_gpu'
  | 'resuming'
  | 'dumping'
  | 'saving'
  | 'checkpointed'
  | 'restoring'
  | 'dead';

export type Verb = 'suspend' | 'resume' | 'checkpoint' | 'save' | 'back' | 'restore';

/** When to suspend a busy kernel: now, which is refused, or when its cells have finished. */
export type When = 'now' | 'idle';

export interface IFailure {
  verb: Verb;
  step: string;
  code: string;
  hint: string;
  left: string;
}

/** A failure as the kernel's document has it. */
export interface IRecord extends IFailure {
  message: string;
  at: number;
}

export interface IChild {
  pid: number;
  command: string;
  bytes: number;
}

/** What the idle policy does next. */
export type Plan = 'suspend' | 'checkpoint';

export interface IOutlook {
  idle_s: number;
  under_way: string | null;
  next: Plan | null;
  next_in_s: number | null;
  /** Whether that is so near that it is counted down. */
  imminent: boolean;
  protected_s: number;
}

/** A place in the queue for a GPU. */
export interface IWait {
  gpu: string | null;
  /** The GPU's number. */
  index: number | null;
  /** 1: the next one. */
  place: number;
  /** Until the kernel computes; null: unknown. */
  seconds: number | null;
}

export interface IKernel {
  id: string;
  name: string;
  state: State;
  since: number | null;
  checkpointable: boolean;
  reason: string | null;
  image: string | null;
  device_bytes_swapped_out: number;
  /** It runs cells, but is off the GPU: their calls of CUDA wait. */
  off_gpu: boolean;
  gpu_wait: IWait | null;
  progress: number | null;
  failure: IFailure | null;
  /** The last ones, newest first. */
  failures: IRecord[];
  /** The newest verb that was requested by REST. */
  job: IJob | null;
  policy: IOutlook | null;
  /** By GPU UUID; only in the reply for one kernel, null where it is unknown. */
  device_bytes?: Record<string, number> | null;
  /** With those of its child processes; null where it is unknown. */
  host_bytes?: number | null;
  children?: IChild[];
}

/** The code of an error, or of a finding: a cell runs. */
export const BUSY = 'KERNEL_BUSY';

export interface IErrorDetail {
  code: string;
  message: string;
  hint: string;
  left: string;
  /** Of `FILES_DIFFER`: the files, and the choices that can be done for each. */
  details?: { files?: IDifferingFile[] };
}

/** A file as it was at a save point, or as it is now. */
export type FilesChoice = 'then' | 'now';

/** A file that is not as it was at a save point: what is known of it then and now, and the choices that can be done. */
export interface IDifferingFile extends Record<FilesChoice, { bytes: number; mtime: number } | null> {
  path: string;
  choices: FilesChoice[];
}

export interface IJob {
  id: string;
  kernel_id: string;
  verb: Verb;
  /** `waiting`: for the cells of the kernel. */
  status: 'waiting' | 'running' | 'done' | 'failed' | 'cancelled';
  started: number;
  ended: number | null;
  error: IErrorDetail | null;
}

export interface IFinding {
  code: string;
  text: string;
  blocks: boolean;
  hint: string;
}

export interface IPreflight {
  ok: boolean;
  findings: IFinding[];
}

export interface ISavePoint {
  name: string;
  /** The number of the last cell that was run. */
  cell: number;
  created: number;
  bytes: number;
  /** Those that it shares with no other: what a deletion frees. */
  bytes_alone: number;
  /** It was made without a request, and may be thinned out. */
  automatic: boolean;
  /** The id of its image. */
  image: string;
  /** The image of the save point that its state descends from; empty or missing: none that is known. */
  parent?: string;
  /** The kernel sleeps in it. */
  asleep: boolean;
  has_notebook: boolean;
}

export interface IBackJob extends IJob {
  /** `notebook`: the path of the one that went back with the kernel; empty for none. */
  result: { notebook: string; notebook_error: IErrorDetail | null } | null;
}

/** What a kernel that starts from a save point would have otherwise, and the files that both can write to. */
export interface IBranchPlan {
  differs: { kind: string; what: string; becomes: string }[];
  shared: string[];
  /** Why there must be no other kernel. */
  unsafe: string[];
}

export interface IBranchJob {
  id: string;
  ended: number | null;
  error: IErrorDetail | null;
  result: { kernel_id: string; notebook: string } | null;
}

/** Null where there is no such variable. */
type VariableFacts = { type: string; bytes: number } | null;

export interface IComparedVariable {
  name: string;
  before: VariableFacts;
  after: VariableFacts;
}

/** The variables that differ between a save point and another one, or the kernel as it is now. */
export interface IComparison {
  added: IComparedVariable[];
  gone: IComparedVariable[];
  changed: IComparedVariable[];
  unknown: IComparedVariable[];
  /** How many are the same. */
  same: number;
  /** False if one side has more variables than are noted. */
  complete: boolean;
}

export interface IImage {
  id: string;
  kernel_id: string;
  kernel_name: string;
  created: number;
  bytes: number;
  device_bytes: Record<string, number>;
  only_copy: boolean;
  notebook: string | null;
}

export interface IHost {
  fit: { cpu: boolean; gpu: boolean };
  reason: { cpu: string; gpu: string };
}

/** The idle policy's settings; seconds, 0: never. */
export interface IPolicy {
  suspend_after: number;
  checkpoint_after: number;
  without_device_memory: boolean;
  notice: number;
}

export interface IStatus {
  version: string;
  host: IHost;
  policy: IPolicy;
  /** The address of the page about an error, with `{code}` instead of its code in lower case. */
  error_page: string | null;
}

/** One kernel that shares a GPU, of any user. */
export interface ISharer {
  /** Since when it computes, waits or is idle. */
  seconds: number;
  bytes: number;
  /** The id of a kernel of this server; null: another's. */
  kernel: string | null;
  place?: number | null;
  /** Seconds of its turn that it has for sure. */
  left?: number;
}

export interface ISharing {
  computing: ISharer[];
  waiting: ISharer[];
  idle: ISharer[];
  /** By how much turns are lengthened. */
  factor: number;
  /** Of kernels whose servers do not answer. */
  silent_bytes: number;
}

export interface IGpu {
  uuid: string;
  index: number;
  name: string;
  total: number;
  used: number;
  /** Device memory by kernel id. */
  kernels: Record<string, number>;
  /** Moments and bytes in use, oldest first, of the last hour. */
  history: [number, number][];
  /** Missing where kernels do not share GPUs. */
  sharing?: ISharing;
}

export interface IGpus {
  gpus: IGpu[];
  gpu_seconds_freed: number;
}

const SCHEMAS = 'https://events.jupyter.org/jupyter_gpu_ckpt/';

export interface IStateEvent {
  kind: 'state';
  kernel_id: string;
  state: State;
  previous: State | null;
  seconds: number;
  image: string | null;
  device_bytes: number;
}

export interface IStepEvent {
  kind: 'step';
  kernel_id: string;
  verb: Verb | '';
  step: string;
  status: 'started' | 'running' | 'completed' | 'failed';
  fraction: number;
  bytes: number | null;
  expected_bytes: number;
}

export interface IFailureEvent extends IFailure {
  kind: 'failure';
  kernel_id: string;
}

export interface IProtectionEvent {
  kind: 'protection';
  kernel_id: string;
  /** Until when no policy touches the kernel; null: it is not protected. */
  protected_until: number | null;
}

export interface IPlanEvent {
  kind: 'plan';
  kernel_id: string;
  /** Null: nothing comes soon, or it has begun. */
  next: Plan | null;
  due_in_s: number | null;
}

export interface IGpuEvent {
  kind: 'gpus';
  at: number;
  gpus: { uuid: string; used: number; kernels: Record<string, number> }[];
  gpu_seconds_freed: number;
}

export type ServerEvent = IStateEvent | IStepEvent | IFailureEvent | IProtectionEvent | IPlanEvent | IGpuEvent;

const KINDS: Record<string, ServerEvent['kind']> = {
  [`${SCHEMAS}kernel_state/v1`]: 'state',
  [`${SCHEMAS}kernel_step/v1`]: 'step',
  [`${SCHEMAS}kernel_failure/v1`]: 'failure',
  [`${SCHEMAS}kernel_protection/v1`]: 'protection',
  [`${SCHEMAS}kernel_plan/v1`]: 'plan',
  [`${SCHEMAS}gpu_usage/v1`]: 'gpus'
};

/** Parse an emission of the event bus; null if it is not an event of this extension. */
export function parseEvent(emission: { schema_id: string }): ServerEvent | null {
  const kind = KINDS[emission.schema_id];
  return kind === undefined ? null : ({ ...emission, kind } as unknown as ServerEvent);
}
