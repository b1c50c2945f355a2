/** The save points of one kernel, in the panel: listed once opened; made, gone back to, branched, compared, deleted. */

import { Dialog, showDialog } from '@jupyterlab/apputils';
import * as React from 'react';

import type { ISavePoint } from './api';
import { branch } from './branch';
import { compare } from './comparison';
import type { IContext } from './context';
import { goBack } from './goingBack';
import { IDS } from './ids';
import type { KernelModel } from './kernel';
import type { Notifier } from './notifications';
import { bytes, duration } from './words';

interface IProps {
  context: IContext;
  notifier: Notifier;
  kernel: KernelModel;
  /** Kept by the panel: the kernel's row moves with its memory, also during a save. */
  isOpen: boolean;
  onToggle: (isOpen: boolean) => void;
}

export function SavePoints({ context, notifier, kernel, isOpen, onToggle }: IProps): React.JSX.Element {
  const { client, commands, trans } = context;
  const args = { kernelId: kernel.id };
  const [points, setPoints] = React.useState<ISavePoint[]>([]);
  const [trouble, setTrouble] = React.useState('');
  const looks = React.useRef(0);
  const load = () => {
    const look = ++looks.current;
    const show = (found: ISavePoint[] | null, error: string) => {
      if (look === looks.current) {
        setPoints(known => found ?? known); // an answer that a later question has overtaken may be older
        setTrouble(error);
      }
    };
    client.saves(kernel.id).then(
      found => show(found, ''),
      (error: unknown) => show(null, trans.__('The save points could not be loaded: %1', (error as Error).message))
    );
  };
  // A save, or a way back, ends with a new state.
  React.useEffect(() => {
    if (isOpen) {
      load();
    }
  }, [isOpen, kernel.phase, kernel.since]);
  const disabled = !kernel.awake;
  return (
    <details
      className="jp-gpuCkpt-children jp-gpuCkpt-savePoints"
      open={isOpen}
      onToggle={event => onToggle(event.currentTarget.open)}
    >
      <summary>{trans.__('Save points')}</summary>
      {trouble && <p role="status">{trouble}</p>}
      <ul>
        {points.map(point => (
          <li key={point.name}>
            <span title={trans.__('after cell %1', point.cell)}>
              {point.name} · {bytes(point.bytes)} · {duration(Math.max(0, Date.now() / 1000 - point.created))}
            </span>
            <span>
              <button
                className="jp-gpuCkpt-link"
                disabled={disabled}
                aria-label={trans.__('Go back to %1', point.name)}
                onClick={() => void goBack(context, notifier, kernel, point)}
              >
                {trans.__('Go back')}
              </button>{' '}
              <button
                className="jp-gpuCkpt-link"
                aria-label={trans.__('Branch from %1', point.name)}
                title={trans.__('Start another kernel from here')}
                onClick={() => void branch(context, notifier, kernel, point.name)}
              >
                {trans.__('Branch')}
              </button>{' '}
              <button
                className="jp-gpuCkpt-link"
                disabled={disabled && points.length < 2}
                aria-label={trans.__('Compare %1', point.name)}
                onClick={() => void compare({ context, kernel, point, others: points.filter(each => each !== point) })}
              >
                {trans.__('Compare')}
              </button>{' '}
              <button
                className="jp-gpuCkpt-link"
                disabled={disabled}
                aria-label={trans.__('Delete %1', point.name)}
                onClick={() => void remove(context, notifier, kernel, point).then(load)}
              >
                {trans.__('Delete')}
              </button>
            </span>
          </li>
        ))}
      </ul>
      <button
        className="jp-gpuCkpt-link"
        disabled={!commands.isEnabled(IDS.save, args)}
        title={commands.caption(IDS.save, args)}
        onClick={() => void commands.execute(IDS.save, args)}
      >
        {trans.__('Save now')}
      </button>
    </details>
  );
}

async function remove(
  { client, trans }: IContext,
  notifier: Notifier,
  kernel: KernelModel,
  point: ISavePoint
): Promise<void> {
  const { button } = await showDialog({
    title: trans.__('Delete the save point %1?', point.name),
    body: trans.__('This frees %1 of disk space.', bytes(point.bytes)),
    buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: trans.__('Delete') })]
  });
  if (button.accept) {
    await client
      .removeSave(kernel.id, point.name)
      .catch((error: unknown) => notifier.undone(trans.__('The save point %1 was not deleted.', point.name), error));
  }
}
