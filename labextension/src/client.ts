/** REST: one method for each request of `openapi.yaml` that the front end makes. */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

import type {
  FilesChoice,
  IBackJob,
  IBranchJob,
  IBranchPlan,
  IComparison,
  IErrorDetail,
  IGpus,
  IImage,
  IJob,
  IKernel,
  IOutlook,
  IPreflight,
  ISavePoint,
  IStatus,
  Verb,
  When
} from './api';

/** The server refused; what it says is for the user. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly detail: IErrorDetail | null
  ) {
    super(message);
  }
}

export class Client {
  constructor(private readonly settings: ServerConnection.ISettings) {}

  status(): Promise<IStatus> {
    return this.request('GET', 'status');
  }

  kernels(): Promise<IKernel[]> {
    return this.request('GET', 'kernels');
  }

  kernel(id: string): Promise<IKernel> {
    return this.request('GET', 'kernels', id);
  }

  preflight(id: string): Promise<IPreflight> {
    return this.request('GET', 'kernels', id, 'preflight');
  }

  /** `when` says what to do about a running cell, for a suspend or checkpoint. */
  begin(id: string, verb: Verb, when: When = 'now'): Promise<IJob> {
    return this.send('POST', ['kernels', id, verb], when === 'idle' ? JSON.stringify({ when }) : null);
  }

  /** Cancel a job that waits for a cell. */
  cancel(job: string): Promise<IJob> {
    return this.request('DELETE', 'jobs', job);
  }

  job(id: string): Promise<IJob> {
    return this.request('GET', 'jobs', id);
  }

  /** Keep policies off a kernel for so many seconds; 0 ends that. */
  protect(id: string, seconds: number): Promise<{ protected_until: number | null }> {
    return this.send('POST', ['kernels', id, 'protect'], JSON.stringify({ seconds }));
  }

  /** Begin the kernel's idleness anew. */
  keep(id: string): Promise<{ policy: IOutlook | null }> {
    return this.request('POST', 'kernels', id, 'keep');
  }

  /** The save points of a kernel, oldest first. */
  saves(id: string): Promise<ISavePoint[]> {
    return this.request('GET', 'kernels', id, 'saves');
  }

  save(id: string, name: string): Promise<IJob> {
    return this.send('POST', ['kernels', id, 'save'], JSON.stringify({ name }));
  }

  /** `files`: which the kernel gets of files that are not as they were, by path. */
  back(id: string, name: string, files: Record<string, FilesChoice> | null, notebook: boolean): Promise<IBackJob> {
    const body = { name, ...(files && { files }), ...(notebook && { notebook }) };
    return this.send('POST', ['kernels', id, 'back'], JSON.stringify(body));
  }

  backJob(id: string): Promise<IBackJob> {
    return this.request('GET', 'jobs', id);
  }

  /** `to`: another save point; empty for the kernel as it is now. */
  compare(id: string, name: string, to: string): Promise<IComparison> {
    const query = to && `?to=${encodeURIComponent(to)}`;
    return this.send('GET', ['kernels', id, 'saves', name, 'compare'], null, query);
  }

  branchPlan(id: string, name: string): Promise<IBranchPlan> {
    return this.send('GET', ['kernels', id, 'branch'], null, `?save_point=${encodeURIComponent(name)}`);
  }

  /** Start another kernel; the caller has shown the plan to the user. */
  branch(id: string, name: string, acceptChangedFiles: boolean): Promise<IBranchJob> {
    const accepted = acceptChangedFiles ? { accept_changed_files: true } : {}; // else as the server's settings say
    const body = { save_point: name, accept_differences: true, ...accepted };
    return this.send('POST', ['kernels', id, 'branch'], JSON.stringify(body));
  }

  branchJob(id: string): Promise<IBranchJob> {
    return this.request('GET', 'jobs', id);
  }

  async removeSave(id: string, name: string): Promise<void> {
    await this.request('DELETE', 'kernels', id, 'saves', name);
  }

  gpus(): Promise<IGpus> {
    return this.request('GET', 'gpus');
  }

  images(): Promise<IImage[]> {
    return this.request('GET', 'images');
  }

  /** Delete an image, also where a kernel sleeps in it: the caller has asked the user. */
  async remove(id: string): Promise<void> {
    await this.send('DELETE', ['images', id], null, '?force=true');
  }

  /** Attach the kernel that sleeps in an image to this server; it stays asleep. */
  attach(id: string): Promise<IKernel> {
    return this.request('POST', 'images', id, 'attach');
  }

  private request<T>(method: string, ...path: string[]): Promise<T> {
    return this.send(method, path, null);
  }

  private async send<T>(method: string, path: string[], body: string | null, query = ''): Promise<T> {
    const url = URLExt.join(this.settings.baseUrl, 'gpu-ckpt', ...path.map(encodeURIComponent)) + query;
    const response = await ServerConnection.makeRequest(url, { method, body }, this.settings);
    const text = await response.text();
    const isJson = response.headers.get('Content-Type')?.includes('json') === true;
    const document: unknown = text && isJson ? JSON.parse(text) : {};
    if (!response.ok || (text && !isJson)) {
      const { message, error } = document as { message?: string; error?: IErrorDetail };
      const status = `HTTP ${response.status} ${response.statusText}`.trim(); // of a proxy, or a page to log in
      throw new Refused(response.status, message ?? status, error ?? null);
    }
    return document as T;
  }
}
