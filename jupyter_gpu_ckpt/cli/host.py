"""The commands about this host: doctor, install-criu."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from traitlets import Bool, Enum, Unicode
from traitlets.config.loader import LazyConfigValue

from ..criu import install
from ..doctor import checks
from ..doctor.checks import Finding, Need
from ..errors import HostError
from .command import GpuCkptCommand, ImageCommand, Result
from .terminal import Part, Terminal


class DoctorCommand(ImageCommand):
    description = "Can this host checkpoint kernels? What it lacks is shown with the command that helps (->)."
    arguments = ()
    examples = """
    jupyter gpu-ckpt doctor
    jupyter gpu-ckpt doctor --for gpu
    """

    need = Enum(["cpu", "gpu"], "cpu", help="The kernels that the exit status is about: cpu (default) or gpu.").tag(
        option="cpu|gpu", option_name="for"
    )

    def run(self) -> Result:
        configured = self.configured
        extensions = self.config.get("ServerApp", {}).get("jpserver_extensions", {})
        if isinstance(extensions, LazyConfigValue):  # changed in place: `c.ServerApp.jpserver_extensions.update(...)`
            extensions = extensions.get_value({})
        directory, fast_path = Path(configured.image_dir), configured.fast_path
        self._findings = checks.diagnose(directory, fast_path=fast_path, extensions=extensions)
        need = cast(Need, self.need)
        return checks.as_json(self._findings), 0 if checks.fit(self._findings, need) else HostError.exit_status

    def show(self, document: dict[str, Any]) -> None:
        show_findings(self._findings, self.terminal)


def show_findings(findings: Sequence[Finding], terminal: Terminal) -> None:
    """Print a line for each finding, with the fix below, and then which kernels can be checkpointed."""
    rows: list[list[Part]] = []
    for finding in findings:
        rows.append([_word(finding), finding.check, finding.message])
        if finding.fix and finding.ok is False:
            rows.append(["", "", (f"-> {finding.fix}", "bold")])
    terminal.rows(rows)
    terminal.line()
    subjects: dict[Need, str] = {"cpu": "Kernels without CUDA", "gpu": "Kernels on a GPU"}
    for need, subject in subjects.items():
        why = checks.reason(findings, need)
        answer: list[Part] = [("no.", "red"), f" {why}"] if why else [("can be checkpointed here.", "green")]
        terminal.line(f"{subject}: ", *answer)


def _word(finding: Finding) -> tuple[str, str]:
    """Return the word before a finding, and its style."""
    words = {None: ("-   ", "dim"), True: ("ok  ", "green")}
    return words.get(finding.ok, ("FAIL", "red") if finding.level == "error" else ("warn", "yellow"))


class InstallCriuCommand(GpuCkptCommand):
    description = "Find a CRIU that works, or install one. No root is needed."
    examples = """
    jupyter gpu-ckpt install-criu
    jupyter gpu-ckpt install-criu --check
    jupyter gpu-ckpt install-criu --force-unpack --prefix /opt/criu
    """

    prefix = Unicode(help="Where to unpack it (default: your Jupyter data directory).").tag(option="DIR")
    mirror = Unicode(help="The Debian mirror (default: the machine's own apt sources).").tag(option="URL")
    keyring = Unicode(help="The keys that sign the mirror (default: Debian's).").tag(option="FILE")
    check = Bool(False, help="Only report the CRIU that is found.").tag(option=True)
    force_unpack = Bool(False, help="Unpack one even if the system has one that works.").tag(option=True)
    no_system = Bool(False, help="Do not install the distribution's package, even as root.").tag(option=True)

    def run(self) -> None:
        """Run the installer, whose own options ``scripts/install-criu`` uses before this package is installed."""
        arguments = [f"--{name}={value}" for name in ("prefix", "mirror", "keyring") if (value := getattr(self, name))]
        switches = [name for name in ("check", "force_unpack", "no_system") if getattr(self, name)]
        arguments += [f"--{name.replace('_', '-')}" for name in switches]
        self.status = install.main([*arguments, *["--json"] * self.as_json])
