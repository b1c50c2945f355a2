import type { IGpus } from '../src/api';
import { points } from '../src/charts';
import { Gpus, WINDOW } from '../src/gpus';
import { Host } from '../src/host';
import { KernelModel } from '../src/kernel';
import * as words from '../src/words';
import { nullTranslator } from './translation';

const trans = nullTranslator.load();

const LOADED: IGpus = {
  gpus: [{ uuid: 'a', index: 0, name: 'H200', total: 100, used: 10, kernels: { k: 10 }, history: [[1000, 10]] }],
  gpu_seconds_freed: 5
};

test('events before the first load are nobody’s', () => {
  const gpus = new Gpus({ gpus: () => Promise.resolve(LOADED) });
  gpus.receive({ kind: 'gpus', at: 1, gpus: [], gpu_seconds_freed: 0 });
  expect(gpus.list).toBeNull();
});

test('an event moves a GPU on and makes its history longer, level until then', async () => {
  const gpus = new Gpus({ gpus: () => Promise.resolve(LOADED) });
  await gpus.load();
  gpus.receive({
    kind: 'gpus',
    at: 1100,
    gpus: [{ uuid: 'a', used: 40, kernels: { k: 40 } }],
    gpu_seconds_freed: 9
  });
  expect(gpus.list?.[0]).toMatchObject({ used: 40, kernels: { k: 40 } });
  expect(gpus.list?.[0]?.history).toEqual([
    [1000, 10],
    [1100, 10],
    [1100, 40]
  ]);
  expect(gpus.gpuSecondsFreed).toBe(9);
});

test('history is as long as the window', async () => {
  const gpus = new Gpus({ gpus: () => Promise.resolve(LOADED) });
  await gpus.load();
  const at = 1001 + WINDOW;
  gpus.receive({ kind: 'gpus', at, gpus: [{ uuid: 'a', used: 4, kernels: {} }], gpu_seconds_freed: 9 });
  expect(gpus.list?.[0]?.history.map(([when]) => when)).toEqual([at, at]);
});

test('the line ends now, at the right edge, and its height is the share in use', () => {
  expect(points([[1000 - WINDOW / 2, 50]], 100, 1000)).toBe('120.0,14.0 240.0,14.0');
  expect(points([], 100, 1000)).toBe('');
});

test('the doctor’s reason, and that of a server without the extension', async () => {
  const host = new Host({
    status: () =>
      Promise.resolve({
        version: '1',
        host: { fit: { cpu: false, gpu: false }, reason: { cpu: 'no CRIU', gpu: 'no GPU' } }
      })
  });
  expect(host.reason).toBe('');
  await host.load('none');
  expect(host.reason).toBe('no CRIU');
  const without = new Host({ status: () => Promise.reject(Object.assign(new Error('?'), { status: 404 })) });
  await without.load('no extension');
  expect(without.reason).toBe('no extension');
});

test.each([
  [0, '0 B'],
  [1023, '1023 B'],
  [3.2 * 2 ** 30, '3.2 GiB'],
  [300 * 2 ** 20, '300 MiB']
])('%d bytes are %s', (count, text) => {
  expect(words.bytes(count)).toBe(text);
});

test.each([
  [0.84, '0.8 s'],
  [42, '42 s'],
  [420, '7 min'],
  [7200, '2 h'],
  [86400 * 3, '3 d']
])('%d seconds are %s', (seconds, text) => {
  expect(words.duration(seconds)).toBe(text);
});

test('the badge: memory in use, memory freed, or nothing', () => {
  const kernel = new KernelModel('k');
  expect(words.badge(kernel, trans)).toBe('');
  kernel.state = 'running';
  kernel.checkpointable = true;
  kernel.deviceBytes = 2 ** 30;
  expect(words.badge(kernel, trans)).toBe('1.0 GiB');
  kernel.state = 'checkpointed';
  kernel.swappedOut = 2 ** 30;
  expect(words.badge(kernel, trans)).toBe('asleep, 1.0 GiB freed');
  kernel.swappedOut = 0;
  expect(words.badge(kernel, trans)).toBe('asleep');
});
