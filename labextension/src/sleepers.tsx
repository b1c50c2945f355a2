/** The section "Sleeping kernels" of the running sessions: those of this server, and images without a server. */

import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import type { IRunningSessions } from '@jupyterlab/running';
import { deleteIcon, type LabIcon } from '@jupyterlab/ui-components';
import { type ISignal, Signal } from '@lumino/signaling';
import * as React from 'react';

import type { IImage } from './api';
import type { IContext } from './context';
import { phaseIcon } from './icons';
import { IDS } from './ids';
import { sum } from './kernel';
import { pathOf } from './notebooks';
import { bytes, duration } from './words';

/** Milliseconds after which a failed request for the images is repeated. */
const AGAIN = 3000;
/** Milliseconds after which the list is announced once more. */
const REPEATED = 2000;

export class Sleepers implements IRunningSessions.IManager {
  constructor(private readonly context: IContext) {
    const { trans } = context;
    this.name = trans.__('Sleeping kernels');
    this.shutdownLabel = trans.__('Delete');
    this.shutdownAllLabel = trans.__('Delete all');
    this.shutdownAllConfirmationText = trans.__(
      'Delete the images of all sleeping kernels? Their variables would be lost.'
    );
    // Which kernels sleep has changed: so have the images.
    context.kernels.changed.connect((kernels, model) => {
      const asleep = [...context.kernels].map(kernel => `${kernel.image}`).join();
      if (asleep !== this._known || (model === null && kernels.doubtful)) {
        this._known = asleep;
        this.refreshRunning();
      }
    });
    context.services.sessions.runningChanged.connect(() => this._changed.emit());
    // Without an open notebook nothing else loads the kernels.
    context.host.changed.connect(({ facts }) => {
      if (facts !== null) {
        this.refreshRunning();
        context.kernels.reload().catch(() => context.kernels.doubt());
      }
    });
  }

  readonly name: string;
  readonly shutdownLabel: string;
  readonly shutdownAllLabel: string;
  readonly shutdownAllConfirmationText: string;
  readonly shutdownItemIcon: LabIcon = deleteIcon;

  get runningChanged(): ISignal<this, void> {
    return this._changed;
  }

  running(): IRunningSessions.IRunningItem[] {
    return this._listed().map(image => this._item(image));
  }

  /** Of a kernel of this server only the image that it sleeps in: the others are its save points, or about to go. */
  private _listed(): IImage[] {
    return this._images.filter(({ id, kernel_id }) => {
      const kernel = this.context.kernels.find(kernel_id);
      return kernel === undefined || (kernel.image === id && !kernel.awake);
    });
  }

  refreshRunning(): void {
    const look = ++this._looks;
    void this.context.client.images().then(
      images => {
        if (look === this._looks) {
          this._images = images.reverse(); // an answer that a later question has overtaken may be older
          this._changed.emit();
          // JupyterLab's list reads the items before it listens: of what came between it would never hear.
          clearTimeout(this._repeats);
          this._repeats = setTimeout(() => this._changed.emit(), REPEATED);
        }
      },
      () => {
        if (look === this._looks) {
          this._known = null; // so that the next change of any kernel repeats the request
          setTimeout(() => this.context.kernels.doubt(), AGAIN);
        }
      }
    );
  }

  shutdownAll(): void {
    // Elsewhere a kernel may run whose save point this is; each of those can be deleted by itself.
    const asleep = this._listed().filter(image => image.only_copy);
    void Promise.all(asleep.map(image => this._remove(image)));
  }

  private _item(image: IImage): IRunningSessions.IRunningItem {
    const { commands, kernels, trans } = this.context;
    const here = kernels.find(image.kernel_id)?.image === image.id;
    const path = this._path(image);
    const name = PathExt.basename(path) || image.kernel_name || image.kernel_id.slice(0, 8);
    const gpus = Object.keys(image.device_bytes).length;
    const facts = [
      bytes(image.bytes),
      duration(Math.max(0, Date.now() / 1000 - image.created)),
      gpus > 0 ? trans._n('%2 of %1 GPU', '%2 of %1 GPUs', gpus, bytes(sum(image.device_bytes))) : trans.__('no GPU')
    ];
    const wake = (event: React.MouseEvent) => {
      event.stopPropagation();
      void commands.execute(IDS.wake, { kernelId: image.kernel_id });
    };
    return {
      className: 'jp-gpuCkpt-sleeper',
      context: here ? `gpu-ckpt:${image.kernel_id}` : '',
      icon: () => phaseIcon('checkpointed'),
      label: () => (
        <>
          <span className="jp-gpuCkpt-sleeper-name">{name}</span>
          <span className="jp-gpuCkpt-sleeper-facts">{facts.slice(0, 2).join(' · ')}</span>
          {here && (
            <button
              className="jp-gpuCkpt-link"
              onClick={wake}
              title={trans.__('Bring the kernel back, as the next cell would')}
            >
              {trans.__('Wake')}
            </button>
          )}
        </>
      ),
      labelTitle: () =>
        [
          path || image.kernel_id,
          facts.join(' · '),
          here
            ? trans.__('Open the notebook; the kernel wakes with the next cell')
            : trans.__('No server has this kernel; open it to attach it to this server')
        ].join('\n'),
      open: () => void this._open(image, here),
      shutdown: () => void this._confirm(image, name)
    };
  }

  private _path(image: IImage): string {
    return pathOf(this.context.services, image.kernel_id) || image.notebook || '';
  }

  /** Open the notebook.  A kernel without a server is attached first; it sleeps on until a cell is run. */
  private async _open(image: IImage, here: boolean): Promise<void> {
    const { client, commands, kernels, services, trans } = this.context;
    try {
      if (!here) {
        await client.attach(image.id);
        await Promise.all([kernels.reload(), services.sessions.refreshRunning()]);
      }
      const path = this._path(image);
      if (path === '') {
        Notification.info(trans.__('No notebook is known for this kernel. It is among the running kernels now.'));
        return;
      }
      await commands.execute('docmanager:open', { path });
    } catch (error) {
      Notification.error(trans.__('The kernel could not be opened: %1', (error as Error).message), {
        autoClose: false
      });
    }
  }

  private async _confirm(image: IImage, name: string): Promise<void> {
    const { trans } = this.context;
    const answer = await showDialog({
      title: trans.__('Delete the image of %1?', name),
      body: image.only_copy
        ? trans.__('The kernel sleeps in this image: its variables would be lost for good. The notebook stays.')
        : trans.__('This frees %1 of disk space.', bytes(image.bytes)),
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: trans.__('Delete') })]
    });
    if (answer.button.accept) {
      await this._remove(image);
    } else {
      this._changed.emit(); // the list treats an item as gone once its button was pressed
    }
  }

  private async _remove(image: IImage): Promise<void> {
    const { client, kernels, services, trans } = this.context;
    try {
      if (kernels.find(image.kernel_id)?.image === image.id) {
        await services.kernels.shutdown(image.kernel_id); // without its image it is nothing
      }
      await client.remove(image.id).catch((error: unknown) => {
        if ((error as { status?: number }).status !== 404) {
          throw error;
        }
      });
    } catch (error) {
      Notification.error(trans.__('The image could not be deleted: %1', (error as Error).message), {
        autoClose: false
      });
    }
    this.refreshRunning();
  }

  private readonly _changed = new Signal<this, void>(this);
  private _images: IImage[] = [];
  private _known: string | null = '';
  private _looks = 0;
  private _repeats: ReturnType<typeof setTimeout> | undefined;
}
