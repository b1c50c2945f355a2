/** The sidebar's panel: each GPU with its memory by kernel, the kernels without device memory, the last failures. */

import { ReactWidget } from '@jupyterlab/ui-components';
import { Poll } from '@lumino/polling';
import type { Message } from '@lumino/messaging';
import * as React from 'react';

import type { IGpu, ISharer, ISharing } from './api';
import { MemoryBar, Sparkline } from './charts';
import type { IContext } from './context';
import { freeMemory } from './freeMemory';
import type { Gpus } from './gpus';
import { gpuIcon, phaseIcon } from './icons';
import { IDS } from './ids';
import { sum, type KernelModel } from './kernel';
import { nameOf, pathOf } from './notebooks';
import type { Notifier } from './notifications';
import { SavePoints } from './savePoints';
import { bytes, duration, estimate, failed, phase as word, place } from './words';

export class GpuPanel extends ReactWidget {
  constructor(
    private readonly context: IContext,
    private readonly notifier: Notifier,
    private readonly gpus: Gpus
  ) {
    super();
    const { trans } = context;
    this.id = 'gpu-ckpt-panel';
    this.addClass('jp-gpuCkpt-panel');
    this.title.icon = gpuIcon;
    this.title.caption = trans.__('GPUs and kernels');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans.__('GPUs and kernels'));
    for (const source of [gpus, context.kernels, context.host]) {
      source.changed.connect(this._renew, this);
    }
    context.services.sessions.runningChanged.connect(this._renew, this);
    // The seconds shown pass; and no event reports host memory, child processes and turns.
    this._clock = new Poll({
      name: 'gpu-ckpt:clock',
      factory: () => this._load(),
      frequency: { interval: SLOW, backoff: false },
      standby: () => (this.isVisible ? 'when-hidden' : true)
    });
  }

  /** Bring the failures of a kernel into sight, and the keyboard to them. */
  showFailures(kernelId: string): void {
    this._wanted = kernelId;
    this.update();
  }

  override dispose(): void {
    this._clock.dispose();
    super.dispose();
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    const { kernels, services } = this.context;
    void Promise.all([this.gpus.load(), kernels.reload(), services.sessions.refreshRunning()]).catch(() =>
      kernels.doubt()
    );
  }

  /** Load what no event reports; more often while kernels wait for a GPU. */
  private async _load(): Promise<void> {
    const { kernels } = this.context;
    const { isOwed } = this.gpus;
    const isShared = (this.gpus.list ?? []).some(({ sharing }) => sharing !== undefined);
    await Promise.all([isShared || isOwed ? this.gpus.load() : null, kernels.reload()]).catch(() => kernels.doubt());
    const waits = (this.gpus.list ?? []).some(({ sharing }) => (sharing?.waiting.length ?? 0) > 0);
    this._clock.frequency = { interval: waits ? FAST : SLOW, backoff: false, max: SLOW };
  }

  protected override onUpdateRequest(message: Message): void {
    super.onUpdateRequest(message);
    void this.renderPromise?.then(() => {
      const failure = this._wanted && this.node.querySelector<HTMLElement>(`[data-failure="${this._wanted}"]`);
      if (failure) {
        this._wanted = '';
        failure.scrollIntoView({ block: 'nearest' });
        failure.focus();
      }
    });
  }

  protected override render(): React.JSX.Element {
    const { host, kernels, trans } = this.context;
    const gpus = this.gpus.list ?? [];
    const onGpu = new Set(gpus.flatMap(gpu => Object.keys(gpu.kernels)));
    const others = [...kernels].filter(kernel => kernel.name !== '' && !onGpu.has(kernel.id));
    const without = host.reason || (gpus.length === 0 && host.facts?.reason.gpu) || '';
    return (
      <>
        {gpus.map(gpu => this._gpu(gpu))}
        {this.gpus.list !== null && gpus.length === 0 && (
          <section>
            <h3>{trans.__('No GPU')}</h3>
            <p className="jp-gpuCkpt-note">
              {trans.__('Kernels can be put to sleep all the same.')} {without}
            </p>
          </section>
        )}
        {others.length > 0 && (
          <section>
            <h3>{gpus.length > 0 ? trans.__('Off the GPUs') : trans.__('Kernels')}</h3>
            <ul>{others.map(kernel => this._row(kernel, 0, ''))}</ul>
          </section>
        )}
        {this._failures()}
        {this.gpus.gpuSecondsFreed > 0 && (
          <p className="jp-gpuCkpt-note">
            {trans.__('Freed since the server started: %1 GPU-hours', (this.gpus.gpuSecondsFreed / 3600).toFixed(2))}
          </p>
        )}
      </>
    );
  }

  private _gpu(gpu: IGpu): React.JSX.Element {
    const { services, trans } = this.context;
    const shares = Object.entries(gpu.kernels)
      .filter(([, deviceBytes]) => deviceBytes > 0)
      .sort(([a], [b]) => a.localeCompare(b))
      .map(([id, deviceBytes], index) => ({
        id,
        deviceBytes,
        color: `jp-mod-share${index % COLORS}`,
        name: nameOf(services, id)
      }));
    const others = Math.max(0, gpu.used - sum(gpu.kernels));
    return (
      <section key={gpu.uuid}>
        <header>
          <h3>{trans.__('GPU %1: %2', gpu.index, gpu.name)}</h3>
          <button
            className="jp-gpuCkpt-link"
            disabled={shares.length === 0}
            title={trans.__('Suspend every idle kernel on this GPU')}
            onClick={() => void freeMemory(this.context, this.notifier, gpu)}
          >
            {trans.__('Free memory')}
          </button>
        </header>
        <MemoryBar
          total={gpu.total}
          shares={[
            ...shares.map(({ deviceBytes, color, name }) => ({
              bytes: deviceBytes,
              color,
              label: `${name}: ${bytes(deviceBytes)}`
            })),
            { bytes: others, color: 'jp-mod-others', label: trans.__('Others: %1', bytes(others)) }
          ]}
          label={trans.__('%1 of %2 in use', bytes(gpu.used), bytes(gpu.total))}
        />
        <Sparkline history={gpu.history} total={gpu.total} label={trans.__('Memory in use during the last hour')} />
        {gpu.sharing !== undefined && this._sharing(gpu.sharing)}
        <ul>
          {shares.map(({ id, deviceBytes, color }) => this._row(this.context.kernels.get(id), deviceBytes, color))}
        </ul>
      </section>
    );
  }

  /** Who has a turn, and who waits for one: others' kernels without a name. */
  private _sharing({ computing, waiting, factor, silent_bytes }: ISharing): React.JSX.Element | null {
    const { trans } = this.context;
    if (waiting.length === 0) {
      return null; // then there are no turns
    }
    return (
      <div className="jp-gpuCkpt-queue" role="group" aria-label={trans.__('Queue')}>
        <ol>
          {computing.map((each, index) => (
            <li key={`computing ${each.kernel ?? index}`} className="jp-mod-computing">
              {trans.__('%1 computes for %2 (%3)', this._who(each), duration(each.seconds), bytes(each.bytes))}
              {(each.left ?? 0) >= 1 && ' · '}
              {(each.left ?? 0) >= 1 && trans.__('%1 left', estimate(each.left ?? 0))}
            </li>
          ))}
          {waiting.map((each, index) => (
            <li key={`waiting ${each.kernel ?? index}`}>
              {`${each.place ?? '–'}. `}
              {trans.__('%1 waits for %2 (%3)', this._who(each), duration(each.seconds), bytes(each.bytes))}
            </li>
          ))}
        </ol>
        {factor > 1 && (
          <p className="jp-gpuCkpt-note">
            {trans.__('Turns are %1 times as long as usual: moves took too much of the time.', factor)}
          </p>
        )}
        {silent_bytes > 0 && (
          <p className="jp-gpuCkpt-note">
            {trans.__('%1 belong to a server that does not answer.', bytes(silent_bytes))}
          </p>
        )}
      </div>
    );
  }

  private _who({ kernel }: ISharer): string {
    const { services, trans } = this.context;
    return kernel === null ? trans.__('Somebody') : nameOf(services, kernel);
  }

  private _row(kernel: KernelModel, deviceBytes: number, color: string): React.JSX.Element {
    const { commands, services, trans } = this.context;
    const args = { kernelId: kernel.id };
    const { awake } = kernel;
    const action = awake ? (deviceBytes > 0 ? IDS.suspend : IDS.checkpoint) : IDS.wake;
    const path = pathOf(services, kernel.id);
    const facts = [
      word(kernel.phase, trans),
      place(kernel, trans, Date.now() / 1000) ?? '',
      deviceBytes > 0 ? trans.__('%1 on the GPU', bytes(deviceBytes)) : '',
      kernel.swappedOut > 0 ? trans.__('%1 off the GPU', bytes(kernel.swappedOut)) : '',
      kernel.hostBytes ? trans.__('%1 of host memory', bytes(kernel.hostBytes)) : '',
      awake ? this._idle(kernel.id) : this._for(kernel)
    ];
    const icon = phaseIcon(kernel.phase);
    return (
      <li key={kernel.id}>
        {color ? (
          <span className={`jp-gpuCkpt-swatch ${color}`} />
        ) : (
          <icon.react tag="span" className="jp-gpuCkpt-face" />
        )}
        <button
          className="jp-gpuCkpt-name"
          title={path}
          disabled={path === ''}
          onClick={() => void commands.execute('docmanager:open', { path })}
        >
          {nameOf(services, kernel.id)}
        </button>
        <span className="jp-gpuCkpt-facts">
          {facts.filter(Boolean).map((fact, index) => (
            <React.Fragment key={fact}>
              {index > 0 && ' · '}
              <span>{fact}</span>
            </React.Fragment>
          ))}
        </span>
        <button
          className="jp-gpuCkpt-link"
          disabled={!commands.isEnabled(action, args)}
          title={commands.caption(action, args)}
          onClick={() => void commands.execute(action, args)}
        >
          {awake ? (deviceBytes > 0 ? trans.__('Suspend') : trans.__('Checkpoint')) : trans.__('Wake')}
        </button>
        {kernel.phase !== 'plain' && (
          <SavePoints
            context={this.context}
            notifier={this.notifier}
            kernel={kernel}
            isOpen={this._open.has(kernel.id)}
            onToggle={isOpen => this._toggle(kernel.id, isOpen)}
          />
        )}
        {kernel.children.length > 0 && (
          <details className="jp-gpuCkpt-children">
            <summary>{trans._n('%1 child process', '%1 child processes', kernel.children.length)}</summary>
            <ul>
              {kernel.children.map(child => (
                <li key={child.pid}>
                  <code title={child.command}>{child.command}</code> {bytes(child.bytes)}
                </li>
              ))}
            </ul>
          </details>
        )}
      </li>
    );
  }

  /** The last failures of all kernels, newest first, each with what helps. */
  private _failures(): React.JSX.Element | null {
    const { host, kernels, services, trans } = this.context;
    const all = [...kernels].flatMap(({ id, failures }) => failures.map(failure => ({ id, failure })));
    if (all.length === 0) {
      return null;
    }
    all.sort((a, b) => b.failure.at - a.failure.at);
    return (
      <section className="jp-gpuCkpt-failures" aria-label={trans.__('Last failures')}>
        <h3>{trans.__('Last failures')}</h3>
        <ul>
          {all.map(({ id, failure: { verb, code, message, hint, left, at } }) => {
            const page = host.errorPage(code);
            const ago = duration(Math.max(0, Date.now() / 1000 - at));
            return (
              <li key={`${id} ${at}`} data-failure={id} tabIndex={-1}>
                <strong>{failed(verb, nameOf(services, id), trans)}</strong>
                <p>{message}</p>
                {hint && <p>{hint}</p>}
                {left && <p>{trans.__('Left behind: %1.', left)}</p>}
                <p className="jp-gpuCkpt-note">
                  {code !== '' &&
                    (page === null ? (
                      <code>{code}</code>
                    ) : (
                      <a href={page} target="_blank" rel="noreferrer" title={trans.__('What this error means')}>
                        {code}
                      </a>
                    ))}{' '}
                  {trans.__('%1 ago', ago)}
                </p>
              </li>
            );
          })}
        </ul>
      </section>
    );
  }

  private _toggle(id: string, isOpen: boolean): void {
    if (isOpen !== this._open.has(id)) {
      if (isOpen) {
        this._open.add(id);
      } else {
        this._open.delete(id);
      }
      this.update();
    }
  }

  /** Seconds since the kernel was used, as the application knows them. */
  private _idle(id: string): string {
    const { services, trans } = this.context;
    for (const kernel of services.kernels.running()) {
      if (kernel.id === id) {
        if (kernel.execution_state === 'busy') {
          return trans.__('busy');
        }
        const last = kernel.last_activity ? Date.parse(kernel.last_activity) : NaN;
        return Number.isNaN(last) ? '' : trans.__('idle %1', duration(Math.max(0, Date.now() - last) / 1000));
      }
    }
    return '';
  }

  private _for(kernel: KernelModel): string {
    if (kernel.progress !== null) {
      return `${Math.round(100 * kernel.progress.fraction)} %`;
    }
    return kernel.since === null ? '' : duration(Math.max(0, Date.now() / 1000 - kernel.since));
  }

  private _renew(): void {
    if (this.isVisible) {
      this.update();
    }
  }

  private readonly _clock: Poll;
  /** Kernels whose save points are listed. */
  private readonly _open = new Set<string>();
  /** The kernel whose failures are to come into sight. */
  private _wanted = '';
}

/** Milliseconds between two requests, also while kernels wait for a GPU. */
const SLOW = 10000;
const FAST = 2000;

/** How many colours style/base.css has for the shares of a bar. */
const COLORS = 6;
