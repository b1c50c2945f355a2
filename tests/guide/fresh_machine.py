"""A machine on which nothing is but what Debian's installer puts there: a root file system of its own, with systemd.

Made by debootstrap and started in namespaces: processes, mounts, users' sessions, host name, network and cgroups are
its own, and users, services, packages and logins are real.  The kernel is this machine's.  Into the network it comes by
slirp4netns, which needs no settings here; it cannot reach this machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from namespaces import init_of
from waiting import until

from jupyter_gpu_ckpt.criu import debian

SUITE = "bookworm"
_TOOLS = ("debootstrap", "slirp4netns", "unshare", "nsenter")
_SPACES = ("--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup")
_CERTIFICATES = Path("/usr/local/share/ca-certificates")
#: slirp4netns(1): its name server.
_NAME_SERVER = "10.0.2.3"

# systemd wants a cgroup file system that it may write, and does not touch devices or settings of the kernel, which are
# not the machine's own, where /sys is read-only and the service for the latter is masked.
_BOOT = """
set -e
cd "$1"
hostname "$2"
mount --bind . .
cd "$1"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 dev dev
for name in null zero full random urandom tty; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for number in 0:stdin 1:stdout 2:stderr; do ln -s fd/${number%:*} dev/${number#*:}; done
mount -t tmpfs -o mode=755 run run
pivot_root . mnt
umount -l mnt
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /sbin/init
"""


def why_not() -> str | None:
    """Why there can be no such machine here, and what to do; None if there can."""
    if os.geteuid() != 0:
        return "a machine with users of its own needs root"
    if missing := [name for name in _TOOLS if shutil.which(name) is None]:
        return f"no {' and no '.join(missing)} on this host: `apt-get install debootstrap slirp4netns util-linux`"
    if _cgroups() is None:
        return "no cgroup2 file system is mounted here, which systemd needs"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun: a network of its own cannot reach any other"
    tried = subprocess.run(["unshare", *_SPACES, "--fork", "true"], capture_output=True, text=True, timeout=30)
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else None


def _cgroups() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    return None


class FreshMachine:
    """One machine; its files are below ``root``."""

    def __init__(self, place: Path, name: str) -> None:
        self.name = name
        self.root = place / "root"
        self._logs = place
        cgroups = _cgroups()
        assert cgroups is not None
        self._cgroup = cgroups / f"guide-{secrets.token_hex(4)}"
        self._unshare: subprocess.Popen[bytes] | None = None
        self._network: subprocess.Popen[bytes] | None = None
        self.init = 0

    def install(self) -> None:
        """Debian as its installer leaves it, and what this machine's network demands of every machine in it."""
        mirror = debian.mirrors()[0]
        with (self._logs / "debootstrap.log").open("wb") as log:
            subprocess.run(
                ["debootstrap", f"--keyring={debian.archive_keyring()}", "--include=ca-certificates", SUITE,
                 self.root, mirror],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True, timeout=900,
            )  # fmt: skip
        (self.root / "etc/hostname").write_text(f"{self.name}\n")
        (self.root / "etc/resolv.conf").write_text(f"nameserver {_NAME_SERVER}\n")
        (self.root / "etc/systemd/system/systemd-sysctl.service").symlink_to("/dev/null")
        self._belong_to_the_network()

    def _belong_to_the_network(self) -> None:
        """Certificates of a proxy that everything goes through, and a mirror of packages that is not the newest."""
        dump = subprocess.run(
            ["apt-config", "dump", "Acquire::Check-Valid-Until"], capture_output=True, text=True, check=True
        )
        (self.root / "etc/apt/apt.conf.d/90network").write_text(dump.stdout)
        bundle = "/etc/ssl/certs/ca-certificates.crt"
        (self.root / "etc/pip.conf").write_text(f"[global]\ncert = {bundle}\n")
        (self.root / "root/.npmrc").write_text(f"cafile={bundle}\n")
        for certificate in sorted(_CERTIFICATES.glob("*.crt")):
            shutil.copy(certificate, self.root / _CERTIFICATES.relative_to("/"))
        subprocess.run(["chroot", self.root, "update-ca-certificates"], check=True, capture_output=True, timeout=120)

    def boot(self) -> None:
        """Switch it on, and wait until systemd says that all is up."""
        self._cgroup.mkdir(exist_ok=True)
        unshare = ["unshare", *_SPACES, "--fork", "--kill-child", "--propagation", "private", "sh", "-c", _BOOT, "sh"]
        within = f"echo $$ > {self._cgroup}/cgroup.procs; exec {shlex.join(unshare)} {self.root} {self.name}"
        with (self._logs / "boot.log").open("ab") as log:
            self._unshare = subprocess.Popen(
                ["sh", "-c", within], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        pid = self._unshare.pid
        until(lambda: Path(f"/proc/{pid}/task/{pid}/children").read_text().strip(), "there is a first process")
        self.init = init_of(pid)
        until(lambda: Path(f"/proc/{self.init}/comm").read_text() == "systemd\n", "systemd has taken over")
        with (self._logs / "network.log").open("ab") as log:
            self._network = subprocess.Popen(
                ["slirp4netns", "--configure", "--mtu=65520", "--disable-host-loopback", str(self.init), "tap0"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        until(lambda: self._says("ip", "address", "show", "tap0", contains="10.0.2."), "the network is there")
        until(lambda: self._says("systemctl", "is-system-running", contains="running"), "it is up", timeout=90)

    def _says(self, *argv: str, contains: str) -> bool:
        done = subprocess.run([*self.inside(), *argv], capture_output=True, text=True, timeout=60)
        return contains in done.stdout.split("\n")[0] or (argv[0] == "ip" and contains in done.stdout)

    def inside(self) -> list[str]:
        """The beginning of a command line whose rest runs there as root, in root's home."""
        enter = ["nsenter", f"--target={self.init}", *_SPACES, "--root"]
        plain = ["env", "--ignore-environment", "--chdir=/root", "HOME=/root", "USER=root", "LOGNAME=root"]
        return [*enter, *plain, "SHELL=/bin/bash", "TERM=dumb", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]

    def on_its_network(self) -> list[str]:
        """The beginning of a command line whose rest runs here, but with its network."""
        return ["nsenter", f"--target={self.init}", "--net"]

    def gone(self, timeout: float = 300) -> None:
        """Wait until it has switched itself off."""
        assert self._unshare is not None
        self._unshare.wait(timeout)
        self._end_network()

    def _end_network(self) -> None:
        if self._network is not None:
            self._network.terminate()
            self._network.wait(30)
            self._network = None

    def close(self) -> None:
        """Pull the plug, and remove what it left in this machine's cgroups."""
        if self._unshare is not None and self._unshare.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init, signal.SIGKILL)
            self._unshare.wait(60)
        self._end_network()
        if self._cgroup.is_dir():
            for directory, _, _ in os.walk(self._cgroup, topdown=False):
                until(lambda directory=directory: _removed(Path(directory)), "its cgroups are empty")


def _removed(cgroup: Path) -> bool:
    with contextlib.suppress(OSError):
        cgroup.rmdir()
    return not cgroup.exists()


@contextlib.contextmanager
def fresh_machine(place: Path, name: str) -> Iterator[FreshMachine]:
    """One that is up; its files below ``place`` are removed afterwards."""
    machine = FreshMachine(place, name)
    try:
        machine.install()
        machine.boot()
        yield machine
    finally:
        machine.close()
        shutil.rmtree(machine.root, ignore_errors=True)
