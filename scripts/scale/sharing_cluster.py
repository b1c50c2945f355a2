"""The cluster of `gpu_cluster` with hosts whose kernels share GPUs in turns, by the package's own policy."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import simpy
from experiment import Plan, Result, Wake
from gpu_cluster import Cluster, Kernel, Process
from notebook_activity import Cell, Person
from shared_gpus import ALIVE, Ran, SharedGpus

from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.server.idle.policy import Action, Policy
from jupyter_gpu_ckpt.sharing.participant import Participant, Residence
from jupyter_gpu_ckpt.sharing.policy import NodeSnapshot

#: Seconds until a kernel is looked at again that is to be checkpointed and moves.
_AGAIN = 5.0


def round_robin(snapshot: NodeSnapshot) -> NodeSnapshot:
    """The snapshot in which no cell is new: all have turns of equal length, one after the other."""
    return replace(
        snapshot, participants=tuple(replace(each, turns=max(1, each.turns)) for each in snapshot.participants)
    )


def to_completion(snapshot: NodeSnapshot) -> NodeSnapshot:
    """The snapshot in which no cell can be interrupted: each computes to its end, in the order in which they came."""
    old = round_robin(snapshot)
    return replace(old, participants=tuple(replace(each, can_pause=False) for each in old.participants))


class SharingCluster(Cluster):
    """One experiment under way, in which a kernel may be on any GPU of the host where its server is.

    ``seen``: as for `SharedGpus`.  ``ran``: the cells after the warm-up.
    """

    def __init__(self, plan: Plan, seen: Callable[[NodeSnapshot], NodeSnapshot] = lambda snapshot: snapshot) -> None:
        super().__init__(plan)
        self.ran: list[Ran] = []
        self.by_name: dict[str, Kernel] = {}
        self.shares = [self._share(node, seen) for node in range(plan.nodes)]

    def run(self) -> Result:
        """Until the end; what is counted is what is after the warm-up."""
        self.env.process(self._forget_warm_up())
        result = super().run()
        result.gpu.clear()
        for share in self.shares:
            share.settle()
            result.gpu.update(share.totals.uses)
            result.crowded += share.totals.crowded
        return result

    def swap_share(self) -> float:
        """Of the time of all GPUs after the warm-up, the part in moves."""
        moves = sum(sum(share.totals.swaps.values()) for share in self.shares)
        return moves / self.result.measured / self.plan.gpus

    def _share(self, node: int, seen: Callable[[NodeSnapshot], NodeSnapshot]) -> SharedGpus:
        gpus = {f"{node}/{number}": self.plan.gpu_memory for number in range(self.plan.gpus_per_node)}
        return SharedGpus(self.env, gpus, seen=seen, moved=self._moved)

    def _forget_warm_up(self) -> Process:
        yield self.env.timeout(self.plan.warm_up)
        for share in self.shares:
            share.settle()
            share.totals.uses.clear()
            share.totals.swaps.clear()
            share.totals.crowded = 0.0

    # -- kernels

    def _least_loaded(self) -> int:
        return min(range(self.plan.nodes), key=lambda node: (len(self.shares[node].records), node))

    def _join(self, kernel: Kernel, *, fresh: bool) -> None:
        """Let a kernel take part in sharing at its host; a fresh one has nothing to move yet."""
        name, device, costs = str(kernel.person.number), kernel.person.device, self.plan.costs
        share = self.shares[kernel.node]
        self.by_name[name] = kernel
        share.join(
            Participant(
                kernel=name,
                user=name,
                gpus=tuple(share.gpus),
                needs=(device,),
                alive_at=ALIVE,
                leave_seconds=costs.suspend(device),
                arrive_seconds=0.0 if fresh else costs.resume(device),
            )
        )

    def _moved(self, record: Participant) -> None:
        kernel = self.by_name[record.kernel]
        share = self.shares[kernel.node]
        if record.residence is Residence.AWAY:
            kernel.away_since = self.env.now
            self._take(kernel.node, kernel.person.device)
            again = self.plan.costs.resume(kernel.person.device)
            share.records[record.kernel] = replace(record, arrive_seconds=again)
        elif kernel.away_since is not None:
            self._back(kernel)
            self.memory[kernel.node] += kernel.person.device

    def _start(self, person: Person) -> Generator[simpy.Event, Any, Kernel | None]:
        kernel = Kernel(person, self._least_loaded(), None, last_activity=self.env.now, server_since=self.env.now)
        self.kernels.add(kernel)
        self._join(kernel, fresh=True)
        self.env.process(self._serve(kernel))
        return kernel
        yield

    def _wanted(self, kernel: Kernel) -> Generator[simpy.Event, Any, bool]:
        kernel.working = True
        while kernel.settled is not None:
            yield kernel.settled
        if kernel.state is State.CHECKPOINTED:
            device, image = kernel.person.device, self._image(kernel)
            if self.env.now - kernel.last_activity > self.plan.cull_after:
                kernel.node = self._least_loaded()
                yield self.env.timeout(self.plan.spawn)
            yield from self._transfer(kernel.node, image, self.plan.costs.restore(image), read=True)
            self._take(kernel.node, device)
            kernel.away_since = self.env.now if kernel.away_since is None else kernel.away_since
            self.stored -= image
            kernel.process += 1
            kernel.state = State.RUNNING
            self._join(kernel, fresh=False)
            self._woken(kernel)
        return True

    def _compute(self, kernel: Kernel, cell: Cell, counted: bool) -> Generator[simpy.Event, Any, bool]:
        share, name, asked = self.shares[kernel.node], str(kernel.person.number), self.env.now
        kernel.working = True
        running = self.env.process(share.cell(name, cell.seconds))
        yield running | self.env.timeout(self.plan.habits.patience)
        under_way = share.cells.get(name)
        if under_way is not None and under_way.ran.started is None:
            share.interrupt(name)
            kernel.working, kernel.last_activity = False, self.env.now
            return False
        ran = yield running
        waited = ran.started - asked
        if waited > 0 and asked >= self.plan.warm_up:
            self.result.wakes.append(Wake(asked, waited, waited, "its turn"))
        if counted:
            self.ran.append(ran)
        self._count_cell(kernel, cell, counted)
        return True

    def _obey(self, policy: Policy, action: Action, kernel: Kernel) -> Process:
        """Checkpoint an idle kernel."""
        share, name = self.shares[kernel.node], str(kernel.person.number)
        record = share.records[name]
        if record.residence in (Residence.ARRIVING, Residence.LEAVING):
            policy.failed(action, {"code": "BUSY"}, refused=True, now=self.env.now)
            yield self.env.timeout(_AGAIN)
            return
        kernel.settled = self.env.event()
        if record.residence is Residence.PRESENT:
            share.suspend_idle(name)
            yield self.env.timeout(record.leave_seconds + _AGAIN)
        share.end(name)
        image = self._image(kernel)
        self.stored += image
        if self.env.now >= self.plan.warm_up:
            self.result.stored_most = max(self.result.stored_most, self.stored)
        yield from self._transfer(kernel.node, image, self.plan.costs.dump(image), read=False)
        if kernel.away_since is not None:  # it has been on a GPU
            self.memory[kernel.node] += kernel.person.device
        kernel.state = State.CHECKPOINTED
        policy.succeeded(action)
        settled, kernel.settled = kernel.settled, None
        settled.succeed()

    def _remove(self, kernel: Kernel) -> None:
        kernel.ended = True
        self.kernels.discard(kernel)
        name = str(kernel.person.number)
        if kernel.state is State.CHECKPOINTED:
            self.stored -= self._image(kernel)
        else:
            if kernel.away_since is not None:
                self.memory[kernel.node] += kernel.person.device
            self.shares[kernel.node].end(name)
        self._back(kernel)
