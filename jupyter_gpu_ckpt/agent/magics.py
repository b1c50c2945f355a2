"""``%gpu_checkpoint`` and ``%gpu_memory``, in every kernel that the agent is loaded into.

A magic runs inside a cell, so a checkpoint begins when that cell has ended; whether it is possible, and its size and
duration, are printed at once.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from IPython.core.error import UsageError

from . import gpu_memory, probes, summary, tensors
from .messages import show
from .server_channel import RequestRefused, ServerChannel, limits_explained
from .tensors import human

#: Why the user sees an error, by the verb that failed after the cell.
_FAILED = {
    "save": "No save point was made.",
    "save_after_cell": "No save point was made.",
    "back": "This kernel did not go back.",
    "branch": "No branch was made.",
}
_ASLEEP = "This kernel was not put to sleep."
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


class Parser(argparse.ArgumentParser):
    """The options of one magic; errors become IPython's one-line `UsageError`."""

    def __init__(self, magic: str, description: str) -> None:
        super().__init__(
            prog=f"%{magic}",
            description=description,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100),
            add_help=False,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Called from argparse."""
        if message.startswith("unrecognized arguments: ") and not message.startswith("unrecognized arguments: -"):
            message += '; a name of several words needs quotes, as in "first try"'
        raise UsageError(f"{message} ({self.prog} --help)")

    def parse(self, line: str) -> argparse.Namespace:
        """Parse the rest of a line.  Raises `UsageError`."""
        try:
            return self.parse_args(shlex.split(line))
        except ValueError as error:  # an unclosed quotation
            self.error(str(error))

    @property
    def options(self) -> list[str]:
        """All options, for completion."""
        return [option for action in self._actions for option in action.option_strings]


def _checkpoint_parser() -> Parser:
    parser = Parser(
        "gpu_checkpoint",
        "Checkpoint this kernel once this cell has ended: everything is saved to disk, and the process ends; the\n"
        "next cell that you run brings all of it back. If it fails, the kernel runs on, and the next cell says why.",
    )
    parser.add_argument("--suspend", action="store_true", help="only free the GPU: the process stays, in host memory")
    parser.add_argument("--status", action="store_true", help="state, device memory, what a checkpoint would cost")
    parser.add_argument("--list", action="store_true", help="your images on this host")
    parser.add_argument("--save", metavar="NAME", help="make a save point after this cell; the kernel runs on")
    parser.add_argument("--back", metavar="NAME", help="go back to a save point after this cell; can be undone")
    files = "with --back: changed files as then or as they are now, for all or by PATH=then PATH=now"
    parser.add_argument("--files", nargs="+", metavar="CHOICE", help=files)
    parser.add_argument("--saves", action="store_true", help="the save points of this kernel, and what each comes from")
    compare = "variables that differ since a save point, or from the first to the second"
    parser.add_argument("--compare", nargs="+", metavar="NAME", help=compare)
    parser.add_argument("--delete", metavar="NAME", help="delete a save point")
    parser.add_argument("--keep", nargs="+", metavar="VARS", help="save these device tensors, release all others")
    parser.add_argument("--drop", nargs="+", metavar="VARS", help="release these variables instead of saving them")
    parser.add_argument(
        "--branch",
        nargs="?",
        const="",
        metavar="NAME",
        help="start another kernel from save point NAME, or from this cell",
    )
    parser.add_argument("--accept-differences", action="store_true", help="a branch may lack what cannot exist twice")
    parser.add_argument(
        "--accept-changed-files", action="store_true", help="a branch gets files that have changed as they are now"
    )
    parser.add_argument("--reseed", action="store_true", help="a branch gets new seeds for random numbers")
    gpu = "with --branch or --back: on this GPU, by its number in nvidia-smi"
    parser.add_argument("--gpu", type=int, metavar="N", help=gpu)
    parser.add_argument("--protect", metavar="TIME", help="keep idle policies off for 30m, 2h, 1h30m, 1d; off ends it")
    parser.add_argument("--help", action="store_true", help="this text")
    return parser


def _memory_parser() -> Parser:
    parser = Parser("gpu_memory", "Show device memory by variable, the largest first.")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="so many rows (20); 0 for all")
    parser.add_argument("--help", action="store_true", help="this text")
    return parser


PARSERS = {"gpu_checkpoint": _checkpoint_parser(), "gpu_memory": _memory_parser()}


class GpuMagics:
    """The magics of one kernel."""

    def __init__(self, shell: Any, kernel: Any, server: ServerChannel, pipe_port: Callable[[], int | None]) -> None:
        self.shell = shell
        self._kernel, self._server, self._pipe_port = kernel, server, pipe_port
        #: Variables to release at the next suspend or checkpoint; cleared by the next cell.
        self._to_release: list[str] = []
        self._shown_failure: RequestRefused | None = None
        self._magics: dict[str, Callable[[str], None]] = {
            "gpu_checkpoint": self.gpu_checkpoint,
            "gpu_memory": self.gpu_memory,
        }

    def register(self) -> None:
        """Called from the agent when it is loaded."""
        for name, magic in self._magics.items():
            self.shell.register_magic_function(magic, "line", name)
            self.shell.set_hook("complete_command", self._complete, str_key=f"%{name}")
        self.shell.events.register("pre_run_cell", self._on_cell)

    def unregister(self) -> None:
        """Called from the agent when it is unloaded."""
        for name in self._magics:
            self.shell.magics_manager.magics["line"].pop(name, None)
        self.shell.events.unregister("pre_run_cell", self._on_cell)

    # -- the magics ---------------------------------------------------------------------------------------------------

    def gpu_checkpoint(self, line: str) -> None:
        """Called from IPython with the rest of the line."""
        options = PARSERS["gpu_checkpoint"].parse(line)
        alone = ("help", "status", "list", "protect", "save", "back", "saves", "compare", "branch", "delete")
        chosen = [name for name in alone if getattr(options, name) not in (None, False)]
        if len(chosen) > 1 or (chosen and (options.suspend or options.keep or options.drop)):
            raise UsageError(f"Use {', '.join(f'--{name}' for name in alone[:-1])} and --{alone[-1]} alone.")
        if "" in (options.protect, options.save, options.back, options.delete, *(options.compare or ())):
            raise UsageError("--protect, --save, --back, --compare and --delete need a value that is not empty.")
        if options.files and not options.back:
            raise UsageError("--files goes with --back.")
        if options.help:
            print(PARSERS["gpu_checkpoint"].format_help().strip())
            return
        how = {name: getattr(options, name) for name in ("accept_differences", "accept_changed_files", "reseed")}
        if any(how.values()) and options.branch is None:
            raise UsageError("--accept-differences, --accept-changed-files and --reseed are for --branch.")
        if options.gpu is not None and options.branch is None and not options.back:
            raise UsageError("--gpu is for --branch and --back.")
        with limits_explained():
            if options.branch is not None:
                self._branch(options.branch, options.gpu, **how)
            elif options.status:
                self._print_status()
            elif options.list:
                self._list()
            elif options.protect:
                self._protect(options.protect)
            elif options.save:
                self._save(options.save)
            elif options.back:
                self._back(options.back, options.files, options.gpu)
            elif options.saves:
                self._list_saves()
            elif options.compare:
                self._compare(options.compare)
            elif options.delete:
                freed = self._server.request("delete", name=options.delete)["bytes"]
                print(f"Deleted {options.delete}, {human(freed)}.")
            else:
                self._schedule("suspend" if options.suspend else "checkpoint", options.keep, options.drop)

    def gpu_memory(self, line: str) -> None:
        """Called from IPython with the rest of the line."""
        options = PARSERS["gpu_memory"].parse(line)
        if options.limit < 0:
            raise UsageError("--limit is a number of rows, 0 for all.")
        if options.help:
            print(PARSERS["gpu_memory"].format_help().strip())
            return
        with limits_explained():
            self._print_memory(options.limit or None)

    def _print_memory(self, limit: int | None) -> None:
        found = tensors.tensors(self.shell.user_ns)
        shown = found[:limit]
        if not found:
            print("No variable has device memory.")
        else:
            show(columns(("variable", "type", "dtype", "shape", "device", "bytes"), [_row(each) for each in shown]))
            together = human(sum(tensor.bytes for tensor in found))
            more = f", {len(found) - len(shown)} not shown (--limit 0)" if len(shown) < len(found) else ""
            print(f"\n{together} in {len(found)} tensors{more}.")
        for device in gpu_memory.report()["devices"]:
            allocated, cached = map(human, (device["allocated"], device["reserved"] - device["allocated"]))
            where = f"GPU {device['index']} {device['name']}"
            print(f"{where}: {allocated} allocated; {cached} cached, freed by a checkpoint.")

    # -- their parts -------------------------------------------------------------------------------------------------

    def _schedule(self, verb: str, keep: list[str] | None, drop: list[str] | None) -> None:
        status = self._require_possible(writes=verb == "checkpoint")
        names = self._chosen(keep, drop)
        found = tensors.by_variable(self.shell.user_ns)
        for name in names:
            print(f"Released, not saved: {name}, {tensors.describe(self.shell.user_ns[name], found[name])}.")
        self._to_release = names
        self._server.schedule(verb)
        for finding in status["findings"]:
            print(f"Note: {finding['text']}")
        seconds = status["seconds"]
        if verb == "suspend":
            print(f"Suspend after this cell, in about {seconds['gpu_free']:.1f} s. Run a cell to bring it back.")
        else:
            cost = f"about {human(status['image_bytes'])}, {seconds['saved']:.1f} s"
            print(f"Checkpoint after this cell: {cost}. Run a cell to bring it back (about {seconds['back']:.1f} s).")

    def _branch(self, name: str, gpu: int | None, **how: bool) -> None:
        self._server.request("may_branch", name=name, gpu=gpu)
        self._server.schedule("branch", name=name, how=how, gpu=gpu)
        point = f"save point {name!r}" if name else "this kernel, which is saved"
        print(f"After this cell another kernel starts from {point}. The next cell says which.")

    def _chosen(self, keep: list[str] | None, drop: list[str] | None) -> list[str]:
        """Return the variables to release.  Raises `UsageError` for a name that is no variable with device memory."""
        if keep and drop:
            raise UsageError("Use --keep or --drop, not both.")
        if not keep and not drop:
            return []
        found = tensors.by_variable(self.shell.user_ns)
        found.pop("Out", None)
        named = [name for word in keep or drop or [] for name in word.split(",") if name]
        for name in named:
            if name not in self.shell.user_ns:
                raise UsageError(f"There is no variable {name!r}.")
            if name not in found:
                raise UsageError(f"The variable {name!r} has no device memory; %gpu_memory shows those that have.")
        if drop:
            return list(dict.fromkeys(named))
        saved = {memory for name in named for memory in found[name]}
        return [name for name, memories in found.items() if name not in named and not saved.issuperset(memories)]

    def _print_status(self) -> None:
        found = tensors.tensors(self.shell.user_ns)
        released = [name for name, value in self.shell.user_ns.items() if isinstance(value, tensors.Released)]
        show(status_text(self.status(), [_row(each) for each in found[:5]], released, self._server.failure))

    def status(self, *, writes: bool = True) -> dict[str, Any]:
        """Return the server's status of this kernel, in bytes, with preflight's findings about a checkpoint.

        Without ``writes``, about a suspend, which writes no image.  Raises `RequestRefused`.
        """
        report = probes.report(self._kernel, self._pipe_port(), [])
        return self._server.request("status", report=report, writes=writes)

    def _list(self) -> None:
        rows = [
            (
                image["id"],
                image["kernel_name"],
                time.strftime("%Y-%m-%d %H:%M", time.localtime(image["created"])),
                human(image["bytes"]),
                human(image["device_bytes"]),
                "this kernel" if image["kernel_id"] == self._server.kernel_id else "",
            )
            for image in self._server.request("list")["images"]
        ]
        show(columns(("image", "kernel", "made", "size", "of it GPU", ""), rows) if rows else "There are no images.")

    def _save(self, name: str) -> None:
        self._server.request("may_save", name=name)
        status = self._require_possible(writes=True)
        self._server.schedule("save", name=name)
        print(f"Save point {name!r} after this cell: about {human(status['image_bytes'])}. The kernel runs on.")

    def _back(self, name: str, words: list[str] | None, gpu: int | None) -> None:
        files = files_chosen(words or [])
        self._server.request("may_go_back", name=name, files=files, gpu=gpu)
        self._require_possible(writes=True)
        self._server.schedule("back", name=name, files=files, gpu=gpu)
        print(f"Going back to {name!r} after this cell. The present state is saved first: --saves lists it then.")

    def _require_possible(self, *, writes: bool) -> dict[str, Any]:
        """Return the kernel's status.  Raises `RequestRefused` for what prevents a checkpoint."""
        status = self.status(writes=writes)
        for finding in status["findings"]:
            if finding["blocks"]:
                raise RequestRefused(finding["text"], finding["code"], finding["hint"], "the kernel runs on")
        return status

    def _list_saves(self) -> None:
        points = self._server.request("saves")["saves"]
        names = {point["image"]: point["name"] for point in points}
        rows = [
            (
                point["name"],
                moment(point["created"]),
                names.get(point["parent"], ""),
                str(point["cell"] or ""),
                human(point["bytes"]),
                human(point["device_bytes"]),
                ", ".join(variable["name"] for variable in point["variables"][:5]),
                "automatic" if point["automatic"] else "",
            )
            for point in points
        ]
        heads = ("save point", "made", "from", "cell", "size", "of it GPU", "largest variables", "")
        show(columns(heads, rows) if rows else "This kernel has no save points.")

    def _compare(self, names: list[str]) -> None:
        if len(names) > 2:
            raise UsageError("--compare is for one or two save points.")
        present = summary.summary(self.shell) if len(names) == 1 else None
        found = self._server.request("compare", names=names, present=present)
        show(comparison_text(found, names))

    def _protect(self, text: str) -> None:
        until = self._server.request("protect", seconds=seconds_in(text))["protected_until"]
        if until is None:
            print("Idle policies apply to this kernel again.")
        else:
            print(f"No idle policy puts this kernel to sleep before {moment(until)}.")

    # -- called from the agent and IPython ----------------------------------------------------------------------------

    def release(self) -> int:
        """Release the chosen variables and return their bytes.  Called from the agent's quiesce."""
        names, self._to_release = self._to_release, []
        return sum(tensors.release(self.shell, names).values()) if names else 0

    def _on_cell(self, info: Any = None) -> None:
        self._to_release = []  # the kernel was not put to sleep, or is back
        failure = self._server.failure
        if failure is not None and failure is not self._shown_failure:
            self._shown_failure = failure
            print(_FAILED.get(self._server.scheduled, _ASLEEP), *failure.lines(), sep="\n", file=sys.stderr)

    def _complete(self, shell: Any, event: Any) -> list[str]:
        """Called from IPython's completer for a line that begins with one of the magics."""
        magic = event.command.lstrip("%")
        before = event.line[: len(event.line) - len(event.symbol)]
        options = re.findall(r"(?<!\w)--\w+", before)
        if not event.symbol.startswith("-") and options:
            if options[-1] in ("--keep", "--drop"):
                return sorted(set(tensors.by_variable(self.shell.user_ns)) - {"Out"})
            if options[-1] in ("--back", "--branch", "--delete", "--compare"):
                return [shlex.quote(point["name"]) for point in self._server.request("saves")["saves"]]
            if options[-1] == "--files":
                return ["then", "now"]
            if options[-1] == "--protect":
                return ["30m", "2h", "1d", "off"]
        return [option for option in PARSERS[magic].options if option not in options]


for _name, _parser in PARSERS.items():
    getattr(GpuMagics, _name).__doc__ = _parser.format_help()  # for `%gpu_checkpoint?`


def seconds_in(text: str) -> int:
    """Parse ``1h30m`` to seconds; 0 for ``off`` and ``0``.  Raises `UsageError`."""
    parts = re.findall(r"(\d+)([dhms])", text)
    if text in ("off", "0"):
        return 0
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise UsageError(f"{text!r} is not a duration: use 30m, 2h, 1h30m, 1d, or off.")
    return sum(int(number) * _UNITS[unit] for number, unit in parts)


def files_chosen(words: Sequence[str]) -> Any:
    """Return the choice of files: None, ``then`` or ``now`` for all, or by path.  Raises `UsageError`."""
    if list(words) in (["then"], ["now"]):
        return words[0]
    chosen = {}
    for word in words:
        path, equals, choice = word.rpartition("=")
        if not equals or choice not in ("then", "now"):
            raise UsageError(f"{word!r} is no choice of files: use then, now, or PATH=then, PATH=now.")
        chosen[os.path.abspath(path)] = choice
    return chosen or None


def _row(tensor: tensors.Tensor) -> tuple[str, ...]:
    size = human(tensor.bytes)
    return tensor.name, tensor.kind, tensor.dtype, str(list(tensor.shape)), tensor.device, size


# -- text for a cell's output -----------------------------------------------------------------------------------------


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table, with escapes for what is not printable; a last column named ``bytes`` is aligned to the right."""
    table = [heads, *([_printable(text) for text in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table)]  # noqa: B905 -- strict is Python 3.10's
    sides = [*"<" * (len(heads) - 1), ">" if heads[-1] == "bytes" else "<"]
    layout = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths))  # noqa: B905
    return "\n".join(layout.format(*row).rstrip() for row in table)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def comparison_text(found: dict[str, Any], names: Sequence[str]) -> str:
    """Format the server's comparison of two save points, or of one with the kernel as it is now."""
    rows = [
        (variable["name"], kind, *(_size_of(variable[side]) for side in ("before", "after")))
        for kind in ("changed", "added", "gone")
        for variable in found[kind]
    ]
    until = f"to {names[1]!r}" if len(names) > 1 else "to now"
    lines = [f"From {names[0]!r} {until}:"]
    lines.append(columns(("variable", "", "before", "after"), rows) if rows else "No variable is known to differ.")
    lines.append(f"{found['same']} are the same.")
    if found["unknown"]:
        names_of = ", ".join(variable["name"] for variable in found["unknown"])
        lines.append(f"Not known, as they are large, on a GPU, or of an extension module: {names_of}.")
    if not found["complete"]:
        lines.append("There are more variables than a save point notes; the smallest are not compared.")
    return "\n".join(lines)


def _size_of(variable: dict[str, Any] | None) -> str:
    return f"{variable['type']}, {human(variable['bytes'])}" if variable is not None else ""


def moment(at: float) -> str:
    """Format a moment (seconds since the epoch) in local time, with the date where that is not today's."""
    local = time.localtime(at)
    return time.strftime("%H:%M" if local[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", local)


def status_text(
    status: dict[str, Any], largest: Sequence[Sequence[str]], released: Sequence[str], failure: RequestRefused | None
) -> str:
    """Format the server's reply, the kernel's largest tensors and its last failure."""
    seconds, device = status["seconds"], status["device_bytes"]
    lines = [("state", status["state"])]
    for gpu in status["gpus"]:
        if gpu["uuid"] in device:
            free = f"{human(gpu['free'])} of {human(gpu['total'])} free"
            lines.append(("GPU memory", f"{human(device[gpu['uuid']])} on {gpu['name']} ({free})"))
    if not device:
        lines.append(("GPU memory", "none"))
    if largest:
        first, *others = columns(("variable", "type", "dtype", "shape", "device", "bytes"), largest).splitlines()
        lines += [("largest", first), *(("", line) for line in others)]
    lines.append(("host memory", human(status["process_bytes"])))
    lines.append(
        (
            "image",
            f"about {human(status['image_bytes'])}; {human(status['disk_free'])} free on its disk",
        )
    )
    free = f"{seconds['gpu_free']:.1f} s until the GPU is free, " if device else ""
    times = f"about {free}{seconds['saved']:.1f} s until all is saved, {seconds['back']:.1f} s to come back"
    lines.append(("time", times))
    if status.get("sharing"):
        lines.append(("shared GPU", status["sharing"]))
    if status.get("protected_until"):
        lines.append(("protected", f"until {moment(status['protected_until'])}"))
    if released:
        lines.append(("released", ", ".join(released)))
    findings = status["findings"]
    lines.append(("checkpoint", "not now" if any(finding["blocks"] for finding in findings) else "possible"))
    lines += [("", f"{finding['code']}: {finding['text']} {finding['hint']}") for finding in findings]
    if failure is not None:
        lines += [("last failure" if at == 0 else "", line) for at, line in enumerate(failure.lines())]
    return "\n".join(f"{name:13}{text}".rstrip() for name, text in lines)
