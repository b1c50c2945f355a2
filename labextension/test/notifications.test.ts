import type { CommandRegistry } from '@lumino/commands';

import { Refused } from '../src/client';
import { addCommands } from '../src/commands';
import type { IContext } from '../src/context';
import { IDS } from '../src/ids';
import { Kernels, type IKernelSource } from '../src/kernels';
import { Notifier } from '../src/notifications';
import { Preferences } from '../src/preferences';
import { kernelDocument } from './documents';
import { nullTranslator } from './translation';

/** Notifications as JupyterLab was asked for them. */
const mockShown = new Map<string, string>();

jest.mock('@jupyterlab/apputils', () => {
  const show = (text: string) => {
    mockShown.set(text, text);
    return text;
  };
  const dismiss = (id: string) => mockShown.delete(id);
  return { Notification: { emit: show, error: show, info: show, success: show, update: () => true, dismiss } };
});

jest.useFakeTimers();
Object.assign(globalThis, { window: globalThis });

let document = kernelDocument('a');
const protect = jest.fn();
const commands = new Map<string, CommandRegistry.ICommandOptions>();
let context: IContext;

beforeEach(async () => {
  mockShown.clear();
  document = kernelDocument('a');
  const source = { kernel: () => Promise.resolve(document), kernels: () => Promise.resolve([document]) };
  const kernels = new Kernels(source as unknown as IKernelSource, { standby: 'never' });
  const signal = { connect: () => true };
  const made = {
    client: { protect },
    commands: {
      addCommand: (id: string, options: CommandRegistry.ICommandOptions) => commands.set(id, options),
      notifyCommandChanged: () => undefined
    },
    host: { reason: '', gpus: false, changed: signal },
    kernels,
    preferences: new Preferences(),
    services: { sessions: { running: () => [] } },
    trans: nullTranslator.load()
  };
  context = made as unknown as IContext;
  addCommands(context, new Notifier(context, () => undefined), () => 'a');
  await kernels.load('a');
});

afterEach(() => context.kernels.dispose());

test('progress goes although the event of its end was missed', async () => {
  const state = { kind: 'state' as const, kernel_id: 'a', seconds: 1, image: null, device_bytes: 0 };
  context.kernels.receive({ ...state, state: 'dumping', previous: 'running' });
  await jest.advanceTimersByTimeAsync(2000);
  expect([...mockShown.keys()]).toEqual(['Checkpointing a, 0 %']);
  document = kernelDocument('a', { state: 'checkpointed' });
  await jest.advanceTimersByTimeAsync(11_000);
  expect([...mockShown.keys()]).toEqual([]);
});

test('a protection that was not set is not called a checkpoint that failed', async () => {
  protect.mockRejectedValue(new Refused(400, 'Not so long.', null));
  await commands.get(IDS.protect)?.execute({ seconds: 7200 });
  expect([...mockShown.keys()]).toEqual(['The protection of a was not changed. Not so long.']);
  expect(context.kernels.find('a')?.failures).toEqual([]);
});
