import type { IBackJob, ISavePoint } from '../src/api';
import { Refused } from '../src/client';
import type { IContext } from '../src/context';
import { goBack } from '../src/goingBack';
import { KernelModel } from '../src/kernel';
import type { Notifier } from '../src/notifications';
import { nullTranslator } from './translation';

/** The titles of the dialogs that were shown, and whether each is accepted; the checkbox is as in `mockChecked`. */
const mockTitles: string[] = [];
const mockRefused = new Set<string>();
/** Labels of the buttons and text of the last dialog. */
let mockShown: [string[], unknown] = [[], ''];
let mockChecked = true;

jest.mock('@jupyterlab/apputils', () => ({
  Dialog: {
    cancelButton: () => ({ label: 'cancel' }),
    okButton: (options: object) => options,
    warnButton: (options: object) => options
  },
  showDialog: (shown: { title: string; body: unknown; checkbox?: object | null; buttons: { label: string }[] }) => {
    const { title, body, checkbox, buttons } = shown;
    mockTitles.push(title);
    mockShown = [buttons.map(({ label }) => label), body];
    const accept = !mockRefused.has(title);
    return Promise.resolve({
      button: { ...buttons[accept ? 1 : 0], accept },
      isChecked: checkbox ? mockChecked : null
    });
  }
}));

const point = { name: 'p', has_notebook: true } as ISavePoint;
const job = { id: 'j', ended: 1, error: null, result: { notebook: 'a.ipynb', notebook_error: null } };
const client = { back: jest.fn() };
const kernels = { request: jest.fn() };
const notifier = { undone: jest.fn(), refused: jest.fn() };

/** An open notebook, of a kernel, that notes what is done to it. */
function open(path: string, kernel: string, dirty: boolean) {
  const done: string[] = [];
  const model = { dirty };
  const save = () => {
    done.push('save');
    model.dirty = false;
    return Promise.resolve();
  };
  const revert = () => {
    done.push('revert');
    return Promise.resolve();
  };
  const context = { localPath: path, model, save, revert };
  return { context, sessionContext: { session: { kernel: { id: kernel } } }, done };
}

async function start(panels: ReturnType<typeof open>[], of = point): Promise<string[]> {
  mockTitles.splice(0);
  const notebooks = { forEach: (see: (panel: unknown) => void) => panels.forEach(see) };
  const context = { client, kernels, notebooks, trans: nullTranslator.load() } as unknown as IContext;
  await goBack(context, notifier as unknown as Notifier, new KernelModel('a'), of);
  return mockTitles;
}

beforeEach(() => {
  jest.resetAllMocks();
  mockRefused.clear();
  mockChecked = true;
  kernels.request.mockImplementation((_id: string, _verb: string, send: () => Promise<IBackJob>) => send());
  client.back.mockResolvedValue(job);
});

test('the notebook is saved, goes back with its kernel, and is shown as it is then', async () => {
  const [mine, view, other] = [open('a.ipynb', 'a', true), open('b.ipynb', 'a', false), open('a.ipynb', 'b', true)];
  client.back.mockImplementation(() => {
    expect(mine.done).toEqual(['save']);
    return Promise.resolve(job);
  });
  expect(await start([mine, mine, view, other])).toEqual(['Go back to p?']);
  expect(client.back).toHaveBeenCalledWith('a', 'p', null, true);
  expect([mine.done, view.done, other.done]).toEqual([['save', 'revert'], [], []]);
});

test.each([false, true])('without a check mark, or a notebook in the save point (%s), it stays', async bare => {
  mockChecked = bare;
  const mine = open('a.ipynb', 'a', true);
  await start([mine], { ...point, has_notebook: !bare });
  expect(client.back).toHaveBeenCalledWith('a', 'p', null, false);
  expect(mine.done).toEqual([]);
});

test('a notebook that cannot be saved prevents that its kernel goes back', async () => {
  const mine = open('a.ipynb', 'a', true);
  mine.context.save = () => Promise.reject(new Error('Full.'));
  await start([mine]);
  expect(client.back).not.toHaveBeenCalled();
  expect(notifier.undone).toHaveBeenCalledWith(
    'a.ipynb was not saved, so its kernel does not go back.',
    expect.any(Error)
  );
});

test.each([false, true])('what was typed meanwhile is given up only if the user says so (%s)', async given => {
  const mine = open('a.ipynb', 'a', false);
  client.back.mockImplementation(() => {
    mine.context.model.dirty = true;
    return Promise.resolve(job);
  });
  if (!given) {
    mockRefused.add('a.ipynb was changed meanwhile');
  }
  expect(await start([mine])).toEqual(['Go back to p?', 'a.ipynb was changed meanwhile']);
  expect(mine.done).toEqual(given ? ['revert'] : []);
});

test('that the notebook did not go back is said, and the page keeps its own', async () => {
  const mine = open('a.ipynb', 'a', false);
  const error = { code: 'NOTEBOOK_NOT_REPLACED', message: 'Changed.', hint: 'Save.', left: '' };
  client.back.mockResolvedValue({ ...job, result: { notebook: '', notebook_error: error } });
  await start([mine]);
  expect(mine.done).toEqual([]);
  const [text, said] = notifier.undone.mock.calls[0] as [string, Refused];
  expect(text).toBe('The notebook did not go back with its kernel.');
  expect([said.message, said.detail]).toEqual(['Changed.', error]);
});

test('files that differ are a question, and its answer goes with the notebook', async () => {
  const differ = { code: 'FILES_DIFFER', message: 'x', hint: '', left: '' };
  const mine = open('a.ipynb', 'a', false);
  client.back.mockRejectedValueOnce(new Refused(409, 'x', differ)).mockResolvedValueOnce(job);
  expect(await start([mine])).toEqual(['Go back to p?', 'Some files are not as they were']);
  expect(client.back).toHaveBeenLastCalledWith('a', 'p', 'then', true);
  expect(mine.done).toEqual(['revert']);
});

test.each([
  [[['then', 'now'], ['then']], ['cancel', 'Put files back'], 'Differ.', 'then'],
  [[['now']], ['cancel', 'Leave files as they are'], 'Differ.', 'now'],
  [[['then'], ['now']], ['cancel'], 'Differ. Choose for each.', null],
  [[[], ['then']], ['cancel'], 'Differ. Choose for each.', null]
])('only choices that can be done for all files are offered (%j)', async (choices, labels, text, chosen) => {
  const details = { files: choices.map((each, index) => ({ path: `/${index}`, choices: each as ('then' | 'now')[] })) };
  const differ = { code: 'FILES_DIFFER', message: 'Differ.', hint: 'Choose for each.', left: '', details };
  client.back.mockRejectedValueOnce(new Refused(409, 'Differ.', differ)).mockResolvedValueOnce(job);
  await start([open('a.ipynb', 'a', false)]);
  expect(mockShown).toEqual([labels, text]);
  expect(client.back).toHaveBeenCalledTimes(chosen === null ? 1 : 2);
  expect(client.back).toHaveBeenLastCalledWith('a', 'p', chosen, true);
});

test('a kernel that did not go back leaves the notebook alone', async () => {
  const mine = open('a.ipynb', 'a', false);
  client.back.mockResolvedValueOnce({ ...job, error: { code: 'CRIU_FAILED' }, result: null });
  await start([mine]);
  client.back.mockRejectedValueOnce(new Refused(409, 'Busy.', null));
  await start([mine]);
  expect(mine.done).toEqual([]);
  expect(notifier.undone).not.toHaveBeenCalled();
  expect(notifier.refused).toHaveBeenCalledTimes(1);
});
