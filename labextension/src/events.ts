/**
 * Brings what may have changed to the kernels: the event bus, connections that were lost or came back, a page that was
 * hidden.
 */

import type { Event, ServiceManager } from '@jupyterlab/services';
import { DisposableDelegate, type IDisposable } from '@lumino/disposable';
import type { IPoll } from '@lumino/polling';

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
  // The event bus connects again by itself, up to half a minute later, and only its own poll knows that it had to.
  const { _poll: poll } = services.events as unknown as { _poll?: IPoll<unknown, unknown, string> };
  const tick = (_: unknown, { phase }: { phase: string }) => {
    if (phase === 'rejected') {
      listener.doubt();
    }
  };
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
  poll?.ticked.connect(tick);
  document.addEventListener('visibilitychange', turn);
  return new DisposableDelegate(() => {
    services.events.stream.disconnect(hear);
    services.connectionFailure.disconnect(lost);
    poll?.ticked.disconnect(tick);
    document.removeEventListener('visibilitychange', turn);
  });
}

/** Milliseconds in the background after which a page is not sure to have heard everything. */
const ASLEEP = 60000;
