"""``jupyter gpu-ckpt``: its subcommands, and how each of them ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from traitlets.utils.importstring import import_item

from ..errors import BadRequest, GpuCkptError
from .command import PROGRAM, GpuCkptCommand, rows_of_help, suggestion
from .terminal import Terminal

#: Every exit status and its meaning; errors define theirs (`errors.GpuCkptError.exit_status`).
EXIT_STATUSES = {
    0: "done",
    1: "demo: a value changed",
    64: "the command line or the configuration is invalid",
    65: "not possible in the kernel's present state",
    66: "an image is missing, in use, damaged, or does not fit this node",
    69: "this host, or a server, lacks something",
    70: "an internal error",
    71: "the CUDA driver or CRIU failed",
    73: "a directory cannot be written",
    74: "a transfer failed",
    75: "not now: try again later",
    76: "another release, with another protocol version, started the kernel",
    77: "a key cannot be used",
    130: "interrupted",
    141: "the program that read the output has ended",
}


class GpuCkptMain(GpuCkptCommand):
    """The application: finds the subcommand, and imports only that."""

    description = "Suspend, checkpoint and restore Jupyter kernels with their CUDA state."
    subcommands: dict[str, Any] = {
        "doctor": ("host.DoctorCommand", "Can this host checkpoint kernels, and if not, what helps?"),
        "install-criu": ("host.InstallCriuCommand", "Find a CRIU that works, or install one."),
        "demo": ("demo.DemoCommand", "Run a notebook with a checkpoint in its middle, and compare every value."),
        "list": ("images.ListCommand", "List your kernels on this host, and your images."),
        "inspect": ("images.InspectCommand", "Show everything that an image says about itself."),
        "verify": ("images.VerifyCommand", "Check that an image is whole, yours, and the newest of its kernel."),
        "check": ("images.CheckCommand", "Verify every image."),
        "rm": ("images.RemoveCommand", "Delete images."),
        "template": (
            "templates.TemplateCommand",
            "Make kernelspecs whose kernels start from an image.",
        ),
        "prune": ("images.PruneCommand", "Delete images that are too many, too old or too large."),
        "keys": ("images.KeysCommand", "List the keys that seal images, or make a new one."),
        "seal": ("images.SealCommand", "Vouch for an image as it is now."),
        "break-claim": ("images.BreakClaimCommand", "Free an image whose host is gone for good."),
        "match": ("transfer.MatchCommand", "Compare this node with what an image needs."),
        "push": ("transfer.PushCommand", "Move an image to a shared directory, an object store or a server."),
        "pull": ("transfer.PullCommand", "Fetch an image from there, or list the images there."),
        "uninstall": ("uninstall.UninstallCommand", "Remove this package and all files of yours; images on request."),
        "node-features": ("transfer.NodeFeaturesCommand", "Print the features of this node for slurm.conf."),
    }
    examples = """
    jupyter gpu-ckpt doctor
    jupyter gpu-ckpt list
    jupyter gpu-ckpt prune --max-age 30d --dry-run
    jupyter gpu-ckpt rm --help
    """

    def parse_command_line(self, argv: Any = None) -> None:
        arguments = list(argv or [])
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:2], "--help"]
        if arguments and arguments[0] in self.subcommands:
            self.initialize_subcommand(arguments[0], arguments[1:])
        else:
            super().parse_command_line(arguments)

    def initialize_subcommand(self, subc: str, argv: Any = None) -> None:
        if "_ARGCOMPLETE" in os.environ:
            from traitlets.config.argcomplete_config import increment_argcomplete_index

            increment_argcomplete_index()
        self.subapp = command(subc)()
        self.subapp.initialize(argv)

    def _count_arguments(self) -> None:
        if not self.extra_args:
            if not self.show_config:
                raise BadRequest("Which command?", hint=f"`{PROGRAM} --help` lists them.")
        elif self.extra_args[0] in self.subcommands:
            raise BadRequest("Options come after the command.", hint=f"Usage: {self._usage()}")
        else:
            hint = suggestion(self.extra_args[0], [*self.subcommands])
            raise BadRequest(f"There is no command {self.extra_args[0]!r}.", hint=hint)

    def _usage(self) -> str:
        return f"{PROGRAM} COMMAND [OPTIONS]"

    def emit_help(self, classes: bool = False) -> Iterator[str]:  # type: ignore[override]
        yield from super().emit_help(classes)
        statuses = rows_of_help([(str(status), meaning) for status, meaning in EXIT_STATUSES.items()])
        yield from ["Exit status:", *statuses, ""]
        yield f"`{PROGRAM} COMMAND --help` has each command's own options and examples."

    def emit_options_help(self) -> Iterator[str]:  # type: ignore[override]
        commands = rows_of_help([(name, help) for name, (_, help) in self.subcommands.items()])
        yield from ["Commands:", *commands, ""]
        yield from super().emit_options_help()


def command(verb: str) -> type[GpuCkptCommand]:
    """Import the class of a subcommand."""
    found: type[GpuCkptCommand] = import_item(f"{__package__}.{GpuCkptMain.subcommands[verb][0]}")
    found.verb = verb
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status (`EXIT_STATUSES`)."""
    arguments = _words()[1:] if argv is None else list(argv)
    try:
        application = GpuCkptMain()
        application.initialize(arguments)
        application.start()
        sys.stdout.flush()
        return application.status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python writes once more as it ends
        return 128 + signal.SIGPIPE  # as a shell has it: the reader of the output has ended
    except GpuCkptError as error:
        return _failed(error, arguments)
    except Exception as error:
        name = type(error).__name__
        internal = GpuCkptError(f"{name}: {error}", hint="Add --debug to see where, and please report it.", kind=name)
        return _failed(internal, arguments, error)


def _words() -> list[str]:
    """Return the words of the command line; those before the cursor, where a shell asks for completion."""
    if "_ARGCOMPLETE" in os.environ:
        from traitlets.config.argcomplete_config import get_argcomplete_cwords

        return get_argcomplete_cwords() or sys.argv
    return sys.argv


def _failed(error: GpuCkptError, arguments: Sequence[str], cause: BaseException | None = None) -> int:
    """Print an error, for programs on stdout, for people on stderr; return its exit status."""
    if "--debug" in arguments:
        traceback.print_exception(cause or error)
    if "--json" in arguments:
        print(json.dumps({"error": error.as_dict()}))
        return error.exit_status
    terminal = Terminal(sys.stderr)
    terminal.line((f"[{error.code}]", "bold red"), f" {error.message}")
    if error.left:
        terminal.line(f"Left behind: {error.left}.")
    if error.hint:
        terminal.line(f"Hint: {error.hint}")
    return error.exit_status
