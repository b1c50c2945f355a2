"""The base of all commands: options, Jupyter's configuration, help, and output for people or programs."""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jupyter_core.application import JupyterApp, base_aliases, base_flags
from traitlets import Bool, Enum, Int, TraitError, TraitType, Unicode, default
from traitlets.config.application import ClassesType
from traitlets.config.configurable import Configurable
from traitlets.config.loader import ArgumentError, Config, ConfigFileNotFound, KVArgParseConfigLoader

from .._version import __version__
from ..errors import BadRequest
from ..kernel import directories
from .terminal import Terminal

if TYPE_CHECKING:
    from ..image.store import Store

PROGRAM = "jupyter gpu-ckpt"

#: The result of a command: the document for programs, and the exit status.
Result = tuple[dict[str, Any], int]

#: Configuration files, each before those that override it: those of the applications that start kernels, since each
#: may set the provisioner's traits; then this application's own, which the server extension reads, too.
CONFIG_FILES = (
    "jupyter_config",
    "jupyter_server_config",
    "jupyter_notebook_config",
    "jupyter_lab_config",
    "jupyter_gpu_ckpt_config",
)


class Configured(Configurable):
    """The traits of `GpuCkptProvisioner` that commands need; importing that takes longer than most commands."""

    image_dir = Unicode().tag(config=True)
    runtime_base = Unicode().tag(config=True)
    accept_changed_files = Bool(False).tag(config=True)
    encryption_key = Unicode().tag(config=True)
    fast_path = Enum(["auto", "kernel", "off"], "auto").tag(config=True)
    memory_dir = Unicode("/dev/shm").tag(config=True)  # noqa: S108 - a directory of this user's below it
    image_quota = Int(0, min=0).tag(config=True)
    sleeping_quota = Int(0, min=0).tag(config=True)

    @classmethod
    def section_names(cls) -> list[str]:
        return ["GpuCkptProvisioner"]

    @default("image_dir")
    def _default_image_dir(self) -> str:
        return str(directories.default_image_dir())

    @default("runtime_base")
    def _default_runtime_base(self) -> str:
        return str(directories.default_runtime_base())


class GpuCkptCommand(JupyterApp):
    """A command; subclasses set `description`, `arguments`, `examples`, and define `run` and `show`.

    A trait that is tagged ``option`` is an option of the command, with the trait's help: a flag if it is a `Bool`, else
    with a value that the tag names in the help.  Options of the base class are inherited.
    """

    name = "jupyter-gpu-ckpt"
    version = __version__
    #: The word after ``jupyter gpu-ckpt``; set by `main.command`.
    verb: ClassVar[str] = ""
    #: The positional arguments as the help shows them: ``IMAGE``, ``[IMAGE]`` or ``IMAGE...``.
    arguments: ClassVar[tuple[str, ...]] = ()
    #: The names of options' values in the help.
    metavars: ClassVar = {"config": "FILE", "log-level": "LEVEL", "image-dir": "DIR", "runtime-base": "DIR"}

    aliases: dict[str, Any] = {
        "config": ("JupyterApp.config_file", "Read this file instead of those of Jupyter's applications."),
        "log-level": (base_aliases["log-level"], "Log from this level on: DEBUG, INFO, WARN, ERROR or CRITICAL."),
    }
    flags: dict[str, Any] = {
        "json": ({"GpuCkptCommand": {"as_json": True}}, "Print one JSON document, also when the command fails."),
        "debug": (base_flags["debug"][0], "Log everything, and show where in the program an error occurred."),
        "show-config": (base_flags["show-config"][0], "Print the configuration and the files it comes from."),
        "show-config-json": (base_flags["show-config-json"][0], "The same as JSON."),
        "generate-config": (base_flags["generate-config"][0], "Write a configuration file with all defaults."),
        "y": (base_flags["y"][0], "Overwrite that file without asking."),
    }

    as_json = Bool(False, help="Print one JSON document.").tag(config=True)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        flags, aliases, metavars = {}, {}, {}
        for name, trait in vars(cls).items():
            if isinstance(trait, TraitType) and (value := trait.metadata.get("option")):
                trait.tag(config=True)
                key = trait.metadata.get("option_name") or name.replace("_", "-")
                if isinstance(trait, Bool):
                    flags[key] = ({cls.__name__: {name: True}}, trait.help)
                else:
                    aliases[key], metavars[key] = (f"{cls.__name__}.{name}", trait.help), value
        base = cls.__base__
        assert base is not None
        cls.flags = {**flags, **base.flags}  # type: ignore[attr-defined]
        cls.aliases = {**aliases, **vars(cls).get("aliases", {}), **base.aliases}  # type: ignore[attr-defined]
        cls.metavars = {**metavars, **base.metavars}  # type: ignore[attr-defined]

    #: The exit status, once the command has been started.
    status = 0
    _help_text: str | None = None

    def _log_level_default(self) -> int:
        return 30  # logging.WARNING: nothing may be printed among the output

    # -- what a subclass defines

    def run(self) -> Result | None:
        """Do the work.  None if everything is printed already.  Raises `GpuCkptError`."""
        raise NotImplementedError

    def show(self, document: dict[str, Any]) -> None:
        """Print the document of `run` for people."""

    def complete(self, given: list[str]) -> list[str]:
        """Return the possible next positional arguments, after those ``given``.  Called from the shell."""
        return []

    # -- what commands use

    @property
    def configured(self) -> Configured:
        """The provisioner's configuration.  Raises `BadRequest` for a value of a wrong type."""
        section = self.config.get("GpuCkptProvisioner", {})  # traitlets would warn of its other traits
        known = {name: section[name] for name in Configured.class_traits(config=True) if name in section}
        with _errors_mapped():
            return Configured(config=Config({"GpuCkptProvisioner": known}))

    def store(self) -> Store:
        """Return the images of this user, in the directory where kernels put them, with the configured key."""
        from ..image.encryption import Vault
        from ..image.quota import Quota
        from ..image.store import Store

        configured = self.configured
        quota = Quota(configured.image_quota, configured.sleeping_quota)
        vault = Vault(configured.encryption_key, Path(configured.memory_dir))
        return Store(Path(configured.image_dir), vault=vault, quota=quota)

    @functools.cached_property
    def terminal(self) -> Terminal:
        return Terminal()

    # -- what traitlets calls

    def initialize(self, argv: Any = None) -> None:
        """Parse the command line and load the configuration.  Raises `BadRequest`."""
        self.parse_command_line(argv)
        if self.subapp is None and self._help_text is None:
            self.load_config_file()

    def parse_command_line(self, argv: Any = None) -> None:
        arguments = list(argv or [])
        options = set(itertools.takewhile(lambda word: word != "--" and "_ARGCOMPLETE" not in os.environ, arguments))
        if {"-h", "--help", "--help-all"} & options:
            self._help_text = "\n".join(self.emit_help(classes="--help-all" in options)).rstrip()
        elif {"-V", "--version"} & options:
            self._help_text = self.version
        else:
            flags, aliases = self.flatten_flags()
            with _errors_mapped(aliases):
                loader = _Loader(arguments, aliases, flags, command=self)
                self.cli_config = deepcopy(loader.load_config())
                self.update_config(self.cli_config)
            self.extra_args = loader.extra_args
            if not self.generate_config:
                self._count_arguments()

    def _count_arguments(self) -> None:
        given, least = self.extra_args, [name for name in self.arguments if not name.startswith("[")]
        if len(given) < len(least):
            raise BadRequest(f"{least[len(given)].rstrip('.')} is missing.", hint=f"Usage: {self._usage()}")
        if len(given) > len(self.arguments) and not any(name.endswith("...") for name in self.arguments):
            raise BadRequest(f"{given[len(self.arguments)]!r} is one too many.", hint=f"Usage: {self._usage()}")

    def load_config_file(self, suppress_errors: bool = True) -> None:  # type: ignore[override]
        """Load the files of Jupyter's configuration, or the one that ``--config`` names.  Raises `BadRequest`.

        A file that fails is skipped with a warning, as by Jupyter's servers.  What files print goes to stderr.
        """
        found = Config()
        with contextlib.redirect_stdout(sys.stderr):
            if self.config_file:
                self._load(found, "jupyter_config")
                path = Path(self.config_file).absolute()
                if not (path.is_file() or self.generate_config):
                    raise BadRequest(f"There is no configuration file {path}.", hint="Correct --config.")
                self._load(found, path.stem, [str(path.parent)], [path.suffix])
            else:
                for name in CONFIG_FILES:
                    self._load(found, name)
        found.merge(self.cli_config)
        with _errors_mapped():
            self.update_config(found)

    def _load(
        self, into: Config, name: str, directories: list[str] | None = None, suffixes: Any = (".py", ".json")
    ) -> None:
        loaders = {".py": self.python_config_loader_class, ".json": self.json_config_loader_class}
        for directory in reversed(directories or self.config_file_paths):
            for suffix in suffixes:
                loader = loaders.get(suffix, self.python_config_loader_class)(name + suffix, path=directory)
                try:
                    into.merge(loader.load_config())
                except ConfigFileNotFound:
                    continue
                except Exception as error:
                    path = Path(directory, name + suffix)
                    self.log.warning("%s is not used: %s: %s", path, type(error).__name__, error)
                    self.log.debug("Where it failed:", exc_info=True)
                    continue
                self._loaded_config_files.append(str(Path(directory, name + suffix)))
                self.log.debug("Read %s", self._loaded_config_files[-1])

    def start(self) -> None:
        if self.subapp is not None:
            self.subapp.start()
            self.status = getattr(self.subapp, "status", 0)
        elif self._help_text is not None:
            print(self._help_text)
        elif self.generate_config:
            self.write_default_config()
        else:
            if (result := self.run()) is None:
                return
            document, self.status = result
            if self.as_json:
                print(json.dumps(document))
            else:
                self.show(document)

    def write_default_config(self) -> None:
        """Write the defaults of the provisioner and of this command to a file."""
        try:
            super().write_default_config()
        except EOFError as error:
            path = self.config_file or str(Path(self.config_dir, f"{self.config_file_name}.py"))
            raise BadRequest(f"{path} exists.", hint="Add -y to overwrite it.") from error

    def generate_config_file(self, classes: ClassesType | None = None) -> str:
        return super().generate_config_file(classes or self._documented())

    def _documented(self) -> list[type[Configurable]]:
        """Return the classes whose traits are shown in full: the provisioner's are configured in the same files."""
        from ..kernel.provisioner import GpuCkptProvisioner

        return [type(self), GpuCkptProvisioner]

    # -- help

    def emit_help(self, classes: bool = False) -> Iterator[str]:  # type: ignore[override]
        yield from [f"usage: {self._usage()}", "", *textwrap.wrap(self.description, 100), ""]
        yield from self.emit_options_help()
        if classes:
            yield from ["Traits, for configuration files and as --Class.trait=VALUE:", ""]
            for each in self._classes_with_config_traits(self._documented()):
                yield from [each.class_get_help(), ""]
        yield from self.emit_examples()

    def _usage(self) -> str:
        return " ".join([PROGRAM, *filter(None, [self.verb]), "[OPTIONS]", *self.arguments])

    def emit_options_help(self) -> Iterator[str]:  # type: ignore[override]
        rows = [(_option(key), help) for key, (_, help) in self.flags.items()]
        rows += [(f"{_option(key)} {self.metavars[key]}", help) for key, (_, help) in self.aliases.items()]
        shared = {_option(key) for key in (*GpuCkptCommand.flags, *GpuCkptCommand.aliases)}
        rows.sort(key=lambda row: row[0].split()[0] in shared)  # its own ones first
        rows.append(("--help, --help-all", "Print this, or all configurable traits, too."))
        rows.append(("--version", "Print the version."))
        yield from ["Options:", *rows_of_help(rows), ""]

    def emit_examples(self) -> Iterator[str]:  # type: ignore[override]
        yield from ["Examples:", textwrap.indent(textwrap.dedent(self.examples).strip(), "  "), ""]


class ImageCommand(GpuCkptCommand):
    """A command on the image directory; by default its only argument is an image."""

    arguments: ClassVar[tuple[str, ...]] = ("IMAGE",)
    aliases: dict[str, Any] = {
        "image-dir": (
            "GpuCkptProvisioner.image_dir",
            "The directory of the images (default: the one that Jupyter's configuration sets).",
        )
    }

    def complete(self, given: list[str]) -> list[str]:
        repeated = [name for name in self.arguments[-1:] if name.endswith("...")]
        name = next(iter([*self.arguments[len(given) : len(given) + 1], *repeated]), "")
        if "IMAGE" not in name or "URL" in self.arguments[:1]:  # remote images are not listed for a completion
            return []
        return [image.id for image in self.store().images() if image.id not in given]


class _Loader(KVArgParseConfigLoader):
    """Parse options as traitlets does, but refuse those that do not exist, and complete the others in a shell."""

    def __init__(
        self, argv: list[str], aliases: dict[str, str], flags: dict[str, Any], *, command: GpuCkptCommand
    ) -> None:
        super().__init__(argv, aliases, flags, command.log, [type(command)], command.subcommands)
        self._command = command

    def _create_parser(self) -> None:
        super()._create_parser()

        def refuse(message: str) -> Any:
            for name in re.findall(r"(?:unrecognized arguments: |argument )--([\w-]+)(?![.\w])", message):
                if name not in self.aliases and name not in self.flags:
                    self._handle_unrecognized_alias(name)
            for alias, trait in self.aliases.items():
                message = message.replace(f"--{trait}:", f"{_option(alias)}:")
            raise BadRequest(f"{message[:1].upper()}{message[1:]}.", hint=f"Usage: {self._command._usage()}")

        self.parser.error = refuse  # type: ignore[method-assign]
        # Options may stand between images, too.
        self.parser.parse_args = self.parser.parse_intermixed_args  # type: ignore[method-assign]

    def _handle_unrecognized_alias(self, arg: str) -> None:
        """Refuse an unknown option, which might be a misspelt ``--dry-run``."""
        known = [*self.aliases, *self.flags, "help", "help-all", "version"]
        raise BadRequest(f"There is no option {_option(arg)}.", hint=suggestion(arg, known, _option))

    def _argcomplete(self, classes: list[Any], subcommands: dict[str, Any] | None) -> None:
        """Prepare completion; `argcomplete` is imported only if a shell requests it."""
        if "_ARGCOMPLETE" not in os.environ:
            return

        def complete(prefix: str, parsed_args: Any, **_: Any) -> list[str]:
            with contextlib.suppress(Exception):  # an error would garble the shell's line
                self._command.load_config_file()
                return self._command.complete(list(getattr(parsed_args, "extra_args", None) or []))
            return []

        for action in self.parser._actions:
            if action.dest == "extra_args":
                action.completer = complete  # type: ignore[attr-defined]
        self._argcomplete_kwargs = {"always_complete_options": False}  # options where a word begins with a dash
        super()._argcomplete(classes, subcommands)


@contextlib.contextmanager
def _errors_mapped(aliases: dict[str, str] | None = None) -> Iterator[None]:
    """Map traitlets' errors about values to `BadRequest`; ``aliases`` are the traits that options set."""
    try:
        yield
    except (TraitError, ArgumentError) as error:
        message = str(error)
        if match := re.fullmatch(r"The '(\w+)' trait of an? (\w+) instance expected (.*)", message, re.DOTALL):
            trait = f"{match[2].replace('Configured', 'GpuCkptProvisioner')}.{match[1]}"
            option = next((_option(alias) for alias, target in (aliases or {}).items() if target == trait), trait)
            message = f"{option}: expected {match[3]}"
        raise BadRequest(message, hint="See --help-all for what can be configured.") from error


def suggestion(word: str, known: list[str], shown: Callable[[str], str] = str) -> str:
    """Return the hint about a misspelt word."""
    near = difflib.get_close_matches(word, known, 1)
    return f"Did you mean {shown(near[0])}? See --help." if near else "See --help."


def rows_of_help(rows: list[tuple[str, str]]) -> Iterator[str]:
    """Yield lines in two columns."""
    width = max(len(left) for left, _ in rows)
    for left, right in rows:
        lines = textwrap.wrap(right, 98 - width) or [""]
        yield f"  {left:{width}}  {lines[0]}".rstrip()
        yield from (f"  {'':{width}}  {line}" for line in lines[1:])


def _option(name: str) -> str:
    return f"--{name}" if len(name) > 1 else f"-{name}"
