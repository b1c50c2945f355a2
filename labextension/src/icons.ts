/** Icons: a GPU board whose face shows the kernel's state. */

import { LabIcon } from '@jupyterlab/ui-components';

import type { Phase } from './kernel';

// `style`, because the themes' rules for `jp-icon3` would fill the outline.
const OUTLINE = 'class="jp-icon3" stroke="#616161" stroke-width="1.4" style="fill: none"';
const BOARD =
  `<path ${OUTLINE} stroke-linejoin="round" ` +
  'd="M1 1v14M1 2.2h12.6a1.4 1.4 0 0 1 1.4 1.4v7.4a1.4 1.4 0 0 1-1.4 1.4H1M5 12.4v2.6M10.5 12.4v2.6"/>';

function icon(name: string, face: string): LabIcon {
  const svgstr = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 16 16">${BOARD}${face}</svg>`;
  return new LabIcon({ name: `gpu-ckpt:${name}`, svgstr });
}

function shape(kind: string, d: string): string {
  return `<path class="jp-gpuCkpt-${kind}" d="${d}"/>`;
}

const AWAKE = icon('running', shape('awake', 'M8 4a3.3 3.3 0 1 0 0 6.6a3.3 3.3 0 0 0 0-6.6z'));
const SUSPENDED = icon('suspended', shape('asleep', 'M5 4.2h2.2v6.2H5zM8.8 4.2H11v6.2H8.8z'));
const CHECKPOINTED = icon('checkpointed', shape('asleep', 'M8.6 3.7a3.7 3.7 0 1 0 3 5.7a3.5 3.5 0 0 1-3-5.7z'));
const OFF_GPU = icon(
  'off-gpu',
  shape('awake', 'M8 4a3.3 3.3 0 1 0 0 6.6a3.3 3.3 0 0 0 0-6.6zm0 1.5a1.8 1.8 0 1 1 0 3.6a1.8 1.8 0 0 1 0-3.6z')
);
const GOING_TO_SLEEP = icon('going-to-sleep', shape('moving', 'M7 3.8h2v3.2h2.4L8 10.9 4.6 7H7z'));
const WAKING = icon('waking', shape('moving', 'M7 10.8h2V7.6h2.4L8 3.7 4.6 7.6H7z'));

/** The board alone: for what is about all kernels, or about one that cannot sleep. */
export const gpuIcon = icon('gpu', `<circle ${OUTLINE} cx="8" cy="7.3" r="2.6"/>`);

export function phaseIcon(phase: Phase): LabIcon {
  switch (phase) {
    case 'running':
      return AWAKE;
    case 'off_gpu':
      return OFF_GPU;
    case 'suspended':
      return SUSPENDED;
    case 'checkpointed':
      return CHECKPOINTED;
    case 'suspending':
    case 'checkpointing':
      return GOING_TO_SLEEP;
    case 'waking':
      return WAKING;
    default:
      return gpuIcon;
  }
}
