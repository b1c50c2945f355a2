"""Machines of a small cluster on this one: each in namespaces of its own, on one network, with users of their own.

Machine 0 carries the network: when its PID 1 ends, so do the network and this machine's way into it, and nothing is
left behind.  The addresses are of a network for documentation (RFC 5737), which nobody routes; the users are in files
that only the machines see.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everybody import needed, opened
from namespaces import enter, init_of, unshare
from waiting import until

#: TEST-NET-2 and 3.
_NETWORKS = ("198.51.100", "203.0.113")

#: PID 1 of a machine: takes in what loses its parent, and ends with the test.
_INIT = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
sys.stdout.write("up\\n"); sys.stdout.flush()
sys.stdin.read()
"""

_SETUP = """
set -e
hostname {name}
ip link set lo up
mount --make-rprivate /
mount -t tmpfs -o mode=0755 run /run
for uid in {uids}; do
    mkdir -p /run/user/$uid
    chown $uid:$uid /run/user/$uid
    chmod 0700 /run/user/$uid
done
# The directory, not the files in it: a mount over a file goes away when somebody here replaces that file.
cp -a /etc /run/etc
cp {own}/etc/* /run/etc/
mount --bind /run/etc /etc
mount --bind {own}/boot_id /proc/sys/kernel/random/boot_id
# An ordinary user may mount a fresh /proc for a capsule while some /proc here has nothing mounted over it.
mkdir /run/proc
mount -t proc proc /run/proc
{opened}
exec "$@"
"""


@dataclass(frozen=True)
class User:
    """An ordinary user that the machines know, and this one does not."""

    name: str
    uid: int
    home: Path


#: passwd(5), group(5), shadow(5)
_PASSWD = "{0.name}:x:{0.uid}:{0.uid}::{0.home}:/bin/sh\n"
_GROUP = "{0.name}:x:{0.uid}:\n"
_SHADOW = "{0.name}:*:20000:0:99999:7:::\n"


def _without(file: str, names: Sequence[str]) -> str:
    """A file of users of this machine, without the lines of users who happen to have the same names."""
    lines = Path("/etc", file).read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.partition(":")[0] not in names)


class Machine:
    """One machine; ``address`` is its own in the network."""

    def __init__(self, name: str, address: str, own: Path, users: Sequence[User], hosts: str, *, uptime: int) -> None:
        self.name, self.address, self.own = name, address, own
        own.mkdir()
        own.chmod(0o755)
        random = Path("/proc/sys/kernel/random/uuid").read_text()
        names = [user.name for user in users]
        files = {
            "hosts": hosts,
            "passwd": _without("passwd", names) + "".join(map(_PASSWD.format, users)),
            "group": _without("group", names) + "".join(map(_GROUP.format, users)),
            "shadow": _without("shadow", names) + "".join(map(_SHADOW.format, users)),
        }
        (own / "boot_id").write_text(random)
        (own / "etc").mkdir(mode=0o700)
        for file, text in files.items():
            (own / "etc" / file).touch(0o640 if file == "shadow" else 0o644)
            (own / "etc" / file).write_text(text)
        setup = _SETUP.format(
            name=name, own=own, uids=" ".join(str(user.uid) for user in users), opened=opened(needed(), own / "stage")
        )
        self._process = subprocess.Popen(
            [*unshare(uptime=uptime), "sh", "-c", setup, "sh", sys.executable, "-c", _INIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._programs: list[subprocess.Popen[bytes]] = []
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said == "up\n", said + self._process.stdout.read()
        self.init = init_of(self._process.pid)

    def run(self, *argv: str | Path, env: Mapping[str, str] | None = None, timeout: float = 60) -> str:
        """Return the output of a program that runs here as root.  It must end well."""
        done = subprocess.run(
            [*enter(self.init), *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            env=dict(env) if env is not None else None,
        )
        assert done.returncode == 0, f"{self.name}: {' '.join(map(str, argv))}: {done.stdout}"
        return done.stdout.strip()

    def start(
        self,
        *argv: str | Path,
        user: User | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Path:
        """Start a program that runs until the machine ends, as root or as ``user``; where its output goes."""
        log = self.own / f"{Path(argv[0]).name}.log"
        become = ["setpriv", f"--reuid={user.uid}", f"--regid={user.uid}", "--clear-groups", "--"] if user else []
        inside = [*enter(self.init), *([f"--wdns={cwd}"] if cwd else []), *become, *map(str, argv)]
        with log.open("ab") as output:
            self._programs.append(
                subprocess.Popen(
                    inside,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(env) if env is not None else None,
                )
            )
        return log

    def dead(self) -> list[str]:
        """The programs that were started here and have ended."""
        return [str(one.args) for one in self._programs if one.poll() is not None]

    def processes(self, user: User) -> list[str]:
        """Command lines of the user's processes here."""
        text = self.run("ps", "-e", "-o", "uid=,args=")
        return [line.split(None, 1)[1] for line in text.splitlines() if line.split()[0] == str(user.uid)]

    def close(self) -> None:
        """End all processes that run here."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)
        self._process.stdout.close()
        for program in self._programs:
            program.wait(60)


@contextlib.contextmanager
def network(names: Sequence[str], place: Path, users: Sequence[User]) -> Iterator[dict[str, Machine]]:
    """Machines of these names on one network; the first carries it, and this machine reaches all of them."""
    prefix = next(one for one in _NETWORKS if not _has(one))
    addresses = {name: f"{prefix}.{number}" for number, name in enumerate(names, 1)}
    hosts = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())
    machines: dict[str, Machine] = {}
    mine = f"gc{secrets.token_hex(5)}"
    try:
        for number, name in enumerate(names):
            machines[name] = Machine(
                name, addresses[name], place / name, users, hosts, uptime=100_000 * (len(names) - number)
            )
        first, *others = machines.values()
        first.run("ip", "link", "add", "net0", "type", "bridge")
        first.run("ip", "address", "add", f"{first.address}/24", "dev", "net0")
        first.run("ip", "link", "set", "net0", "up")
        for number, other in enumerate(others):
            _cable(first, f"port{number}", str(other.init), "eth0")
            other.run("ip", "address", "add", f"{other.address}/24", "dev", "eth0")
            other.run("ip", "link", "set", "eth0", "up")
        _cable(first, "outside", "self", mine)
        for words in (["address", "add", f"{prefix}.254/24", "dev", mine], ["link", "set", mine, "up"]):
            subprocess.run(["ip", *words], check=True, timeout=60)
        yield machines
    finally:
        # It would go by itself with the other end of the cable, whenever the system comes to that.
        subprocess.run(["ip", "link", "delete", "dev", mine], check=False, capture_output=True, timeout=60)
        for machine in reversed(machines.values()):
            machine.close()
        until(lambda: not _has(prefix), "the network has gone")


def _cable(first: Machine, port: str, to: str, name: str) -> None:
    """From a port of the bridge on ``first`` to the machine of that PID 1, or to this one."""
    end = [] if to == "self" else ["netns", to]
    subprocess.run(
        ["ip", "link", "add", "name", port, "netns", str(first.init), "type", "veth", "peer", "name", name, *end],
        check=True,
        timeout=60,
    )
    first.run("ip", "link", "set", port, "master", "net0")
    first.run("ip", "link", "set", port, "up")


def _has(prefix: str) -> bool:
    """Return whether this machine has an address in that network."""
    done = subprocess.run(["ip", "-o", "address"], check=True, capture_output=True, text=True, timeout=60)
    return f" {prefix}." in done.stdout
