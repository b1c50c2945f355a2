/** "What differs?": the variables that differ between a save point and the kernel as it is, or another save point. */

import { Dialog, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { IComparedVariable, IComparison, ISavePoint } from './api';
import { Refused } from './client';
import type { IContext } from './context';
import type { KernelModel } from './kernel';
import { bytes } from './words';

interface IProps {
  context: IContext;
  kernel: KernelModel;
  point: ISavePoint;
  /** The kernel's other save points. */
  others: ISavePoint[];
}

/** Show what differs; first from the kernel as it is now, where it is awake. */
export async function compare(props: IProps): Promise<void> {
  const { trans } = props.context;
  await showDialog({
    title: trans.__('What differs from %1?', props.point.name),
    body: <Comparison {...props} />,
    buttons: [Dialog.okButton({ label: trans.__('Close') })]
  });
}

function Comparison({ context, kernel, point, others }: IProps): React.JSX.Element {
  const { client, trans } = context;
  const [to, setTo] = React.useState(kernel.awake ? '' : (others[0]?.name ?? ''));
  const [found, setFound] = React.useState<IComparison | string | null>(null);
  React.useEffect(() => {
    let isWanted = true;
    setFound(null);
    client.compare(kernel.id, point.name, to).then(
      comparison => isWanted && setFound(comparison),
      (error: unknown) => isWanted && setFound(reason(error))
    );
    return () => {
      isWanted = false; // another choice was made
    };
  }, [to]);
  return (
    <div className="jp-gpuCkpt-comparison">
      <label>
        {trans.__('Compared with')}{' '}
        <select value={to} onChange={event => setTo(event.target.value)}>
          <option value="">{trans.__('the kernel as it is now')}</option>
          {others.map(({ name }) => (
            <option key={name} value={name}>
              {name}
            </option>
          ))}
        </select>
      </label>
      <p role="status">
        {found === null ? trans.__('Comparing…') : typeof found === 'string' ? found : summary(found, trans)}
      </p>
      {found !== null && typeof found !== 'string' && <Differences found={found} trans={trans} />}
    </div>
  );
}

function reason(error: unknown): string {
  const hint = error instanceof Refused ? (error.detail?.hint ?? '') : '';
  return `${(error as Error).message} ${hint}`.trim();
}

function summary({ added, gone, changed, unknown, same, complete }: IComparison, trans: TranslationBundle): string {
  const counts = [
    trans.__('%1 changed, %2 added, %3 gone, %4 the same.', changed.length, added.length, gone.length, same),
    unknown.length > 0
      ? trans.__('Of %1 it is not known: they are large, on a GPU, or of an extension module.', unknown.length)
      : '',
    complete ? '' : trans.__('There are more variables than a save point notes.')
  ];
  return counts.filter(Boolean).join(' ');
}

function Differences({ found, trans }: { found: IComparison; trans: TranslationBundle }): React.JSX.Element | null {
  const rows: [string, IComparedVariable[]][] = [
    [trans.__('changed'), found.changed],
    [trans.__('added'), found.added],
    [trans.__('gone'), found.gone],
    [trans.__('not known'), found.unknown]
  ];
  if (rows.every(([, variables]) => variables.length === 0)) {
    return null;
  }
  return (
    <table>
      <thead>
        <tr>
          {[trans.__('Variable'), trans.__('Difference'), trans.__('Before'), trans.__('After')].map(head => (
            <th key={head} scope="col">
              {head}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {rows.flatMap(([word, variables]) =>
          variables.map(({ name, before, after }) => (
            <tr key={name}>
              <th scope="row">
                <code>{name}</code>
              </th>
              <td>{word}</td>
              <td>{before === null ? '' : `${before.type}, ${bytes(before.bytes)}`}</td>
              <td>{after === null ? '' : `${after.type}, ${bytes(after.bytes)}`}</td>
            </tr>
          ))
        )}
      </tbody>
    </table>
  );
}
