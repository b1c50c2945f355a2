/** Brings what may have changed to the kernels: the event bus, connections that came back, a page that was hidden. */

import type { Event, ServiceManager } from '@jupyterlab/services';
import { DisposableDelegate, type IDisposable } from '@lumino/disposable';

import { parseEvent, type ServerEvent } from './api';

/** Receives the events. */
export interface IListener {
  receive(event: ServerEvent): void;
  /** Events may have been missed. */
  doubt(): void;
}

/** Follow the server until disposed. */
export function follow(services: ServiceManager.IManager, listener: IListener): IDisposable {
  const hear = (_: Event.IManager, emission: Event.Emission) => {
    const event = parseEvent(emission);
    if (event !== null) {
      listener.receive(event);
    }
  };
  const lost = () => listener.doubt();
  // A hidden page keeps its socket, but a suspended browser does not, and gets no notice that it was closed.
  let hidden = Date.now();
  const turn = () => {
    if (document.visibilityState === 'hidden') {
      hidden = Date.now();
    } else if (Date.now() - hidden > ASLEEP) {
      listener.doubt();
    }
  };
  services.events.stream.connect(hear);
  services.connectionFailure.connect(lost);
  document.addEventListener('visibilitychange', turn);
  return new DisposableDelegate(() => {
    services.events.stream.disconnect(hear);
    services.connectionFailure.disconnect(lost);
    document.removeEventListener('visibilitychange', turn);
  });
}

/** Milliseconds in the background after which a page is not sure to have heard everything. */
const ASLEEP = 60000;
