import * as React from 'react';

import type { IGpus, IStatus } from '../src/api';
import { MemoryBar, points } from '../src/charts';
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

test('a request for the doctor’s result that failed is repeated once the server is heard of, and only then', async () => {
  const host = { fit: { cpu: true, gpu: false }, reason: { cpu: '', gpu: 'no GPU' } };
  const status = jest.fn(() => Promise.resolve({ host } as IStatus));
  status.mockRejectedValueOnce(Object.assign(new Error('Service Unavailable'), { status: 503 }));
  const it = new Host({ status });
  await it.load('none');
  expect(it.reason).toBe('Service Unavailable');
  it.retry();
  it.retry();
  await Promise.resolve();
  await Promise.resolve();
  expect([it.reason, status.mock.calls.length]).toEqual(['', 2]);
  it.retry();
  expect(status).toHaveBeenCalledTimes(2);
});

describe('a reply about the GPUs', () => {
  const used = (bytes: number): IGpus => ({ ...LOADED, gpus: LOADED.gpus.map(gpu => ({ ...gpu, used: bytes })) });
  const replies: ((reply: IGpus) => void)[] = [];
  const make = () => new Gpus({ gpus: () => new Promise(resolve => replies.push(resolve)) });

  beforeEach(() => replies.splice(0));

  test('that a later one has overtaken is dropped', async () => {
    const gpus = make();
    const loads = [gpus.load(), gpus.load()];
    replies[1]?.(used(20));
    await loads[1];
    replies[0]?.(used(10));
    await loads[0];
    expect(gpus.list?.[0]?.used).toBe(20);
  });

  test('that an event has overtaken is moved on by it', async () => {
    const gpus = make();
    const load = gpus.load();
    gpus.receive({ kind: 'gpus', at: 1100, gpus: [{ uuid: 'a', used: 40, kernels: {} }], gpu_seconds_freed: 9 });
    replies[0]?.(used(10));
    await load;
    expect([gpus.list?.[0]?.used, gpus.gpuSecondsFreed]).toEqual([40, 9]);
  });
});

test('the GPUs are to be loaded until that has succeeded, and again when events may be missing', async () => {
  const load = jest.fn(() => Promise.resolve(LOADED));
  load.mockRejectedValueOnce(new Error('no'));
  const gpus = new Gpus({ gpus: load });
  await expect(gpus.load()).rejects.toThrow('no');
  expect(gpus.isOwed).toBe(true);
  await gpus.load();
  expect(gpus.isOwed).toBe(false);
  gpus.doubt();
  expect(gpus.isOwed).toBe(true);
});

test('two notebooks of one name and size are two shares of the bar', () => {
  const share = { bytes: 1, color: 'jp-mod-share0', label: 'train.ipynb: 1 B' };
  const keys: unknown[] = [];
  const collect = (node: React.ReactNode): void =>
    React.Children.forEach(node, child => {
      if (React.isValidElement<{ children?: React.ReactNode }>(child)) {
        const { children } = child.props;
        if (Array.isArray(children)) {
          for (const list of children.filter(Array.isArray) as React.ReactElement[][]) {
            keys.push(...list.map(({ key }) => key));
          }
        }
        collect(children);
      }
    });
  collect(MemoryBar({ total: 4, shares: [share, share], label: '' }));
  expect(keys).toHaveLength(2);
  expect(new Set(keys).size).toBe(2);
});
