import type { IJob, IKernel, IStateEvent, State, Verb, When } from '../src/api';
import { Kernels, type IEnded, type IKernelSource } from '../src/kernels';
import { kernelDocument } from './documents';

jest.useFakeTimers();

function job(verb: Verb, more: Partial<IJob> = {}): IJob {
  return { id: 'j', kernel_id: 'a', verb, status: 'running', started: 0, ended: null, error: null, ...more };
}

function state(id: string, to: State, previous: State): IStateEvent {
  return { kind: 'state', kernel_id: id, state: to, previous, seconds: 1, image: null, device_bytes: 0 };
}

/** A server with these kernels. */
class Server implements IKernelSource {
  there = new Map([['a', kernelDocument('a')]]);
  requested: string[] = [];
  job_: IJob = job('checkpoint');
  fail: Error | null = null;

  kernels(): Promise<IKernel[]> {
    this.requested.push('kernels');
    return this.fail ? Promise.reject(this.fail) : Promise.resolve([...this.there.values()]);
  }

  kernel(id: string): Promise<IKernel> {
    this.requested.push(id);
    const found = this.there.get(id);
    return found ? Promise.resolve(found) : Promise.reject(Object.assign(new Error('gone'), { status: 404 }));
  }

  begin(id: string, verb: Verb, when: When): Promise<IJob> {
    this.requested.push(`${verb} ${id}${when === 'idle' ? ' when idle' : ''}`);
    return this.fail ? Promise.reject(this.fail) : Promise.resolve(this.job_);
  }

  cancel(id: string): Promise<IJob> {
    this.requested.push(`cancel ${id}`);
    return this.fail ? Promise.reject(this.fail) : Promise.resolve({ ...this.job_, status: 'cancelled' });
  }

  keep(id: string): Promise<{ policy: IKernel['policy'] }> {
    this.requested.push(`keep ${id}`);
    const policy = { idle_s: 0, under_way: null, next: null, next_in_s: null, imminent: false, protected_s: 0 };
    return this.fail ? Promise.reject(this.fail) : Promise.resolve({ policy });
  }

  job(): Promise<IJob> {
    this.requested.push('job');
    return Promise.resolve(this.job_);
  }
}

let server: Server;
let kernels: Kernels;
let ended: IEnded[];

beforeEach(() => {
  server = new Server();
  kernels = new Kernels(server, { standby: 'never' });
  ended = [];
  kernels.ended.connect((_, what) => {
    ended.push(what);
  });
});

afterEach(() => kernels.dispose());

/** Let time pass, and what waits for it happen. */
const pass = (milliseconds = 0) => jest.advanceTimersByTimeAsync(milliseconds);

test('a kernel is loaded at the first request for it, and once', async () => {
  expect(kernels.get('a').phase).toBe('plain');
  kernels.get('a');
  await pass();
  expect(kernels.get('a').phase).toBe('running');
  expect(server.requested).toEqual(['a']);
});

test('nothing is requested while events flow, however long', async () => {
  kernels.get('a');
  await pass();
  kernels.receive(state('a', 'dumping', 'running'));
  kernels.receive(state('a', 'checkpointed', 'dumping'));
  await pass(3600_000);
  expect(server.requested).toEqual(['a']);
  expect(kernels.get('a').phase).toBe('checkpointed');
});

test('a document that is older than an event is not believed', async () => {
  kernels.get('a'); // the answer is under way
  kernels.receive(state('a', 'dumping', 'running'));
  server.there.set('a', kernelDocument('a', { state: 'dumping' }));
  await pass();
  expect(kernels.get('a').phase).toBe('checkpointing');
  const listed = kernels.reload();
  kernels.receive(state('a', 'checkpointed', 'dumping'));
  await listed;
  expect(kernels.get('a').phase).toBe('checkpointed');
});

test('in doubt the server is requested again and again, until an event comes', async () => {
  kernels.get('a');
  await pass();
  server.requested = [];
  server.there.set('a', kernelDocument('a', { state: 'checkpointed' }));
  kernels.doubt();
  await pass(10_000);
  expect(kernels.get('a').phase).toBe('checkpointed');
  const looks = server.requested.length;
  expect(looks).toBeGreaterThan(2);
  kernels.receive(state('a', 'checkpointed', 'dumping'));
  await pass(60_000);
  expect(server.requested.length).toBeLessThanOrEqual(looks + 1);
});

test('doubt ends by itself', async () => {
  kernels.doubt();
  await pass(61_000);
  const looks = server.requested.length;
  await pass(3600_000);
  expect(server.requested.length).toBeLessThanOrEqual(looks + 1);
});

test('in a hidden tab nobody is requested even in doubt', async () => {
  kernels.dispose();
  kernels = new Kernels(server, { standby: () => true });
  kernels.doubt();
  await pass();
  const looks = server.requested.length;
  await pass(60_000);
  expect(server.requested.length).toBe(looks);
});

test('kernels that are no more are forgotten', async () => {
  kernels.get('a');
  await pass();
  server.there.clear();
  await kernels.reload();
  expect(kernels.find('a')).toBeUndefined();
  kernels.get('b');
  await pass();
  expect(kernels.find('b')).toBeUndefined();
});

test('a verb shows at once, and its end is reported', async () => {
  kernels.get('a');
  await pass();
  const begun = kernels.begin('a', 'checkpoint');
  expect(kernels.get('a').phase).toBe('checkpointing');
  await begun;
  kernels.receive(state('a', 'dumping', 'running'));
  kernels.receive(state('a', 'checkpointed', 'dumping'));
  expect(ended.map(({ outcome }) => outcome.verb)).toEqual(['checkpoint']);
  await pass(5000);
  expect(server.requested).toEqual(['a', 'checkpoint a']);
});

test('a verb that the server refuses is taken back', async () => {
  kernels.get('a');
  await pass();
  server.fail = new Error('no');
  await expect(kernels.begin('a', 'suspend')).rejects.toThrow('no');
  expect(kernels.get('a').phase).toBe('running');
});

test('a job that failed without an event is reported', async () => {
  kernels.get('a');
  await pass();
  const error = { code: 'WRONG_STATE', message: 'no', hint: 'h', left: 'l' };
  server.job_ = job('checkpoint', { status: 'failed', error });
  await kernels.begin('a', 'checkpoint');
  await pass(2000);
  expect(ended[0]?.outcome.failure).toMatchObject({ code: 'WRONG_STATE', verb: 'checkpoint' });
  expect(kernels.get('a').phase).toBe('running');
});

test('a job without an event and without an error means that events are missing', async () => {
  kernels.get('a');
  await pass();
  server.there.set('a', kernelDocument('a', { state: 'checkpointed' }));
  await kernels.begin('a', 'checkpoint');
  await pass(2000);
  expect(kernels.get('a').phase).toBe('checkpointed');
  expect(ended).toEqual([]);
});

test('a protection is kept as the seconds that are left', async () => {
  kernels.get('a');
  await pass();
  kernels.protected('a', Date.now() / 1000 + 60);
  expect(kernels.get('a').protectedFor(Date.now() / 1000)).toBeCloseTo(60, 0);
  kernels.protected('a', null);
  expect(kernels.get('a').protectedFor(Date.now() / 1000)).toBe(0);
});

test('an event right after a doubt does not take the place of the look', async () => {
  kernels.get('a');
  await pass();
  server.there.set('a', kernelDocument('a', { state: 'checkpointed' }));
  kernels.doubt();
  kernels.receive(state('b', 'running', 'starting'));
  await pass(1);
  expect(kernels.get('a').phase).toBe('checkpointed');
});

test('a verb that is silent for long is requested after', async () => {
  kernels.get('a');
  await pass();
  kernels.receive(state('a', 'dumping', 'running'));
  server.there.set('a', kernelDocument('a', { state: 'checkpointed' }));
  await pass(9_000);
  expect(kernels.get('a').phase).toBe('checkpointing');
  await pass(2_000);
  expect(kernels.get('a').phase).toBe('checkpointed');
});

test('a verb that waits for a cell shows as such, not as under way', async () => {
  kernels.get('a');
  await pass();
  server.job_ = job('checkpoint', { status: 'waiting' });
  await expect(kernels.begin('a', 'checkpoint', 'idle')).resolves.toBe(true);
  expect(server.requested).toEqual(['a', 'checkpoint a when idle']);
  const model = kernels.get('a');
  expect([model.phase, model.waiting?.id]).toEqual(['running', 'j']);
  kernels.receive(state('a', 'dumping', 'running'));
  expect(model.waiting).toBeNull();
});

test('a verb that waits is taken back', async () => {
  kernels.get('a');
  await pass();
  server.job_ = job('checkpoint', { status: 'waiting' });
  await kernels.begin('a', 'checkpoint', 'idle');
  await kernels.cancel('a');
  expect(server.requested).toContain('cancel j');
  expect(kernels.get('a').waiting).toBeNull();
});

test('a verb that was taken back elsewhere waits no more', async () => {
  server.there.set('a', kernelDocument('a', { job: job('checkpoint', { status: 'waiting' }) }));
  kernels.get('a');
  await pass();
  expect(kernels.get('a').waiting?.verb).toBe('checkpoint');
  server.there.set('a', kernelDocument('a', { job: job('checkpoint', { status: 'cancelled' }) }));
  await pass(11_000);
  expect(kernels.get('a').waiting).toBeNull();
});

test('a protection that was set elsewhere is known by its event', async () => {
  kernels.get('a');
  await pass();
  kernels.receive({ kind: 'protection', kernel_id: 'a', protected_until: Date.now() / 1000 + 60 });
  expect(kernels.get('a').protectedFor(Date.now() / 1000)).toBeCloseTo(60, 0);
  kernels.receive({ kind: 'protection', kernel_id: 'a', protected_until: null });
  expect(kernels.get('a').protectedFor(Date.now() / 1000)).toBe(0);
});

describe('a kernel that prints', () => {
  beforeEach(async () => {
    server.there.set('a', kernelDocument('a', { state: 'checkpointed' }));
    kernels.get('a');
    await pass();
    server.requested = [];
  });

  test('is awake at once, though the events of its wake were missed', async () => {
    server.there.set('a', kernelDocument('a'));
    void kernels.heard('a');
    await pass();
    expect(kernels.get('a').phase).toBe('running');
    expect(server.requested).toEqual(['a']);
  });

  test('is looked at until its last step is done', async () => {
    server.there.set('a', kernelDocument('a', { state: 'restoring' }));
    void kernels.heard('a');
    void kernels.heard('a');
    await pass(100);
    expect(server.requested).toEqual(['a']);
    server.there.set('a', kernelDocument('a'));
    await pass(500);
    expect(kernels.get('a').phase).toBe('running');
    expect(server.requested).toEqual(['a', 'a']);
  });

  test('is not polled while the events of its wake come', async () => {
    kernels.receive(state('a', 'restoring', 'checkpointed'));
    await kernels.heard('a');
    expect(server.requested).toEqual([]);
  });

  test('is not requested after for ever', async () => {
    void kernels.heard('a');
    await pass(60_000);
    expect(server.requested.length).toBeLessThanOrEqual(20);
  });
});

test('a kernel that is kept, or prints something, is not counted down any more', async () => {
  await kernels.load('a');
  const model = kernels.get('a');
  const soon = { kind: 'plan' as const, kernel_id: 'a', next: 'suspend' as const, due_in_s: 45 };
  kernels.receive(soon);
  expect(model.due).not.toBeNull();
  await kernels.keep('a');
  expect([model.due, server.requested.includes('keep a')]).toEqual([null, true]);
  kernels.receive(soon);
  await kernels.heard('a');
  expect(model.due).toBeNull();
});

test('a failure is reported once its text is known', async () => {
  await kernels.reload();
  const failure = { verb: 'checkpoint' as const, step: 'dump', code: 'CRIU_FAILED', hint: 'Try again.', left: '' };
  server.there.set('a', kernelDocument('a', { failures: [{ ...failure, message: 'CRIU failed.', at: 1 }] }));
  kernels.receive({ kind: 'failure', kernel_id: 'a', ...failure });
  expect(ended).toEqual([]);
  await jest.advanceTimersByTimeAsync(0);
  expect(ended.map(({ kernel }) => kernel.failures[0]?.message)).toEqual(['CRIU failed.']);
});

test('a kernel that the server does not know is requested once, however often it is shown', async () => {
  const show = () => server.requested.length < 20 && kernels.get('b'); // or the test would not end
  kernels.changed.connect(show);
  show();
  await pass();
  expect(server.requested).toEqual(['b']);
  await kernels.reload(); // it is not listed either
  await pass();
  expect(server.requested).toEqual(['b', 'kernels']);
  server.there.set('b', kernelDocument('b'));
  await kernels.reload();
  expect(kernels.get('b').phase).toBe('running');
});

/** Hold back the next reply to a method; the function that sends it. */
function held(method: 'kernel' | 'kernels'): () => void {
  let send = (): void => undefined;
  const now = server[method].bind(server) as (id: string) => Promise<unknown>;
  jest.spyOn(server, method).mockImplementationOnce(((id: string) => {
    const reply = now(id); // as things are when the server is asked
    return new Promise(resolve => (send = () => resolve(reply)));
  }) as never);
  return () => send();
}

test.each(['kernel', 'kernels'] as const)('a reply that a later one has overtaken changes nothing (%s)', async slow => {
  kernels.get('a');
  await pass();
  const send = held(slow);
  void (slow === 'kernel' ? kernels.load('a') : kernels.reload());
  server.there.set('a', kernelDocument('a', { state: 'checkpointed' }));
  await kernels.reload();
  expect(kernels.get('a').phase).toBe('checkpointed');
  send();
  await pass();
  expect(kernels.get('a').phase).toBe('checkpointed');
});

test('a kernel that was started after a listing was requested stays', async () => {
  const send = held('kernels');
  const listed = kernels.reload();
  server.there.set('b', kernelDocument('b'));
  kernels.receive(state('b', 'running', 'starting'));
  const model = kernels.get('b');
  send();
  await listed;
  expect(kernels.find('b')).toBe(model);
});

test('a verb whose job cannot be requested does not show for ever', async () => {
  kernels.get('a');
  await pass();
  jest.spyOn(server, 'job').mockRejectedValue(Object.assign(new Error('a new server'), { status: 404 }));
  server.there.set('a', kernelDocument('a', { state: 'checkpointed' }));
  await kernels.begin('a', 'suspend');
  await pass(2000);
  expect(kernels.get('a').phase).toBe('checkpointed');
});

test('a job that fails late without an event is reported', async () => {
  kernels.get('a');
  await pass();
  await kernels.request('a', 'back', () => Promise.resolve(job('back')));
  expect(kernels.get('a').phase).toBe('waking');
  await pass(10_000);
  expect([kernels.get('a').phase, ended]).toEqual(['running', []]);
  server.job_ = job('back', { ended: 1, error: { code: 'FILES_DIFFER', message: 'm', hint: 'h', left: 'l' } });
  await pass(10_000);
  expect(ended.map(({ outcome }) => outcome.failure?.code)).toEqual(['FILES_DIFFER']);
});

test('a request without a reply leaves in doubt what the server did', async () => {
  kernels.get('a');
  await pass();
  jest.spyOn(server, 'begin').mockRejectedValue(new TypeError('Failed to fetch'));
  server.there.set('a', kernelDocument('a', { state: 'checkpointed' }));
  await expect(kernels.begin('a', 'checkpoint')).rejects.toThrow('fetch');
  await pass();
  expect(kernels.get('a').phase).toBe('checkpointed');
});

test('in a hidden tab a silent verb is not requested after until the tab is shown', async () => {
  let isHidden = true;
  kernels.dispose();
  kernels = new Kernels(server, { standby: () => isHidden });
  kernels.get('a');
  await pass();
  kernels.receive(state('a', 'dumping', 'running'));
  server.there.set('a', kernelDocument('a', { state: 'checkpointed' }));
  await pass(60_000);
  expect(server.requested).toEqual(['a']);
  isHidden = false;
  await pass(11_000);
  expect(kernels.get('a').phase).toBe('checkpointed');
});

test('a verb that was under way when the page was loaded is as far as the server says, and moves on', async () => {
  server.there.set('a', kernelDocument('a', { state: 'dumping', since: 7, progress: 0.4 }));
  await kernels.load('a');
  const model = kernels.get('a');
  expect(model.progress).toMatchObject({ verb: 'checkpoint', fraction: 0.4, began: 7 });
  const step = { kind: 'step' as const, kernel_id: 'a', verb: 'checkpoint' as const, step: 'dump', expected_bytes: 2 };
  kernels.receive({ ...step, status: 'running', fraction: 0.6, bytes: 1 });
  expect(model.progress?.fraction).toBe(0.6);
});

test('a countdown whose end brings no event is looked after', async () => {
  kernels.get('a');
  await pass();
  kernels.receive({ kind: 'plan', kernel_id: 'a', next: 'suspend', due_in_s: 45 });
  server.there.set('a', kernelDocument('a', { state: 'suspended' }));
  await pass(46_000);
  expect(kernels.get('a').phase).toBe('running');
  await pass(11_000);
  expect(kernels.get('a').phase).toBe('suspended');
});
