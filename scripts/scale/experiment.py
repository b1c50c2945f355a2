"""One experiment: what is varied, and what is counted.  Times are seconds, sizes bytes."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from move_costs import GIB, Costs, measured
from notebook_activity import HOUR, WEEK, Habits

from jupyter_gpu_ckpt.server.idle.policy import Rule


class Strategy(str, enum.Enum):
    """The treatment of an idle kernel."""

    NONE = "no culling"
    CULL = "plain culling"
    CHECKPOINT = "suspend and checkpoint"

    __str__ = str.__str__


@dataclass(frozen=True)
class Plan:
    """One experiment."""

    strategy: Strategy = Strategy.CHECKPOINT
    users: int = 1000
    nodes: int = 8
    gpus_per_node: int = 8
    memory_per_gpu: int = 256 * GIB
    rule: Rule = field(default_factory=Rule)
    parallel: int = 2
    #: After how long without use the hub stops a server: its user's next kernel may be anywhere.
    cull_after: float = HOUR
    #: Bytes of each GPU; kernels share one as far as their memory fits.  0: one kernel at a time.
    gpu_memory: int = 0
    #: Whether a kernel comes back from host memory to any GPU of its node, or only to the one it left.
    any_gpu: bool = False
    #: What a server needs to be started again, once it was stopped.
    spawn: float = 0.0
    habits: Habits = field(default_factory=Habits)
    costs: Costs = field(default_factory=measured)
    weeks: int = 2
    warm_up: float = WEEK
    seed: int = 1

    @property
    def gpus(self) -> int:
        """In the cluster."""
        return self.nodes * self.gpus_per_node


class Use(str, enum.Enum):
    """The uses of a GPU."""

    EMPTY = "empty"
    COMPUTING = "computing"
    IDLE = "held by an idle kernel"
    MOVING = "a kernel leaves or comes"


@dataclass
class Move:
    """Bytes that went over a node's disk or network, from ``begin`` on for ``seconds``."""

    node: int
    begin: float
    seconds: float
    bytes: int
    read: bool


@dataclass
class Wake:
    """A kernel that was wanted: how long until it ran, of that in the queue for a GPU, and where from."""

    at: float
    seconds: float
    queued: float
    source: str


@dataclass
class Result:
    """Results of the time after the warm-up; GPU time in seconds, by use."""

    plan: Plan
    measured: float
    gpu: Counter[Use] = field(default_factory=Counter)
    wakes: list[Wake] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    cells: int = 0
    computed: float = 0.0
    #: Sittings that ended because no GPU came in time, and the computing that was not done for it.
    turned_away: int = 0
    sittings: int = 0
    not_computed: float = 0.0
    #: Computing of all sittings that began.
    demanded: float = 0.0
    #: Kernels ended with state in them, and the computing that had made it.
    lost: int = 0
    lost_seconds: float = 0.0
    #: GPU time in which more than one kernel computed on it: they are not slowed down here.
    crowded: float = 0.0
    #: GPU time that kernels with device state were off the GPU.
    given_back: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    #: Bytes at the highest moment: of device memory in the host memory of one node, and of all images.
    memory_most: int = 0
    stored_most: int = 0
    #: The same now and then: (at, bytes in the fullest node's host memory, bytes of images).
    levels: list[tuple[float, int, int]] = field(default_factory=list)
