import { parseEvent, type IStateEvent, type IStepEvent, type State } from '../src/api';
import { KernelModel } from '../src/kernel';
import { kernelDocument } from './documents';

const DOCUMENT = kernelDocument('k', { since: 100, device_bytes: { 'GPU-a': 300, 'GPU-b': 100 } });

function state(to: State, previous: State | null, more: Partial<IStateEvent> = {}): IStateEvent {
  return { kind: 'state', kernel_id: 'k', state: to, previous, seconds: 1, image: null, device_bytes: 0, ...more };
}

function step(fraction: number, more: Partial<IStepEvent> = {}): IStepEvent {
  return {
    kind: 'step',
    kernel_id: 'k',
    verb: 'checkpoint',
    step: 'dump',
    status: 'running',
    fraction,
    bytes: 10,
    expected_bytes: 400,
    ...more
  };
}

function running(): KernelModel {
  const model = new KernelModel('k');
  model.load(DOCUMENT, 0);
  return model;
}

test('a kernel without an event is plain', () => {
  expect(new KernelModel('k').phase).toBe('plain');
});

test('a document says what the kernel is and holds', () => {
  const model = running();
  expect([model.phase, model.deviceBytes, model.asleep]).toEqual(['running', 400, false]);
});

test('a kernel that cannot be checkpointed is plain whatever its state', () => {
  const model = new KernelModel('k');
  model.load({ ...DOCUMENT, checkpointable: false }, 0);
  expect(model.phase).toBe('plain');
});

test('where nobody can tell what it holds nothing is said', () => {
  const model = new KernelModel('k');
  model.load({ ...DOCUMENT, device_bytes: null }, 0);
  expect(model.deviceBytes).toBeNull();
});

test('a listing, which does not say what it holds, leaves what is known', () => {
  const model = running();
  const listed = { ...DOCUMENT };
  delete listed.device_bytes;
  model.load(listed, 0);
  expect(model.deviceBytes).toBe(400);
});

test('a checkpoint: its phases, its progress, and its outcome', () => {
  const model = running();
  expect(model.receive(state('dumping', 'running'), 10)).toBeNull();
  expect(model.phase).toBe('checkpointing');
  model.receive(step(0.4), 11);
  expect(model.progress).toMatchObject({ fraction: 0.4, step: 'dump', bytes: 10, expected: 400 });
  const outcome = model.receive(state('checkpointed', 'dumping', { image: 'i', device_bytes: 400 }), 12.5);
  expect(outcome).toEqual({ verb: 'checkpoint', seconds: 2.5, freed: 400, failure: null });
  expect([model.phase, model.image, model.swappedOut, model.deviceBytes, model.progress]).toEqual([
    'checkpointed',
    'i',
    400,
    0,
    null
  ]);
});

test('progress never goes back', () => {
  const model = running();
  model.receive(state('dumping', 'running'), 10);
  model.receive(step(0.6), 11);
  model.receive(step(0.5), 11);
  expect(model.progress?.fraction).toBe(0.6);
});

test('steps that nobody saw begin are nobody’s progress', () => {
  const model = running();
  model.receive(step(0.5), 11);
  model.receive(step(0.5, { verb: '' }), 11);
  expect(model.progress).toBeNull();
});

test('a wake ends with nothing away', () => {
  const model = running();
  model.receive(state('checkpointed', 'dumping', { device_bytes: 400, image: 'i' }), 1);
  model.receive(state('restoring', 'checkpointed', { device_bytes: 400, image: 'i' }), 2);
  expect([model.phase, model.asleep]).toEqual(['waking', true]);
  const outcome = model.receive(state('running', 'restoring', { device_bytes: 400 }), 5);
  expect(outcome).toMatchObject({ verb: 'restore', seconds: 3, failure: null });
  expect([model.phase, model.swappedOut]).toEqual(['running', 0]);
});

test('a failure comes from its own event, not from the undo', () => {
  const model = running();
  model.receive(state('suspending', 'running'), 1);
  expect(model.receive(state('running', 'suspending'), 2)).toBeNull();
  const failure = { verb: 'suspend' as const, step: 'preflight', code: 'BUSY', hint: 'wait', left: 'it runs on' };
  const outcome = model.receive({ kind: 'failure', kernel_id: 'k', ...failure }, 2);
  expect(outcome?.failure).toMatchObject(failure);
  expect(model.failure?.code).toBe('BUSY');
});

test('a requested verb shows at once, until the server says more', () => {
  const model = running();
  model.requested = 'checkpoint';
  expect(model.phase).toBe('checkpointing');
  model.receive(state('dumping', 'running'), 1);
  expect(model.requested).toBeNull();
});

test('what a running kernel holds follows the GPUs', () => {
  const model = running();
  const gpus = [
    { uuid: 'GPU-a', used: 9, kernels: { k: 5, other: 4 } },
    { uuid: 'GPU-b', used: 2, kernels: { k: 2 } }
  ];
  model.receive({ kind: 'gpus', at: 1, gpus, gpu_seconds_freed: 0 }, 1);
  expect(model.deviceBytes).toBe(7);
});

test('events of others are not ours', () => {
  expect(parseEvent({ schema_id: 'https://events.jupyter.org/jupyter_server/contents_service/v1' })).toBeNull();
  expect(parseEvent({ schema_id: 'https://events.jupyter.org/jupyter_gpu_ckpt/kernel_state/v1' })?.kind).toBe('state');
});

test('what the policy does soon is counted down from the document or an event, until something else happens', () => {
  const model = running();
  const policy = { idle_s: 9, under_way: null, next: 'suspend' as const, next_in_s: 30, protected_s: 0 };
  model.load({ ...DOCUMENT, policy: { ...policy, imminent: false } }, 100);
  expect(model.due).toBeNull();
  model.load({ ...DOCUMENT, policy: { ...policy, imminent: true } }, 100);
  expect(model.due).toEqual({ plan: 'suspend', at: 130 });
  const soon = { kind: 'plan' as const, kernel_id: 'k', next: 'checkpoint' as const, due_in_s: 45 };
  expect(model.receive(soon, 110)).toBeNull();
  expect(model.due).toEqual({ plan: 'checkpoint', at: 155 });
  model.receive({ ...soon, next: null, due_in_s: null }, 111);
  expect(model.due).toBeNull();
  model.receive(soon, 112);
  model.receive(state('suspending', 'running'), 113);
  expect(model.due).toBeNull();
  model.receive(soon, 114);
  model.receive({ kind: 'protection', kernel_id: 'k', protected_until: 7000 }, 115);
  expect(model.due).toBeNull();
});

test('the last failures are the server’s and what only this page was refused, each once, newest first', () => {
  const model = running();
  const failure = { verb: 'checkpoint' as const, step: '', code: 'NOT_NOW', hint: '', left: '', message: 'no', at: 5 };
  model.load({ ...DOCUMENT, failures: [{ ...failure, code: 'CRIU_FAILED', at: 6 }] }, 7);
  model.refuse(failure);
  model.refuse({ ...failure, at: 8 });
  for (let at = 10; at < 20; at++) {
    model.refuse({ ...failure, code: `C${at}`, at });
  }
  expect(model.failures.map(({ code }) => code)).toEqual(['C19', 'C18', 'C17', 'C16', 'C15', 'CRIU_FAILED']);
});

test('host memory and child processes are as the last document that has them says', () => {
  const model = running();
  model.load({ ...DOCUMENT, host_bytes: 7, children: [{ pid: 1, command: 'sleep', bytes: 2 }] }, 0);
  model.load(DOCUMENT, 1);
  expect([model.hostBytes, model.children.length]).toEqual([7, 1]);
});

test('a turn on a shared GPU ends and comes without a word of a verb: cells run all the time', () => {
  const model = running();
  const seen = (['yielding', 'off_gpu', 'resuming', 'running'] as State[]).map((to, index, all) => {
    const outcome = model.receive(state(to, all[index - 1] ?? 'running', { device_bytes: 400 }), 10 + index);
    return [outcome, model.phase, model.awake, model.progress];
  });
  expect(seen).toEqual([
    [null, 'off_gpu', true, null],
    [null, 'off_gpu', true, null],
    [null, 'off_gpu', true, null],
    [null, 'running', true, null]
  ]);
  model.receive(state('suspended', 'suspending', { device_bytes: 400 }), 20);
  model.receive(state('resuming', 'suspended'), 21);
  expect([model.phase, model.progress?.verb]).toEqual(['waking', 'resume']);
});

test('a protection ends by itself', () => {
  const model = new KernelModel('k');
  const policy = { idle_s: 9, under_way: null, next: null, next_in_s: null, imminent: false, protected_s: 60 };
  model.load({ ...DOCUMENT, policy }, 1000);
  expect([1000, 1050, 1070].map(now => model.protectedFor(now))).toEqual([60, 10, 0]);
  model.protect(1100);
  expect([1070, 1101].map(now => model.protectedFor(now))).toEqual([30, 0]);
});
