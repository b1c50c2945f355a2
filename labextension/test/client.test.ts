import { ServerConnection } from '@jupyterlab/services';

import { Client } from '../src/client';
import { followed } from '../src/jobs';

jest.useFakeTimers();

function client(body: string, init: ResponseInit): Client {
  const fetch = () => Promise.resolve(new Response(body, init));
  return new Client(ServerConnection.makeSettings({ baseUrl: 'http://localhost/', fetch }));
}

test('what a proxy says without a text has at least its number', async () => {
  await expect(client('<p>no</p>', { status: 502 }).kernels()).rejects.toMatchObject({
    status: 502,
    message: 'HTTP 502'
  });
});

test('a page, where the server was to answer, is no answer', async () => {
  const headers = { 'Content-Type': 'text/html' };
  await expect(client('<p>Log in</p>', { status: 200, headers }).kernels()).rejects.toThrow('HTTP 200');
});

describe('a job', () => {
  const begun = { id: 'j', ended: null };
  const refused = (status: number) => Object.assign(new Error(String(status)), { status });

  test('is followed to its end, also while the server cannot be reached', async () => {
    const request = jest.fn((): Promise<{ id: string; ended: number | null }> =>
      Promise.resolve({ id: 'j', ended: 7 })
    );
    request.mockRejectedValueOnce(new TypeError('Failed to fetch'));
    request.mockRejectedValueOnce(refused(503));
    request.mockResolvedValueOnce(begun);
    const end = followed(begun, request, () => false);
    await jest.advanceTimersByTimeAsync(60_000);
    await expect(end).resolves.toEqual({ id: 'j', ended: 7 });
    expect(request).toHaveBeenCalledTimes(4);
  });

  test('that the server does not know any more is an error', async () => {
    const end = followed(
      begun,
      () => Promise.reject(refused(404)),
      () => false
    ).catch((error: unknown) => error);
    await jest.advanceTimersByTimeAsync(60_000);
    expect(await end).toMatchObject({ status: 404 });
  });

  test('is not polled by a hidden tab', async () => {
    let isHidden = true;
    const request = jest.fn(() => Promise.resolve({ id: 'j', ended: 7 }));
    const end = followed(begun, request, () => isHidden);
    await jest.advanceTimersByTimeAsync(60_000);
    expect(request).not.toHaveBeenCalled();
    isHidden = false;
    await jest.advanceTimersByTimeAsync(60_000);
    await expect(end).resolves.toEqual({ id: 'j', ended: 7 });
  });
});
