"""A cluster of GPUs and notebooks as discrete events; the real policy decides when a kernel is suspended.

`server.idle.policy.Policy` is what a server runs, one for each user here, fed with the same snapshots and obeyed in the
same way
as by `server.idle.loop`.  What is modelled is the rest: people (`notebook_activity`), GPUs that one kernel holds at a
time,
host memory and a disk for each node, and how long moves take (`move_costs`).  Times are seconds of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy
from experiment import Move, Plan, Result, Strategy, Use, Wake
from notebook_activity import DAY, WEEK, Cell, Person, Session, people

from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.lifecycle.preflight import MARGIN
from jupyter_gpu_ckpt.server.idle.policy import Action, IdleSettings, KernelSnapshot, Policy, Verb

Process = Generator[simpy.Event, Any, None]
#: Seconds between two rounds of a server (`IdlePolicy.interval`).
INTERVAL = 5.0


@dataclass(eq=False)
class Gpu:
    """``free``: bytes, or 1 where one kernel at a time occupies it.  ``uses``: the activity of each kernel on it."""

    number: int
    node: int
    free: int
    uses: dict[int, Use] = field(default_factory=dict)
    since: float = 0.0

    @property
    def use(self) -> Use:
        """Of all its kernels together."""
        return next((use for use in (Use.COMPUTING, Use.MOVING, Use.IDLE) if use in self.uses.values()), Use.EMPTY)


@dataclass(eq=False)
class Request:
    """Somebody waits for a GPU."""

    person: int
    need: int
    fits: Callable[[Gpu], bool]
    granted: simpy.Event


@dataclass(eq=False)
class Kernel:
    """A notebook's kernel, from its first cell until it is shut down."""

    person: Person
    node: int
    gpu: Gpu | None
    state: State = State.RUNNING
    working: bool = True
    last_activity: float = 0.0
    computed: float = 0.0
    away_since: float | None = None
    server_since: float = 0.0
    process: int = 1
    #: Set while a verb is under way; succeeds when it has ended.
    settled: simpy.Event | None = None
    ended: bool = False


class Cluster:
    """One experiment under way."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.env = simpy.Environment()
        self.end = plan.warm_up + plan.weeks * WEEK
        self.result = Result(plan, plan.weeks * WEEK)
        whole = plan.gpu_memory or 1
        self.gpus = [Gpu(number, number // plan.gpus_per_node, whole) for number in range(plan.gpus)]
        self.waiting: list[Request] = []
        self.disks = [simpy.Resource(self.env) for _ in range(plan.nodes)]
        self.memory = [plan.memory_per_gpu * plan.gpus_per_node] * plan.nodes
        self.stored = 0
        self.kernels: set[Kernel] = set()
        self.policies: dict[Kernel, Policy] = {}
        #: Servers whose policy has nothing to do until their kernel is back.
        self.resting: dict[Kernel, simpy.Event] = {}

    def run(self) -> Result:
        """Until the end; `Result` counts what is after the warm-up."""
        weeks = math.ceil(self.end / WEEK)
        for person in people(self.plan.users, weeks, self.plan.seed, self.plan.habits):
            self.env.process(self._life(person))
        self.env.process(self._watch_levels())
        self.env.run(until=self.end)
        for gpu in self.gpus:
            self._account(gpu)
        for kernel in self.kernels:
            self._back(kernel)
        return self.result

    # -- people

    def _life(self, person: Person) -> Process:
        kernel: Kernel | None = None
        for session in person.sessions:
            if self.env.now < session.start:
                yield self.env.timeout(session.start - self.env.now)
            kernel = yield self.env.process(self._sit(person, session, kernel))

    def _sit(
        self, person: Person, session: Session, kernel: Kernel | None
    ) -> Generator[simpy.Event, Any, Kernel | None]:
        counted = self.env.now >= self.plan.warm_up
        self.result.sittings += counted
        self.result.demanded += counted * sum(cell.seconds for cell in session.cells)
        for number, cell in enumerate(session.cells):
            yield self.env.timeout(cell.gap)
            if kernel is not None and kernel.ended:
                kernel = None
            if kernel is None:
                kernel = yield self.env.process(self._start(person))
                came = kernel is not None
            else:
                came = yield self.env.process(self._wanted(kernel))
            if came and kernel is not None:
                came = yield from self._compute(kernel, cell, counted)
            if not came or kernel is None:
                self._note_wake(self.env.now - self.plan.habits.patience, self.plan.habits.patience, "gave up")
                if counted:
                    self.result.turned_away += 1
                    self.result.not_computed += sum(each.seconds for each in session.cells[number:])
                return kernel
        if session.shuts_down and kernel is not None:
            yield from self._shut_down(kernel)
            return None
        return kernel

    def _compute(self, kernel: Kernel, cell: Cell, counted: bool) -> Generator[simpy.Event, Any, bool]:
        """Run a cell: whether its author has not given up."""
        assert kernel.gpu is not None
        kernel.working = True
        self._turn(kernel, Use.COMPUTING)
        yield self.env.timeout(cell.seconds)
        self._turn(kernel, Use.IDLE)
        self._count_cell(kernel, cell, counted)
        return True

    def _count_cell(self, kernel: Kernel, cell: Cell, counted: bool) -> None:
        kernel.working, kernel.last_activity = False, self.env.now
        kernel.computed += cell.seconds
        if counted:
            self.result.cells += 1
            self.result.computed += cell.seconds

    # -- kernels

    def _start(self, person: Person) -> Generator[simpy.Event, Any, Kernel | None]:
        asked = self.env.now
        gpu = yield self.env.process(self._queue(person, lambda gpu: True))
        if gpu is None:
            return None
        self._note_wake(asked, self.env.now - asked, "a fresh kernel")
        kernel = Kernel(person, gpu.node, gpu, last_activity=self.env.now, server_since=self.env.now)
        self._turn(kernel, Use.IDLE)
        self.kernels.add(kernel)
        if self.plan.strategy is Strategy.CHECKPOINT:
            self.env.process(self._serve(kernel))
        elif self.plan.strategy is Strategy.CULL:
            self.env.process(self._cull(kernel))
        return kernel

    def _wanted(self, kernel: Kernel) -> Generator[simpy.Event, Any, bool]:
        """A cell comes: whether the kernel ran before its author had gone."""
        asked, queued = self.env.now, 0.0
        kernel.working = True  # the gate has a message for it
        while kernel.settled is not None:
            yield kernel.settled
        if kernel.state is State.RUNNING:
            if self.env.now > asked:
                self._note_wake(asked, 0.0, "a move that failed")
            return True
        source = "host memory" if kernel.state is State.SUSPENDED else "disk"
        stopped = source == "disk" and self.env.now - kernel.last_activity > self.plan.cull_after
        if stopped:
            yield self.env.timeout(self.plan.spawn)
        begin = self.env.now
        gpu = yield self.env.process(self._queue(kernel.person, self._fitting(kernel, source, stopped)))
        queued = self.env.now - begin
        if gpu is None:
            kernel.working = False
            return False
        kernel.gpu = gpu
        device, image = kernel.person.device, self._image(kernel)
        if source == "disk":
            kernel.node = gpu.node
            yield from self._transfer(gpu.node, image, self.plan.costs.restore(image), read=True)
            self._take(gpu.node, device)
        yield self.env.timeout(self.plan.costs.resume(device))
        self.memory[gpu.node] += device
        if source == "disk":
            self.stored -= image
            kernel.process += 1
        kernel.state = State.RUNNING
        self._back(kernel)
        self._turn(kernel, Use.IDLE)
        self._note_wake(asked, queued, source)
        self._woken(kernel)
        return True

    def _fitting(self, kernel: Kernel, source: str, stopped: bool) -> Callable[[Gpu], bool]:
        if stopped:
            return lambda gpu: True
        if source == "host memory" and not self.plan.any_gpu:
            own = kernel.gpu
            return lambda gpu: gpu is own
        return lambda gpu: gpu.node == kernel.node

    def _shut_down(self, kernel: Kernel) -> Process:
        while kernel.settled is not None:
            yield kernel.settled
        self._remove(kernel)

    def _remove(self, kernel: Kernel) -> None:
        kernel.ended = True
        self._back(kernel)
        self.kernels.discard(kernel)
        if kernel.state is State.RUNNING and kernel.gpu is not None:
            self._free(kernel)
        elif kernel.state is State.SUSPENDED:
            self.memory[kernel.node] += kernel.person.device
        elif kernel.state is State.CHECKPOINTED:
            self.stored -= self._image(kernel)

    def _image(self, kernel: Kernel) -> int:
        return kernel.person.device + self.plan.costs.besides

    # -- plain culling

    def _cull(self, kernel: Kernel) -> Process:
        while not kernel.ended:
            left = kernel.last_activity + self.plan.cull_after - self.env.now
            if kernel.working or left > 0:
                yield self.env.timeout(max(left, INTERVAL))
                continue
            if self.env.now >= self.plan.warm_up:
                self.result.lost += 1
                self.result.lost_seconds += kernel.computed
            self._remove(kernel)

    # -- the server's policy

    def _serve(self, kernel: Kernel) -> Process:
        """Run `server.idle.loop` for one kernel, without the rounds in which nothing can be due."""
        limit = self.plan.memory_per_gpu * self.plan.gpus_per_node // 2
        policy = Policy(IdleSettings(self.plan.rule, memory_limit=limit, parallel=self.plan.parallel))
        self.policies[kernel] = policy
        while not kernel.ended:
            for action in policy.decide([self._snapshot(kernel)], self.env.now):
                yield from self._obey(policy, action, kernel)
            outlook = policy.outlook(str(kernel.person.number), self.env.now)
            due = outlook["next_in_s"] if outlook is not None else None
            if due is None:
                self.resting[kernel] = self.env.event()
                yield self.resting[kernel]
            else:
                yield self.env.timeout(max(1.0, math.ceil(due / INTERVAL)) * INTERVAL)
        del self.policies[kernel]

    def _woken(self, kernel: Kernel) -> None:
        """Show the policy a resumed kernel: its idleness counts from here."""
        if policy := self.policies.get(kernel):
            policy.decide([self._snapshot(kernel)], self.env.now)
        if event := self.resting.pop(kernel, None):
            event.succeed()

    def _snapshot(self, kernel: Kernel) -> KernelSnapshot:
        return KernelSnapshot(
            kernel_id=str(kernel.person.number),
            kernel_name="python3",
            state=kernel.state,
            last_activity=kernel.last_activity,
            process=kernel.process,
            working=kernel.working,
            on_gpu=kernel.state is State.RUNNING,
            resident=kernel.person.device + self.plan.costs.besides,
        )

    def _obey(self, policy: Policy, action: Action, kernel: Kernel) -> Process:
        device = kernel.person.device
        if kernel.state is State.RUNNING and self.memory[kernel.node] < device + MARGIN:
            policy.failed(action, {"code": "NO_MEMORY"}, refused=True, now=self.env.now)
            if self.env.now >= self.plan.warm_up:
                self.result.refused["NO_MEMORY"] += 1
            return
        kernel.settled = self.env.event()
        if kernel.state is State.RUNNING:
            self._take(kernel.node, device)
            self._turn(kernel, Use.MOVING)
            yield self.env.timeout(self.plan.costs.suspend(device))
            kernel.away_since = self.env.now
            self._free(kernel)
            kernel.state = State.SUSPENDED
        if action.verb is Verb.CHECKPOINT:
            image = self._image(kernel)
            self.stored += image
            if self.env.now >= self.plan.warm_up:
                self.result.stored_most = max(self.result.stored_most, self.stored)
            yield from self._transfer(kernel.node, image, self.plan.costs.dump(image), read=False)
            self.memory[kernel.node] += device
            kernel.state, kernel.gpu = State.CHECKPOINTED, None
        policy.succeeded(action)
        settled, kernel.settled = kernel.settled, None
        settled.succeed()

    def _take(self, node: int, bytes: int) -> None:
        """Of a node's host memory."""
        self.memory[node] -= bytes
        if self.env.now >= self.plan.warm_up:
            used = self.plan.memory_per_gpu * self.plan.gpus_per_node - self.memory[node]
            self.result.memory_most = max(self.result.memory_most, used)

    def _transfer(self, node: int, bytes: int, seconds: float, *, read: bool) -> Process:
        with self.disks[node].request() as turn:
            yield turn
            if self.env.now >= self.plan.warm_up:
                self.result.moves.append(Move(node, self.env.now, seconds, bytes, read))
            yield self.env.timeout(seconds)

    # -- GPUs

    def _queue(self, person: Person, fits: Callable[[Gpu], bool]) -> Generator[simpy.Event, Any, Gpu | None]:
        """A GPU with free memory, in the order of requests; None for a user who gave up before."""
        request = Request(person.number, person.device if self.plan.gpu_memory else 1, fits, self.env.event())
        self.waiting.append(request)
        # The emptiest first, as a scheduler spreads them.
        for gpu in sorted(self.gpus, key=lambda gpu: (-gpu.free, gpu.number)):
            if self._grant(gpu, request):
                return gpu
        yield request.granted | self.env.timeout(self.plan.habits.patience)
        if not request.granted.triggered:
            self.waiting.remove(request)
            return None
        gpu = request.granted.value
        assert isinstance(gpu, Gpu)
        return gpu

    def _grant(self, gpu: Gpu, request: Request) -> bool:
        if gpu.free < request.need or not request.fits(gpu):
            return False
        self.waiting.remove(request)
        self._account(gpu)
        gpu.free -= request.need
        gpu.uses[request.person] = Use.MOVING
        request.granted.succeed(gpu)
        return True

    def _free(self, kernel: Kernel) -> None:
        gpu = kernel.gpu
        assert gpu is not None
        self._account(gpu)
        del gpu.uses[kernel.person.number]
        gpu.free += kernel.person.device if self.plan.gpu_memory else 1
        for request in tuple(self.waiting):
            self._grant(gpu, request)

    def _turn(self, kernel: Kernel, use: Use) -> None:
        assert kernel.gpu is not None
        self._account(kernel.gpu)
        kernel.gpu.uses[kernel.person.number] = use

    def _account(self, gpu: Gpu) -> None:
        """The time since the last change is what the GPU was used for until now."""
        seconds = self.env.now - max(gpu.since, self.plan.warm_up)
        if seconds > 0:
            self.result.gpu[gpu.use] += seconds
            self.result.crowded += seconds * (sum(use is Use.COMPUTING for use in gpu.uses.values()) > 1)
        gpu.since = self.env.now

    # -- what is counted

    def _back(self, kernel: Kernel) -> None:
        if kernel.away_since is not None:
            self.result.given_back += max(0.0, self.env.now - max(kernel.away_since, self.plan.warm_up))
            kernel.away_since = None

    def _note_wake(self, asked: float, queued: float, source: str) -> None:
        if asked >= self.plan.warm_up:
            self.result.wakes.append(Wake(asked, self.env.now - asked, queued, source))

    def _watch_levels(self) -> Process:
        yield self.env.timeout(self.plan.warm_up)
        whole = self.plan.memory_per_gpu * self.plan.gpus_per_node
        while True:
            used = whole - min(self.memory)
            self.result.levels.append((self.env.now, used, self.stored))
            yield self.env.timeout(DAY / 288)
