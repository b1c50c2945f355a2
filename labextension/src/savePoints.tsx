/** The save points of one kernel, in the panel: a graph, once opened; made, gone back to, branched, compared, deleted. */

import { Dialog, showDialog } from '@jupyterlab/apputils';
import * as React from 'react';

import type { ISavePoint } from './api';
import { branch } from './branch';
import { compare } from './comparison';
import type { IContext } from './context';
import { goBack } from './goingBack';
import { type IRow, layout, width } from './graph';
import { IDS } from './ids';
import type { KernelModel } from './kernel';
import type { Notifier } from './notifications';
import { bytes, duration, localTime } from './words';

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
        setPoints(known => (found === null ? known : [...found].reverse())); // an answer that a later question has overtaken may be older
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
  const rows = layout(points.map(({ image, parent }) => ({ id: image, parent: parent ?? '' })));
  const names = new Map(points.map(({ image, name }) => [image, name]));
  const lanes = width(rows);
  const isSettled = kernel.awake || kernel.resting;
  const describedBy = React.useId();
  return (
    <details
      className="jp-gpuCkpt-children jp-gpuCkpt-savePoints"
      open={isOpen}
      onToggle={event => onToggle(event.currentTarget.open)}
    >
      <summary>{trans.__('Save points')}</summary>
      {trouble && <p role="status">{trouble}</p>}
      <ul>
        {points.map((point, index) => (
          <li key={point.image} aria-labelledby={`${describedBy}${index}`}>
            <Lines row={rows[index]} lanes={lanes} isAutomatic={point.automatic} />
            <div>
              <span id={`${describedBy}${index}`} title={localTime(new Date(1000 * point.created))}>
                <strong>{point.name}</strong> {facts(point, names.get(point.parent ?? ''), context).join(' · ')}
              </span>
              <div role="group" aria-labelledby={`${describedBy}${index}`}>
                <button
                  className="jp-gpuCkpt-link"
                  disabled={!isSettled}
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
                  disabled={!kernel.awake && points.length < 2}
                  aria-label={trans.__('Compare %1', point.name)}
                  onClick={() =>
                    void compare({ context, kernel, point, others: points.filter(each => each !== point) })
                  }
                >
                  {trans.__('Compare')}
                </button>{' '}
                <button
                  className="jp-gpuCkpt-link"
                  disabled={!isSettled || point.asleep}
                  aria-label={trans.__('Delete %1', point.name)}
                  title={point.asleep ? trans.__('The kernel sleeps in it: wake it before') : undefined}
                  onClick={() => void remove(context, notifier, kernel, point).then(load)}
                >
                  {trans.__('Delete')}
                </button>
              </div>
            </div>
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

/** What is shown of a save point beside its name; `parent`: the name of the one that it descends from. */
function facts(point: ISavePoint, parent: string | undefined, { trans }: IContext): string[] {
  const all = bytes(point.bytes);
  const alone = bytes(point.bytes_alone);
  return [
    point.automatic ? trans.__('automatic') : '',
    point.asleep ? trans.__('the kernel sleeps in it') : '',
    point.cell > 0 ? trans.__('after cell %1', point.cell) : '',
    all === alone ? all : trans.__('%1, %2 alone', all, alone),
    trans.__('%1 ago', duration(Math.max(0, Date.now() / 1000 - point.created))),
    parent === undefined ? '' : trans.__('from %1', parent)
  ].filter(Boolean);
}

/** Pixels from one lane to the next, and from the top of a row to its dot. */
const LANE = 12;
const DOT = 11;

/** The part of the graph in one row, as high as that is. */
function Lines({ row, lanes, isAutomatic }: { row: IRow | undefined; lanes: number; isAutomatic: boolean }) {
  if (row === undefined) {
    return null;
  }
  const x = (lane: number) => (lane + 0.5) * LANE;
  const at = x(row.lane);
  return (
    <svg aria-hidden="true" style={{ width: lanes * LANE }}>
      {row.passing.map(lane => (
        <line key={lane} x1={x(lane)} y1="0" x2={x(lane)} y2="100%" />
      ))}
      {row.children.map(lane => (
        <line key={lane} x1={x(lane)} y1="0" x2={at} y2={DOT} />
      ))}
      {row.hasParent && <line x1={at} y1={DOT} x2={at} y2="100%" />}
      <circle className={isAutomatic ? 'jp-mod-automatic' : ''} cx={at} cy={DOT} r="3.5" />
    </svg>
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
    body: trans.__('This frees %1 of disk space.', bytes(point.bytes_alone)),
    buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: trans.__('Delete') })]
  });
  if (button.accept) {
    await client
      .removeSave(kernel.id, point.name)
      .catch((error: unknown) => notifier.undone(trans.__('The save point %1 was not deleted.', point.name), error));
  }
}
