import { branch } from '../src/branch';
import type { IContext } from '../src/context';
import { KernelModel } from '../src/kernel';
import type { Notifier } from '../src/notifications';
import { nullTranslator } from './translation';

/** The titles of the dialogs that were shown; each is accepted. */
const mockTitles: string[] = [];

jest.mock('@jupyterlab/apputils', () => {
  const show = (title: string) => {
    mockTitles.push(title);
    return Promise.resolve({ button: { accept: true } });
  };
  return {
    Dialog: { cancelButton: () => ({}), okButton: () => ({}) },
    Notification: { info: show },
    showDialog: ({ title }: { title: string }) => show(title),
    showErrorMessage: show
  };
});

jest.mock('react', () => ({ createElement: () => null }));

const plan = { differs: [], shared: [], unsafe: [] as string[] };
const done = { id: 'j', ended: 1, error: null, result: { kernel_id: 'b', notebook: 'b.ipynb' } };
const client = { branchPlan: jest.fn(), branch: jest.fn(), branchJob: jest.fn() };
const commands = { execute: jest.fn(() => Promise.resolve()) };
const notifier = { during: (_: string, work: () => Promise<unknown>) => work() } as unknown as Notifier;

async function start(): Promise<string[]> {
  mockTitles.splice(0);
  const context = { client, commands, trans: nullTranslator.load() } as unknown as IContext;
  await branch(context, notifier, new KernelModel('a'), 'p');
  return mockTitles;
}

beforeEach(() => {
  jest.resetAllMocks();
  client.branchPlan.mockResolvedValue(plan);
});

test('another kernel is started from a save point, and its notebook is opened', async () => {
  client.branch.mockResolvedValue(done);
  expect(await start()).toEqual(['Start another kernel from p?']);
  expect(client.branch).toHaveBeenCalledWith('a', 'p', false);
  expect(commands.execute).toHaveBeenCalledWith('docmanager:open', { path: 'b.ipynb' });
});

test('what two kernels must not continue with is said before, and nothing is begun', async () => {
  client.branchPlan.mockResolvedValue({ ...plan, unsafe: ['a transaction of the database x.db'] });
  expect(await start()).toEqual(['No kernel can be started from p']);
  expect(client.branch).not.toHaveBeenCalled();
});

test('that files have changed is a question, not the end', async () => {
  const error = { code: 'FILE_CHANGED', message: 'It was written to.', hint: '', left: '' };
  client.branch.mockResolvedValueOnce({ ...done, error, result: null }).mockResolvedValueOnce(done);
  expect(await start()).toEqual(['Start another kernel from p?', 'Some files are not as they were']);
  expect(client.branch).toHaveBeenLastCalledWith('a', 'p', true);
  expect(commands.execute).toHaveBeenCalledTimes(1);
});

test('a failure says that no kernel was started', async () => {
  const error = { code: 'NO_SPACE', message: 'Full.', hint: '', left: '' };
  client.branch.mockResolvedValue({ ...done, error, result: null });
  expect(await start()).toEqual(['Start another kernel from p?', 'No kernel was started from p']);
  expect(commands.execute).not.toHaveBeenCalled();
});
