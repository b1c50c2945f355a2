import type { IKernel } from '../src/api';

/** What a listing says of a kernel that runs; ``more`` is what differs. */
export function kernelDocument(id: string, more: Partial<IKernel> = {}): IKernel {
  return {
    id,
    name: 'python3',
    state: 'running',
    since: 0,
    checkpointable: true,
    reason: null,
    image: null,
    device_bytes_swapped_out: 0,
    off_gpu: false,
    gpu_wait: null,
    progress: null,
    failure: null,
    failures: [],
    job: null,
    policy: null,
    ...more
  };
}
