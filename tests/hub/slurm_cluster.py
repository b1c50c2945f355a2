"""A Slurm cluster: a head with slurmctld, and nodes with a slurmd each, every one a machine of its own."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import Machine, User, network
from waiting import until

SERVICES = ("slurmctld", "slurmd")
PROGRAMS = (
    *SERVICES,
    "sbatch",
    "squeue",
    "scancel",
    "scontrol",
    "sinfo",
    "unshare",
    "nsenter",
    "ip",
    "sudo",
    "setpriv",
    "ps",
)

# Nobody is to be kept out of a cluster that nobody else can reach: auth/none instead of a munge key.
_CONFIG = """
ClusterName=small
SlurmctldHost=head
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
PropagateResourceLimits=NONE
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
KillWait=120
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Node:
    """A node's description in slurm.conf: its features, and its GPUs (a type and how many).

    ``weight``: of nodes that will do, Slurm takes the one with the lowest.
    """

    features: tuple[str, ...]
    gpu: str = ""
    gpus: int = 0
    weight: int = 1


class Cluster:
    """The machines by name; the first, ``head``, has no slurmd."""

    def __init__(self, machines: Mapping[str, Machine]) -> None:
        self.machines = machines
        self.head = machines["head"]

    def nodes(self) -> dict[str, str]:
        """State by node, as `sinfo` says it."""
        lines = self.head.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def jobs(self) -> list[tuple[str, str]]:
        """State and node of each job, oldest first."""
        text = self.head.run("squeue", "--noheader", "--sort=i", "--format=%T %N")
        return [tuple((line + " ").split(" ")[:2]) for line in text.splitlines()]

    def job(self, id: str) -> str:
        """All that slurmctld knows of a job."""
        return self.head.run("scontrol", "--oneliner", "show", "job", id)

    def drain(self, name: str) -> None:
        """Take a node out of service: what runs there continues, nothing new comes."""
        self.head.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=test")

    def resume(self, name: str) -> None:
        """Take it back into service, and wait until it is there."""
        self.head.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
        until(lambda: self.nodes()[name] in ("idle", "mixed"), f"{name} is back", timeout=60, longest=0.3)


@contextlib.contextmanager
def slurm(place: Path, nodes: Mapping[str, Node], users: Sequence[User]) -> Iterator[Cluster]:
    """A cluster whose nodes are all idle."""
    with network(["head", *nodes], place, users) as machines:
        lines, gres = [], []
        for name, node in nodes.items():
            line = f"NodeName={name} CPUs=2 RealMemory=1000 Weight={node.weight} Feature={','.join(node.features)}"
            if node.gpus:
                line += f" Gres=gpu:{node.gpu}:{node.gpus}"
                files = "/run/gpu" + (f"[0-{node.gpus - 1}]" if node.gpus > 1 else "0")
                gres.append(f"NodeName={name} Name=gpu Type={node.gpu} File={files}")
            lines.append(line)
        for machine in machines.values():
            etc = Path("/etc/slurm")  # the machine's own
            machine.run("mkdir", "-p", etc, "/run/slurmctld", "/run/slurmd")
            for file, text in (("slurm.conf", _CONFIG.format(nodes="\n".join(lines))), ("gres.conf", "\n".join(gres))):
                (machine.own / file).write_text(text + "\n")
                machine.run("cp", machine.own / file, etc / file)
            for number in range(nodes[machine.name].gpus if machine.name in nodes else 0):
                machine.run("mknod", f"/run/gpu{number}", "c", "1", "3")  # as good a device file as any
        cluster = Cluster(machines)
        logs = [cluster.head.start("slurmctld", "-D", "-i")]
        logs += [machines[name].start("slurmd", "-D", "-N", name) for name in nodes]

        def ready() -> bool:
            dead = [text for machine in machines.values() for text in machine.dead()]
            assert not dead, "\n".join([*dead, *(log.read_text()[-2000:] for log in logs)])
            with contextlib.suppress(AssertionError):
                return set(cluster.nodes().values()) == {"idle"}
            return False

        until(ready, "all nodes are idle", timeout=60, longest=0.3)
        yield cluster


def why_not() -> str:
    """Return why this host cannot run a cluster, and how to fix it; empty when it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"a Slurm cluster needs {', '.join(missing)}: scripts/install-slurm"
    if subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True).returncode:
        return "machines on this one need root"
    return ""
