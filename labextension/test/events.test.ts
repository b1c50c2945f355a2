import { EventManager, ServerConnection, type ServiceManager } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import { follow } from '../src/events';

class Socket {
  static opened: Socket[] = [];
  onclose: () => void = () => undefined;

  constructor(readonly url: string) {
    Socket.opened.push(this);
  }

  close(): void {
    this.onclose();
  }
}

/** Do the work where there is a document, which JupyterLab's own code would use for more than listeners. */
function inPage<T>(work: () => T): T {
  const page = globalThis as { document?: unknown };
  page.document = { addEventListener: () => undefined, removeEventListener: () => undefined };
  try {
    return work();
  } finally {
    delete page.document;
  }
}

test('events may have been missed when their socket has closed, which the event bus does not say', async () => {
  const settings = { baseUrl: 'http://here/', wsUrl: 'ws://here/', WebSocket: Socket as unknown as typeof WebSocket };
  const events = new EventManager({
    serverSettings: ServerConnection.makeSettings({ ...settings, appendToken: false }),
    standby: 'never'
  });
  const services = { events, connectionFailure: new Signal({}) } as unknown as ServiceManager.IManager;
  let doubts = 0;
  const following = inPage(() => follow(services, { receive: () => undefined, doubt: () => doubts++ }));
  while (Socket.opened.length === 0) {
    await new Promise(resolve => setTimeout(resolve, 10));
  }
  expect(doubts).toBe(0);
  Socket.opened[0].close();
  while (Socket.opened.length === 1) {
    await new Promise(resolve => setTimeout(resolve, 10)); // it connects again by itself
  }
  expect(doubts).toBe(1);
  inPage(() => following.dispose());
  Socket.opened[1].close();
  await new Promise(resolve => setTimeout(resolve, 10));
  expect(doubts).toBe(1);
  events.dispose();
}, 60000);
