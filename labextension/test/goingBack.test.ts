import type { FilesChoice, IBackJob, ISavePoint } from '../src/api';
import { Refused } from '../src/client';
import type { IContext } from '../src/context';
import { forAll, preset } from '../src/filesQuestion';
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
/** What is chosen in the question about files. */
let mockChosen: object = {};

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
    (body as { props?: { report: (chosen: object) => void } }).props?.report(mockChosen);
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
  mockChosen = {};
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

/** The refusal to go back as files differ: by path, the choices that each has. */
function differ(choices: Record<string, FilesChoice[]>): Refused {
  const files = Object.entries(choices).map(([path, each]) => ({ path, choices: each, then: null, now: null }));
  const detail = { code: 'FILES_DIFFER', message: 'Differ.', hint: 'Mend /a.', left: '', details: { files } };
  return new Refused(409, 'Differ.', detail);
}

test('files that differ are a question, and its answer goes with the notebook', async () => {
  const mine = open('a.ipynb', 'a', false);
  client.back.mockRejectedValueOnce(differ({ '/a': ['then', 'now'], '/b': ['now'] })).mockResolvedValueOnce(job);
  mockChosen = { '/a': 'then', '/b': 'now' };
  expect(await start([mine])).toEqual(['Go back to p?', 'Some files are not as they were']);
  expect(mockShown[0]).toEqual(['cancel', 'Go back']);
  expect(client.back).toHaveBeenLastCalledWith('a', 'p', { '/a': 'then', '/b': 'now' }, true);
  expect(mine.done).toEqual(['revert']);
});

test('a file that changes while the user chooses is one more question', async () => {
  client.back
    .mockRejectedValueOnce(differ({ '/a': ['then', 'now'] }))
    .mockImplementationOnce(() => {
      mockChosen = { '/b': 'now' };
      return Promise.reject(differ({ '/b': ['then', 'now'] }));
    })
    .mockResolvedValueOnce(job);
  mockChosen = { '/a': 'then' };
  await start([open('a.ipynb', 'a', false)]);
  expect(client.back).toHaveBeenCalledTimes(3);
  expect(client.back).toHaveBeenLastCalledWith('a', 'p', { '/a': 'then', '/b': 'now' }, true);
});

test('who does not want it after the question stays', async () => {
  mockRefused.add('Some files are not as they were');
  client.back.mockRejectedValueOnce(differ({ '/a': ['then', 'now'] }));
  await start([open('a.ipynb', 'a', false)]);
  expect(client.back).toHaveBeenCalledTimes(1);
  expect(notifier.refused).not.toHaveBeenCalled();
});

test('where a file has no choice, it is said why, and there is no way on', async () => {
  client.back.mockRejectedValueOnce(differ({ '/a': [], '/b': ['then'] }));
  await start([open('a.ipynb', 'a', false)]);
  expect(mockShown).toEqual([['cancel'], 'Differ. Mend /a.']);
  expect(client.back).toHaveBeenCalledTimes(1);
});

test('an only choice is made before, and one for all is for those files that have it', () => {
  const choices: FilesChoice[][] = [['then', 'now'], ['then'], ['now']];
  const files = choices.map((each, index) => ({ path: `/${index}`, choices: each, then: null, now: null }));
  expect(preset(files)).toEqual({ '/1': 'then', '/2': 'now' });
  expect(forAll(files, 'then')).toEqual({ '/0': 'then', '/1': 'then' });
  expect(forAll(files, 'now')).toEqual({ '/0': 'now', '/2': 'now' });
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
