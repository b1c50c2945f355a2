import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import type { KernelModel } from '../src/kernel';
import type { Kernels } from '../src/kernels';
import { NotebookKernel } from '../src/notebooks';

/** As much of a session context and of the kernels as a notebook's kernel looks at. */
function world(known = true) {
  const kernel = { id: 'k', reconnect: jest.fn(() => Promise.resolve()) };
  const context = { session: { kernel } } as unknown as ISessionContext;
  const kernels = { find: () => (known ? {} : undefined), doubt: jest.fn() } as unknown as Kernels & {
    doubt: jest.Mock;
  };
  const status = new Signal<ISessionContext, Kernel.ConnectionStatus>(context);
  const changed = new Signal<Kernels, KernelModel | null>(kernels);
  Object.assign(context, { kernelChanged: new Signal(context), connectionStatusChanged: status });
  Object.assign(kernels, { changed });
  const notebook = new NotebookKernel(context, kernels);
  return { kernel, kernels, notebook, heard: () => changed.emit(null), status: status.emit.bind(status) };
}

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
