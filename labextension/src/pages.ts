/** The pages of a kernel's notebooks. */

import { PathExt } from '@jupyterlab/coreutils';
import type { NotebookPanel } from '@jupyterlab/notebook';

import type { IContext } from './context';
import type { KernelModel } from './kernel';

export type Document = NotebookPanel['context'];

/** A notebook that could not be saved, and why. */
export interface IUnsaved {
  name: string;
  error: unknown;
}

/** The open notebooks of a kernel. */
export function documents({ notebooks }: IContext, kernel: KernelModel): Document[] {
  const found = new Set<Document>(); // several views of a notebook have one
  notebooks?.forEach(({ context, sessionContext }) => {
    if (sessionContext.session?.kernel?.id === kernel.id) {
      found.add(context);
    }
  });
  return [...found];
}

/** Save what pages alone have of notebooks, so that the server keeps it; the first that could not be, else null. */
export async function savePages(pages: Document[]): Promise<IUnsaved | null> {
  for (const page of pages.filter(({ model }) => model.dirty)) {
    try {
      await page.save();
    } catch (error) {
      return { name: PathExt.basename(page.localPath), error };
    }
  }
  return null;
}
