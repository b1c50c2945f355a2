"""The commands about this host: doctor, install-criu."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from traitlets import Bool, Enum, Unicode

from ..errors import HostError
from .command import Answer, GpuCkptCommand, ImageCommand
from .terminal import Part, Terminal

if TYPE_CHECKING:
    from ..doctor.checks import Finding, Need


class DoctorCommand(ImageCommand):
    verb = "doctor"
    description = "Can this host checkpoint kernels? What it lacks is shown with the command that helps (->)."
    arguments = ()
    aliases: dict[str, Any] = {
        "for": ("DoctorCommand.need", "What the exit status is about: cpu (default) or gpu."),
        **ImageCommand.aliases,
    }
    metavars: ClassVar[dict[str, str]] = {"for": "cpu|gpu", **ImageCommand.metavars}
    examples = """
    jupyter gpu-ckpt doctor
    jupyter gpu-ckpt doctor --for gpu
    """

    need = Enum(["cpu", "gpu"], "cpu", help="What the exit status is about.").tag(config=True)

    def run(self) -> Answer:
        from ..doctor import checks

        self._findings = checks.diagnose(Path(self.configured.image_dir))
        need = cast("Need", self.need)
        return checks.as_json(self._findings), 0 if checks.fit(self._findings, need) else HostError.exit_status

    def show(self, document: dict[str, Any]) -> None:
        show_findings(self._findings, self.terminal)


def show_findings(findings: Sequence[Finding], terminal: Terminal) -> None:
    """Print a line for each finding, with what helps below, and then what can be checkpointed."""
    from ..doctor.checks import reason

    width = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        word = _word(finding)
        terminal.line(word, f"{'':{6 - len(word[0])}}{finding.check:<{width}}  {finding.what}")
        if finding.mend and finding.ok is False:
            terminal.line(f"{'':<{width + 6}}  -> ", (finding.mend, "bold"))
    terminal.line()
    subjects: dict[Need, str] = {"cpu": "Kernels without CUDA", "gpu": "Kernels on a GPU"}
    for need, subject in subjects.items():
        why = reason(findings, need)
        answer: list[Part] = [("no.", "red"), f" {why}"] if why else [("can be checkpointed here.", "green")]
        terminal.line(f"{subject}: ", *answer)


def _word(finding: Finding) -> tuple[str, str]:
    """Return the word before a finding, and its style."""
    if finding.ok is None:
        return "-", "dim"
    if finding.ok:
        return "ok", "green"
    return ("FAIL", "red") if finding.level == "error" else ("warn", "yellow")


class InstallCriuCommand(GpuCkptCommand):
    verb = "install-criu"
    description = "Find a CRIU that works, or install one. No root is needed."
    aliases: dict[str, Any] = {
        "prefix": ("InstallCriuCommand.prefix", "Where to unpack it (default: your Jupyter data directory)."),
        "mirror": ("InstallCriuCommand.mirror", "The Debian mirror (default: the machine's own apt sources)."),
        "keyring": ("InstallCriuCommand.keyring", "The keys that sign the mirror (default: Debian's)."),
        **GpuCkptCommand.aliases,
    }
    metavars: ClassVar[dict[str, str]] = {
        "prefix": "DIR",
        "mirror": "URL",
        "keyring": "FILE",
        **GpuCkptCommand.metavars,
    }
    flags: dict[str, Any] = {
        "check": ({"InstallCriuCommand": {"check": True}}, "Only say what there is."),
        "force-unpack": (
            {"InstallCriuCommand": {"force_unpack": True}},
            "Unpack one even if the system has one that works.",
        ),
        "no-system": (
            {"InstallCriuCommand": {"no_system": True}},
            "Do not install the distribution's package, even as root.",
        ),
        **GpuCkptCommand.flags,
    }
    examples = """
    jupyter gpu-ckpt install-criu
    jupyter gpu-ckpt install-criu --check
    jupyter gpu-ckpt install-criu --force-unpack --prefix /opt/criu
    """

    prefix = Unicode(help="Where to unpack CRIU.").tag(config=True)
    mirror = Unicode(help="The Debian mirror.").tag(config=True)
    keyring = Unicode(help="The keys that sign the mirror.").tag(config=True)
    check = Bool(False, help="Only say what there is.").tag(config=True)
    force_unpack = Bool(False, help="Unpack CRIU even if the system has one that works.").tag(config=True)
    no_system = Bool(False, help="Do not install the distribution's package.").tag(config=True)

    def run(self) -> None:
        """Run what ``scripts/install-criu`` runs before this package is installed, which has its own options."""
        from ..criu import install

        values = {"--prefix": self.prefix, "--mirror": self.mirror, "--keyring": self.keyring}
        switches = {
            "--check": self.check,
            "--force-unpack": self.force_unpack,
            "--no-system": self.no_system,
            "--json": self.as_json,
        }
        arguments = [f"{name}={value}" for name, value in values.items() if value]
        self.status = install.main([*arguments, *(name for name, on in switches.items() if on)])
