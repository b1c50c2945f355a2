import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import type { KernelModel } from '../src/kernel';
import type { Kernels } from '../src/kernels';
import { NotebookKernels } from '../src/notebooks';

/** As much of a session context and of the kernels as a notebook's kernel looks at. */
function world(known = true) {
  const kernel = { id: 'k', reconnect: jest.fn(() => Promise.resolve()) };
  const context = { session: { kernel } } as unknown as ISessionContext;
  const source = { find: () => (known ? {} : undefined), doubt: jest.fn(), heard: jest.fn() };
  const kernels = source as unknown as Kernels & typeof source;
  const status = new Signal<ISessionContext, Kernel.ConnectionStatus>(context);
  const changed = new Signal<Kernels, KernelModel | null>(kernels);
  const output = new Signal<ISessionContext, KernelMessage.IMessage>(context);
  const disposed = new Signal<ISessionContext, void>(context);
  Object.assign(context, { kernelChanged: new Signal(context), connectionStatusChanged: status });
  Object.assign(context, { iopubMessage: output, disposed });
  Object.assign(kernels, { changed });
  const open = new NotebookKernels(kernels);
  const notebook = open.of(context);
  const prints = (msg_type: string) => output.emit({ header: { msg_type } } as KernelMessage.IMessage);
  const heard = () => changed.emit(null);
  return {
    close: () => disposed.emit(),
    context,
    heard,
    kernel,
    kernels,
    notebook,
    open,
    prints,
    status: status.emit.bind(status)
  };
}

test('all that is shown of a document shares its kernel, which ends with the document', () => {
  const { close, context, kernel, notebook, heard, open, status } = world();
  expect(open.of(context)).toBe(notebook);
  status('connected');
  status('disconnected');
  heard();
  expect(kernel.reconnect).toHaveBeenCalledTimes(1);
  close();
  expect(notebook.isDisposed).toBe(true);
});

test('what only a kernel that is awake says is shown', () => {
  const { kernels, prints } = world();
  prints('status'); // the server says this for a sleeping kernel, too
  prints('comm_msg');
  expect(kernels.heard).not.toHaveBeenCalled();
  prints('stream');
  expect(kernels.heard).toHaveBeenCalledWith('k');
});

describe('a connection to a kernel', () => {
  afterEach(() => jest.useRealTimers());

  it('is left alone while it is made for the first time', () => {
    const { kernel, heard, status } = world();
    status('connecting');
    heard();
    expect(kernel.reconnect).not.toHaveBeenCalled();
  });

  it.each(['connecting', 'disconnected'] as const)('is made again when the server is heard of (%s)', lost => {
    const { kernel, kernels, heard, status } = world();
    status('connected');
    status(lost);
    expect(kernel.reconnect).not.toHaveBeenCalled();
    heard();
    expect(kernel.reconnect).toHaveBeenCalledTimes(1);
    status('connected');
    expect(kernels.doubt).toHaveBeenCalledTimes(1);
    heard();
    expect(kernel.reconnect).toHaveBeenCalledTimes(1);
  });

  it('is given time to come about', () => {
    jest.useFakeTimers();
    const { kernel, heard, status } = world();
    status('connected');
    status('connecting');
    heard();
    heard();
    expect(kernel.reconnect).toHaveBeenCalledTimes(1);
    jest.advanceTimersByTime(6000);
    heard();
    expect(kernel.reconnect).toHaveBeenCalledTimes(2);
  });

  it('to a kernel that is gone is given up', () => {
    const { kernel, heard, status } = world(false);
    status('connected');
    status('disconnected');
    heard();
    expect(kernel.reconnect).not.toHaveBeenCalled();
  });
});
