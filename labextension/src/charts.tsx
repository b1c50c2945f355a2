/** A stacked bar and a line, in SVG. */

import * as React from 'react';

import { WINDOW } from './gpus';

const WIDTH = 240;
const BAR = 14;
const LINE = 28;

export interface IShare {
  bytes: number;
  color: string;
  label: string;
}

/** A GPU's memory by kernel. */
export function MemoryBar(props: { total: number; shares: IShare[]; label: string }): React.JSX.Element {
  let left = 0;
  const scale = WIDTH / Math.max(1, props.total);
  return (
    <figure>
      <svg viewBox={`0 0 ${WIDTH} ${BAR}`} preserveAspectRatio="none" role="img" aria-label={props.label}>
        <rect className="jp-mod-free" width={WIDTH} height={BAR} />
        {props.shares.map((share, index) => {
          const x = left;
          const width = Math.min(WIDTH - x, share.bytes * scale);
          left += width;
          return (
            <rect key={index} className={share.color} x={x} width={width} height={BAR}>
              <title>{share.label}</title>
            </rect>
          );
        })}
      </svg>
      <figcaption>{props.label}</figcaption>
    </figure>
  );
}

/** Memory in use during the last hour; the right edge is now. */
export function Sparkline(props: {
  history: [number, number][];
  total: number;
  label: string;
  now?: number;
}): React.JSX.Element {
  return (
    <svg className="jp-gpuCkpt-sparkline" viewBox={`0 0 ${WIDTH} ${LINE}`} preserveAspectRatio="none" role="img">
      <title>{props.label}</title>
      <line x1={0} x2={WIDTH} y1={LINE - 1} y2={LINE - 1} />
      <polyline points={points(props.history, props.total, props.now ?? Date.now() / 1000)} />
    </svg>
  );
}

/** The line's points; the last value extends until now. */
export function points(history: [number, number][], total: number, now: number): string {
  const last = history[history.length - 1];
  const all = last === undefined ? [] : [...history, [now, last[1]] as [number, number]];
  return all
    .filter(([at]) => at >= now - WINDOW)
    .map(([at, used]) => {
      const x = WIDTH * (1 - (now - at) / WINDOW);
      const y = 1 + (LINE - 2) * (1 - Math.min(1, used / Math.max(1, total)));
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    })
    .join(' ');
}
