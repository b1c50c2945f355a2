import type { IContext } from '../src/context';
import { KernelModel } from '../src/kernel';
import type { Notifier } from '../src/notifications';
import { save, unused } from '../src/saving';
import { nullTranslator } from './translation';

/** The name that is proposed, and what the user answers; null: a click on Cancel. */
let mockProposed = '';
let mockAnswer: string | null = '';

jest.mock('@jupyterlab/apputils', () => ({
  InputDialog: {
    getText: ({ text }: { text: string }) => {
      mockProposed = text;
      return Promise.resolve({ value: mockAnswer });
    }
  }
}));

const client = { saves: jest.fn(), save: jest.fn() };
const kernels = { request: jest.fn() };
const notifier = { undone: jest.fn(), refused: jest.fn() };
/** What was done, in its order. */
let done: string[] = [];

async function start(page: { dirty: boolean; canSave: boolean; error?: Error }): Promise<void> {
  const write = () => {
    done.push('page');
    return page.error ? Promise.reject(page.error) : Promise.resolve();
  };
  const context = { localPath: 'work/a.ipynb', model: { dirty: page.dirty }, canSave: page.canSave, save: write };
  const panel = { context, sessionContext: { session: { kernel: { id: 'a' } } } };
  const notebooks = { forEach: (see: (panel: unknown) => void) => see(panel) };
  const all = { client, kernels, notebooks, trans: nullTranslator.load() } as unknown as IContext;
  await save(all, notifier as unknown as Notifier, new KernelModel('a'));
}

beforeEach(() => {
  jest.resetAllMocks();
  done = [];
  mockAnswer = ' p ';
  client.saves.mockResolvedValue([]);
  client.save.mockImplementation((id: string, name: string) => Promise.resolve(done.push(`${id} ${name}`)));
  kernels.request.mockImplementation((_id: string, _verb: string, send: () => Promise<unknown>) => send());
});

test.each([
  [true, true, ['page', 'a p']],
  [false, true, ['a p']],
  [true, false, ['a p']]
])('a page with changes (%s) that can be saved (%s) is saved before its kernel', async (dirty, canSave, order) => {
  await start({ dirty, canSave });
  expect(done).toEqual(order);
  expect(mockProposed).toMatch(/^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$/);
});

test('a page that cannot be saved is named, and the kernel is saved all the same', async () => {
  await start({ dirty: true, canSave: true, error: new Error('Full.') });
  const text = 'a.ipynb was not saved; the save point has it as it is on the disk.';
  expect(notifier.undone).toHaveBeenCalledWith(text, new Error('Full.'));
  expect(done).toEqual(['page', 'a p']);
});

test.each([null, ' '])('without a name (%j) nothing is saved', async answer => {
  mockAnswer = answer;
  await start({ dirty: true, canSave: true });
  expect(done).toEqual([]);
});

test('a list that cannot be loaded prevents nothing, and a refusal is shown', async () => {
  client.saves.mockRejectedValue(new Error('Away.'));
  client.save.mockRejectedValue(new Error('Busy.'));
  await start({ dirty: false, canSave: true });
  expect(notifier.refused).toHaveBeenCalledWith(expect.anything(), 'save', new Error('Busy.'));
});

test('the proposed name is one that no save point has', () => {
  expect(unused('a', ['b'])).toBe('a');
  expect(unused('a', ['a', 'a 2', 'a 4'])).toBe('a 3');
});
