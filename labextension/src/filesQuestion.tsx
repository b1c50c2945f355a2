/** Files that are not as they were at a save point: which the kernel gets, of each. */

import { Dialog, showDialog } from '@jupyterlab/apputils';
import * as React from 'react';

import type { FilesChoice, IDifferingFile } from './api';
import type { Refused } from './client';
import type { IContext } from './context';
import { bytes, localTime } from './words';

export type Choices = Record<string, FilesChoice>;

/** Ask for a choice of each file; null: the user does not go back, or a file has none, which the dialog says. */
export async function chooseFiles({ trans }: IContext, error: Refused): Promise<Choices | null> {
  const files = error.detail?.details?.files ?? [];
  const isPossible = files.length > 0 && files.every(({ choices }) => choices.length > 0);
  let chosen: Choices = {};
  const { button } = await showDialog({
    title: trans.__('Some files are not as they were'),
    body: isPossible ? (
      <Files files={files} trans={trans} report={choices => (chosen = choices)} />
    ) : (
      `${error.message} ${error.detail?.hint ?? ''}`
    ),
    buttons: [Dialog.cancelButton(), ...(isPossible ? [Dialog.okButton({ label: trans.__('Go back') })] : [])]
  });
  return isPossible && button.accept ? chosen : null;
}

interface IProps {
  files: IDifferingFile[];
  trans: IContext['trans'];
  report: (choices: Choices) => void;
}

function Files({ files, trans, report }: IProps): React.JSX.Element {
  const [chosen, choose] = React.useState(() => preset(files));
  const node = React.useRef<HTMLDivElement>(null);
  React.useEffect(() => {
    report(chosen);
    node.current?.dispatchEvent(new Event('input', { bubbles: true })); // the dialog looks whether all are chosen
  }, [chosen]);
  const labels: Record<FilesChoice, string> = { then: trans.__('As it was then'), now: trans.__('As it is now') };
  const labelsForAll: Record<FilesChoice, string> = { then: trans.__('All as then'), now: trans.__('All as now') };
  const facts = (file: IDifferingFile, choice: FilesChoice) => {
    const of = file[choice];
    if (of == null) {
      return choice === 'now' ? trans.__('not there') : '';
    }
    return `${bytes(of.bytes)}, ${localTime(new Date(1000 * of.mtime))}`;
  };
  return (
    <div className="jp-gpuCkpt-files" ref={node}>
      <p>{trans.__('Choose which the kernel gets. What is replaced is saved before.')}</p>
      {files.length > 1 && (
        <p>
          {CHOICES.filter(choice => files.some(({ choices }) => choices.includes(choice))).map(choice => (
            <button
              key={choice}
              type="button"
              className="jp-gpuCkpt-link"
              onClick={() => choose({ ...chosen, ...forAll(files, choice) })}
            >
              {labelsForAll[choice]}
            </button>
          ))}
        </p>
      )}
      {files.map(file => (
        <fieldset key={file.path}>
          <legend>
            <code>{file.path}</code>
          </legend>
          {file.choices.map(choice => (
            <label key={choice}>
              <input
                type="radio"
                name={file.path}
                required
                checked={chosen[file.path] === choice}
                onChange={() => choose({ ...chosen, [file.path]: choice })}
              />
              {labels[choice]} <span className="jp-gpuCkpt-note">{facts(file, choice)}</span>
            </label>
          ))}
        </fieldset>
      ))}
    </div>
  );
}

const CHOICES = ['then', 'now'] as const;

/** The choices of files that have but one. */
export function preset(files: IDifferingFile[]): Choices {
  const settled = files.filter(({ choices }) => choices.length === 1);
  return Object.fromEntries(settled.flatMap(({ path, choices }) => choices.map(only => [path, only] as const)));
}

/** A choice for all files that have it. */
export function forAll(files: IDifferingFile[], choice: FilesChoice): Choices {
  return Object.fromEntries(files.filter(({ choices }) => choices.includes(choice)).map(({ path }) => [path, choice]));
}
