/** Commands: what the button's menu, the command palette, the kernel menu and other extensions call. */

import { Dialog, showDialog } from '@jupyterlab/apputils';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';

import type { Verb, When } from './api';
import type { IContext } from './context';
import { explain } from './explain';
import { IDS } from './ids';
import type { KernelModel } from './kernel';
import type { Notifier } from './notifications';
import { nameOf } from './notebooks';
import { save } from './saving';
import { duration } from './words';

/** Seconds that a kernel can be protected for from the menu; 0 ends it. */
export const PROTECTIONS = [1800, 7200, 28800, 86400, 0];

/**
 * Add the commands.
 *
 * `current`: the kernel of a command without a `kernelId` among its arguments; `isPointed`: that of the item whose
 * context menu is open.
 */
export function addCommands(
  context: IContext,
  notifier: Notifier,
  current: (isPointed: boolean) => string | null
): void {
  const { commands, kernels, host, services, trans } = context;

  const target = (args: ReadonlyPartialJSONObject): KernelModel | null => {
    const id = typeof args.kernelId === 'string' ? args.kernelId : current(args.isPointed === true);
    return id === null ? null : kernels.get(id);
  };

  const begin = async (kernel: KernelModel, verb: Verb, when: When = 'now'): Promise<void> => {
    try {
      if (await kernels.begin(kernel.id, verb, when)) {
        notifier.waits(kernel);
      }
    } catch (error) {
      notifier.refused(kernel, verb, error);
    }
  };

  const sleepCommand = (verb: 'suspend' | 'checkpoint', label: string, caption: string | (() => string)) => ({
    label,
    caption,
    isEnabled: (args: ReadonlyPartialJSONObject) => {
      const kernel = target(args);
      return (
        host.reason === '' &&
        kernel !== null &&
        (kernel.awake || (kernel.phase === 'suspended' && verb === 'checkpoint'))
      );
    },
    execute: async (args: ReadonlyPartialJSONObject) => {
      const kernel = target(args);
      const when = args.when === 'idle' ? 'idle' : 'now';
      if (kernel !== null && (when === 'idle' || (await confirmed(kernel, label)))) {
        await begin(kernel, verb, when);
      }
    }
  });

  const confirmed = async (kernel: KernelModel, label: string): Promise<boolean> => {
    if (!context.preferences.values.confirmCheckpoint) {
      return true;
    }
    const answer = await showDialog({
      title: trans.__('%1: %2?', nameOf(services, kernel.id), label),
      body: trans.__('The next cell that you run brings the kernel back, with every variable.'),
      buttons: [Dialog.cancelButton(), Dialog.okButton({ label })]
    });
    return answer.button.accept;
  };

  commands.addCommand(
    IDS.suspend,
    sleepCommand('suspend', trans.__('Suspend kernel'), () =>
      host.gpus
        ? trans.__('Free the GPU; the process stays in host memory and wakes fast')
        : trans.__('Let the kernel rest; the process stays in host memory')
    )
  );
  commands.addCommand(
    IDS.checkpoint,
    sleepCommand('checkpoint', trans.__('Put kernel to sleep'), trans.__('Save everything to disk and end the process'))
  );

  commands.addCommand(IDS.wake, {
    label: trans.__('Wake kernel'),
    caption: trans.__('Bring the kernel back, as the next cell would'),
    isEnabled: args => {
      const phase = target(args)?.phase;
      return phase === 'suspended' || phase === 'checkpointed';
    },
    execute: async args => {
      const kernel = target(args);
      if (kernel !== null) {
        await begin(kernel, kernel.phase === 'suspended' ? 'resume' : 'restore');
      }
    }
  });

  commands.addCommand(IDS.save, {
    label: trans.__('Save point…'),
    caption: trans.__('Save all variables; the kernel runs on'),
    isEnabled: args => host.reason === '' && target(args)?.awake === true,
    execute: async args => {
      const kernel = target(args);
      if (kernel !== null) {
        await save(context, notifier, kernel);
      }
    }
  });

  commands.addCommand(IDS.stay, {
    label: trans.__('Keep kernel awake after this cell'),
    caption: trans.__('Do not put the kernel to sleep when its cells have finished'),
    isEnabled: args => target(args)?.waiting != null,
    execute: async args => {
      const kernel = target(args);
      if (kernel !== null) {
        try {
          await kernels.cancel(kernel.id);
        } catch (error) {
          notifier.stays(kernel, error);
        }
      }
    }
  });

  commands.addCommand(IDS.keep, {
    label: trans.__('Keep idle kernel for now'),
    caption: trans.__('Let the kernel be idle once more for as long as it may be before it is put to sleep'),
    isEnabled: args => target(args)?.due != null,
    execute: async args => {
      const kernel = target(args);
      if (kernel !== null) {
        try {
          await kernels.keep(kernel.id);
          notifier.kept(kernel);
        } catch (error) {
          notifier.stays(kernel, error);
        }
      }
    }
  });

  commands.addCommand(IDS.protect, {
    label: args => {
      if (typeof args.seconds !== 'number') {
        return trans.__('Protect kernel for 2 h');
      }
      return args.seconds === 0
        ? trans.__('End protection of the kernel')
        : args.isMenu
          ? duration(args.seconds)
          : trans.__('Protect kernel for %1', duration(args.seconds));
    },
    caption: trans.__('Idle policies leave this kernel alone; you can still put it to sleep'),
    isEnabled: args => {
      const kernel = target(args);
      return kernel !== null && kernel.phase !== 'plain' && (args.seconds !== 0 || isProtected(kernel));
    },
    execute: async args => {
      const kernel = target(args);
      if (kernel === null) {
        return;
      }
      const seconds = typeof args.seconds === 'number' ? args.seconds : 7200;
      try {
        const { protected_until } = await context.client.protect(kernel.id, seconds);
        kernels.protected(kernel.id, protected_until);
        notifier.protected(kernel, seconds);
      } catch (error) {
        notifier.undone(trans.__('The protection of %1 was not changed.', nameOf(services, kernel.id)), error);
      }
    }
  });

  commands.addCommand(IDS.explain, {
    label: trans.__("Why can't this kernel sleep?"),
    caption: trans.__('Whether this kernel can be put to sleep now, and if not, why'),
    isEnabled: args => target(args) !== null,
    execute: async args => {
      const kernel = target(args);
      if (kernel !== null && (await explain(context, kernel))) {
        await begin(kernel, 'checkpoint', 'idle');
      }
    }
  });

  const renew = () => commands.notifyCommandChanged();
  kernels.changed.connect(renew);
  host.changed.connect(renew);
}

export function isProtected(kernel: KernelModel): boolean {
  return kernel.protectedFor(Date.now() / 1000) > 0;
}
