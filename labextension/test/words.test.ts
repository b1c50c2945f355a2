import { KernelModel } from '../src/kernel';
import * as words from '../src/words';
import { kernelDocument } from './documents';
import { nullTranslator } from './translation';

const trans = nullTranslator.load();
const WHAT = 'train.ipynb was not put to sleep. Nothing was lost.';
const HINT = 'End child processes (pools, DataLoader workers, commands) and try again.';

test('a failure carries its hint, however long the cause is', () => {
  const text = words.failure(WHAT, `The kernel has 3 living child processes: ${'python '.repeat(40)}`, HINT);
  expect(text.length).toBeLessThanOrEqual(140);
  expect(text).toBe(`${WHAT} ${HINT}`);
});

test('a failure leaves out a cause of which only the first words fit', () => {
  const hint = 'End these child processes and try again; or suspend the kernel.';
  const cause = 'The kernel has 1 child process that prevents it: sleep 600 (pid 7: it has left).';
  expect(words.failure('refused_it.ipynb was not put to sleep. Nothing was lost.', cause, hint)).toBe(
    `refused_it.ipynb was not put to sleep. Nothing was lost. ${hint}`
  );
});

test('of the cause a failure has as much as fits, in whole words', () => {
  const text = words.failure(
    WHAT,
    'A cell is running, and two more are waiting behind it for their turn, which comes when it has finished.',
    'Wait for it.'
  );
  expect(text).toBe(`${WHAT} A cell is running, and two more are waiting behind it for their turn,… Wait for it.`);
  expect(words.failure(WHAT, 'It is busy.', 'Wait.')).toBe(`${WHAT} It is busy. Wait.`);
});

test('the steps of a kernel without device memory do not speak of a GPU', () => {
  for (const name of ['preflight', 'cuda_suspend', 'dump', 'criu_restore', 'cuda_resume', 'thaw']) {
    expect(words.step(name, false, trans)).not.toContain('GPU');
  }
  expect(words.step('cuda_suspend', true, trans)).toBe('saving GPU memory');
  expect(words.step('cuda_resume', true, trans)).toBe('restoring GPU memory');
});

test('the status bar speaks of a kernel that sleeps, moves or is about to, and of no other', () => {
  const model = new KernelModel('k');
  const status = () => words.status(model, 'train.ipynb', trans, 0);
  expect(status()).toBeNull();
  model.load(kernelDocument('k'), 0);
  expect(status()).toBeNull();
  model.load(kernelDocument('k', { state: 'checkpointed' }), 0);
  expect(status()).toMatchObject({ text: 'Kernel asleep', does: 'wake' });
  model.requested = 'restore';
  expect(status()).toMatchObject({ text: 'Waking kernel, 0 %', does: null });
  model.requested = null;
  const job = { id: 'j', kernel_id: 'k', verb: 'checkpoint' as const, started: 0, ended: null, error: null };
  model.load(kernelDocument('k', { job: { ...job, status: 'waiting' } }), 0);
  expect(status()).toMatchObject({ text: 'Kernel sleeps after this cell', does: 'stay' });
});

test('a countdown is in whole seconds, never below none', () => {
  expect([45, 44.2, 61, 3600, 0.1, -5].map(words.countdown)).toEqual(['0:45', '0:45', '1:01', '60:00', '0:01', '0:00']);
});

test('the status bar counts down while an idle kernel runs, and offers to keep it', () => {
  const model = new KernelModel('k');
  model.load(kernelDocument('k'), 0);
  model.due = { plan: 'suspend', at: 100 };
  const said = words.status(model, 'train.ipynb', trans, 55);
  expect(said).toMatchObject({ text: 'sleeps in 0:45', offer: 'keep it', does: 'keep' });
  model.load(kernelDocument('k', { state: 'suspended' }), 0);
  expect(words.status(model, 'train.ipynb', trans, 55)).toMatchObject({ does: 'wake' });
});

test('a kernel off its GPU runs, and the status bar counts the estimate of its place down', () => {
  const model = new KernelModel('k');
  const wait = { gpu: 'GPU-a', index: 0, place: 1, seconds: 20.4 };
  model.load(kernelDocument('k', { state: 'resuming', off_gpu: true, gpu_wait: wait }), 100);
  expect([model.phase, model.awake, model.asleep]).toEqual(['off_gpu', true, false]);
  expect(words.phase(model.phase, trans)).toBe('off the GPU (others use it)');
  const said = (now: number) => words.status(model, 'train.ipynb', trans, now)?.text;
  expect([100, 107, 200].map(said)).toEqual([
    'waiting for GPU 0: next, about 20 s',
    'waiting for GPU 0: next, about 13 s',
    'waiting for GPU 0: next, about 1 s'
  ]);
  model.load(
    kernelDocument('k', { state: 'resuming', gpu_wait: { ...wait, index: null, place: 3, seconds: null } }),
    100
  );
  expect([model.phase, said(100)]).toEqual(['waking', 'waiting for a GPU: place 3']);
});

test('a save point is named by the clock on the wall', () => {
  const at = new Date('2026-11-26T20:04:05Z');
  jest.spyOn(at, 'getTimezoneOffset').mockReturnValue(-540); // in Tokyo
  expect(words.localTime(at)).toBe('2026-11-27 05:04:05');
});
