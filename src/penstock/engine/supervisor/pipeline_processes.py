"""Core and stages: the processes that meet in an epoch, and what happens when one of them is lost.

    epoch e ──a member has ended, or left it──▶ between epochs ──due──▶ epoch e + 1 ──a step has crossed it
                                                     ▲                      │
                                                     └──────lost again──────┘

The loss of a member ends the epoch: connections are closed, and all get new ones. Only what was lost is
started again; the other stages keep their weights, and a core that lives keeps its requests. Where that fails
again and again it is tried with growing pauses, and running requests end. Of its end a child need not say
anything. Used by `engine.supervisor.supervisor`, in its thread.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.batch import RankLoaded
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.engine.supervisor.losses import CORE, Losses
from penstock.engine.supervisor.reports import (
    LoadProgress,
    Notice,
    Recovered,
    Reporter,
    StageLoaded,
    StageLost,
    StageReady,
    of_replica,
    rank_parts,
)
from penstock.engine.supervisor.wiring import Wiring
from penstock.errors import ErrorInfo, PeerError
from penstock.executor.base import first_cause
from penstock.hosts.children import CAUSE_GRACE_S, Child, ChildProcesses, spawn
from penstock.hosts.local_socket import LocalSocket
from penstock.process import child as child_process
from penstock.process import entry_points
from penstock.process.config import CoreProcessConfig, RankConfig, RankProcessConfig
from penstock.process.control import ControlSocket, EpochLost, Stop
from penstock.process.endpoints import Restarts
from penstock.runner.kv_demand import stranded_bytes

COMPANY_S = 0.05  # after a loss: what ends one member often ends others
DUMP_S = 0.05  # for a child to print where its threads are


class PipelineProcesses:
    """The core and the stages of one replica.

    Args:
        processes: gets them as children; its events about them come back by `take`.

    Attributes:
        client: where the core meets its clients.
    """

    def __init__(self, plan: LaunchPlan, processes: ChildProcesses, reporter: Reporter) -> None:
        self._plan = plan
        self._processes = processes
        self.client = LocalSocket()
        self._reporter = reporter
        self._wiring = Wiring(plan)
        self._children: dict[int, Child] = {}  # by member index, those that have not been buried
        self._control: dict[int, ControlSocket] = {}
        self._ranks: dict[int, RankLoaded] = {}  # by member index, what those that were ready have said
        self._restarts: Counter[int] = Counter()
        self._losses = Losses(leave_s=plan.ranks[0].wait_timeout_s / plan.num_stages)  # as a step may take
        self._rank_indices = range(len(plan.ranks))  # those of ranks are their numbers

    @property
    def children(self) -> list[Child]:
        """Those that have not been buried."""
        return list(self._children.values())

    @property
    def have_loaded(self) -> bool:
        """Whether all stages have."""
        return all(child.has_loaded for member, child in self._children.items() if member != CORE)

    def start(self) -> None:
        """Stages first: they take longest."""
        for member in (*self._rank_indices, CORE):
            self._fill(member)

    def begin(self) -> None:
        """The first epoch."""
        self._tell_ends()

    def take(self, child: Child, event: child_process.StatusEvent) -> None:
        """Hear what one of them says."""
        if isinstance(event, child_process.Ready):
            if event.rank is not None:
                self._ranks[child.member_index] = event.rank
            is_present = event.epoch == self._losses.epoch and self._losses.missing is None
            if child.stage is None and is_present and event.epoch > 0:
                seconds = self._losses.recovered(time.monotonic())
                replica = self._plan.core.replica
                self._reporter.report(Recovered(replica=replica, epoch=event.epoch, seconds=seconds))
        elif isinstance(event, child_process.Abandoned):
            self._losses.leave(event.epoch, event.error, child.member_index)
        elif isinstance(event, child_process.LoadProgressed):
            told = LoadProgress(
                **_named(self._plan.ranks[child.member_index]), done_bytes=event.done, total_bytes=event.total
            )
            self._reporter.report(told)
        elif isinstance(event, child_process.WeightsLoaded):
            self._reporter.report(
                StageLoaded(
                    **_named(self._plan.ranks[child.member_index]),
                    pid=child.pid,
                    bytes_read=event.bytes_read,
                    seconds=event.seconds,
                )
            )

    def recover(self) -> None:
        """End the epoch if it is broken, and begin the next one when it is due."""
        losses, has_ended = self._losses, self._has_ended()
        if losses.causes and not has_ended:
            self._await_culprit()
        if losses.causes or has_ended:
            time.sleep(COMPANY_S)
            self._end_epoch()
        if losses.is_due(time.monotonic()):
            try:
                self._begin_epoch()
            except OSError as error:  # no memory, no descriptors: perhaps later
                self._lose(PeerError(f"no new epoch could begin: {error}.").info(), {})

    def kill_hung(self) -> None:
        """Kill stages that do not leave an epoch which is over: they are then lost as any other."""
        ready = {member for member, child in self._children.items() if member != CORE and child.is_ready}
        for member in self._losses.hung(ready, time.monotonic()):
            self.kill(self._children[member], f"has not left epoch {self._losses.epoch - 1}")

    def kill_slow_loaders(self) -> None:
        """Kill stages that have not loaded for too long: a disk, or another machine's, may never answer."""
        limit_s, now = self._plan.core.parallel.load_timeout_s, time.monotonic()
        for member, child in self._children.items():
            if member != CORE and not child.has_loaded and now - child.started_at > limit_s:
                self.kill(child, f"had not loaded after {limit_s:g} s")

    def kill(self, child: Child, reason: str) -> None:
        """End a child that cannot be asked to; before, it and all members print where their threads are."""
        for each in {*self.children, child}:
            if each.has_spoken:  # and so has set itself up for the signal
                each.send_signal(signal.SIGUSR1)
                time.sleep(DUMP_S)  # one after the other, to be read
        child.kill(reason)

    def stop_all(self) -> None:
        """Tell all to leave."""
        for member, child in self._children.items():
            self._control[member].send(Stop())
            if not child.is_ready:
                child.send_signal(signal.SIGKILL)  # it loads, and looks at nothing until it has

    def close(self) -> None:
        """Let go of all connections; the child processes belong to `ChildProcesses`."""
        for control in self._control.values():
            control.close()
        self._wiring.close()
        self.client.close()

    def startup_notices(self) -> Iterator[Notice | StageReady]:
        """What was decided, and a line for each stage, once all are ready."""
        plan, ranks = self._plan, self._ranks
        kernels = dict.fromkeys(rank.kernels for rank in ranks.values())
        texts = [*plan.notes, *(f"kernels: {found}" for found in kernels)]
        on_cpu = [rank.kernels for member, rank in ranks.items() if plan.ranks[member].device_type == "cpu"]
        if len({found.startswith("none") for found in on_cpu}) > 1:
            texts.append("stages differ in kernels: tokens may differ from those of other runs; start again.")
        yield from (Notice(text=text) for text in texts)
        num_blocks = min((rank.max_blocks for rank in ranks.values()), default=0)
        for member, config in enumerate(plan.ranks):
            rank = ranks[member]
            yield StageReady(
                **_named(config),
                pid=self._children[member].pid,
                parts=rank_parts(config),
                tensor_bytes=rank.tensor_bytes,
                num_blocks=num_blocks,
                stranded_bytes=stranded_bytes(rank.max_blocks, num_blocks, rank.block_bytes),
            )

    def _fill(self, member: int) -> None:
        """Start the process of one member."""
        if member == CORE:
            core = CoreProcessConfig(
                core=self._plan.core, parent_pid=os.getpid(), client_address=self.client.bind_address
            )
            name = of_replica(self._plan.core.replica, "core")
            self._spawn(CORE, entry_points.CORE, core, name, [self.client.listen_fd])
            return
        rank = self._plan.ranks[member]
        if self._losses.epoch > 0:
            rank = _replacement(rank, self._ranks.values())
        config = RankProcessConfig(rank=rank, parent_pid=os.getpid())
        self._spawn(member, entry_points.RANK, config, of_replica(rank.replica, rank.name))

    def _spawn(
        self, member: int, module: str, config: msgspec.Struct, name: str, inherit: Sequence[int] = ()
    ) -> None:
        control = ControlSocket()
        try:
            child = spawn(
                module,
                child_process.encode_config(config),
                name=name,
                stage=None if member == CORE else self._plan.ranks[member].stage,
                member_index=member,
                inherit=[*inherit, control.child_fd],
                arguments=["--control-fd", str(control.child_fd)],
            )
        except BaseException:
            control.close()
            raise
        self._children[member] = self._processes.add(child)
        control.close_child_end()
        self._control[member] = control

    def _tell_ends(self) -> None:
        """All learn where they meet in this epoch."""
        restarts = Restarts(stages=[0] * self._plan.num_stages, core=self._restarts[CORE])
        for member, rank in enumerate(self._plan.ranks):
            restarts.stages[rank.stage] += self._restarts[member]
        self._control[CORE].send(msgspec.structs.replace(self._wiring.core(), restarts=restarts))
        for member, rank in enumerate(self._plan.ranks):
            self._control[member].send(self._wiring.rank(rank.stage, rank.tp_rank))
        self._wiring.close_sockets()

    def _await_culprit(self) -> None:
        """A member has left the epoch because of another: that one may be about to end."""

        def has_ended() -> bool:
            for child in self.children:
                if child.failure is not None:  # it has said so, and is about to leave
                    child.send_signal(signal.SIGKILL)
            return self._has_ended()

        self._processes.hear_until(has_ended, CAUSE_GRACE_S)

    def _end_epoch(self) -> None:
        """All leave it; those that have ended are to be started again, at once at first."""
        ended = self._ended()
        guilty = ended[max(ended)] if ended else None  # a rank before the core
        cause = (
            self._processes.first_cause(guilty, self.children) if guilty else first_cause(self._losses.causes)
        )
        self._lose(cause, self._ended())  # finding the cause may have taken a while

    def _has_ended(self) -> bool:
        """Whether any member has."""
        return any(child.exit_code is not None for child in self.children)

    def _ended(self) -> dict[int, Child]:
        """Return the members that have ended, by member index; all that they said has been heard."""
        ended = {member: child for member, child in self._children.items() if child.exit_code is not None}
        for child in ended.values():
            self._processes.hear(child)
        return ended

    def _lose(self, cause: ErrorInfo, ended: Mapping[int, Child]) -> None:
        losses, epoch = self._losses, self._losses.epoch
        places = {CORE, *self._rank_indices}
        lost = (places - set(self._children)) | set(ended)
        failures = [(child.end(), child.trace) for child in ended.values()]
        pause_s = losses.end(lost, time.monotonic())
        self._reporter.report(
            StageLost(
                error=cause,
                others=[failure.message for failure, _ in failures if failure != cause],
                trace="".join(trace for failure, trace in failures if failure.code == "internal_error"),
                replica=self._plan.core.replica,
                epoch=epoch,
                restarts=[self._plan.ranks[member].name for member in sorted(lost - {CORE})],
                restarts_core=CORE in lost,
                retry_s=pause_s,
            )
        )
        if CORE not in lost:
            self._control[CORE].send(EpochLost(cause, is_final=losses.is_repeated))
        self._wiring.end()
        for member in ended:
            self._bury(member)

    def _begin_epoch(self) -> None:
        """Start the members that are missing, and connect all members anew."""
        for member in self._losses.begin():
            self._fill(member)
            self._restarts[member] += 1
        self._wiring = Wiring(self._plan, self._losses.epoch)
        self._tell_ends()

    def _bury(self, member: int) -> None:
        self._control.pop(member).close()
        self._processes.reap(self._children.pop(member))


def begin_together(replicas: Sequence[PipelineProcesses]) -> bool:
    """Begin the first epoch of all once every weight is in memory: only then is known how much is free for
    KV caches. Whether it was time."""
    have_loaded = all(replica.have_loaded for replica in replicas)
    if have_loaded:
        for replica in replicas:
            replica.begin()
    return have_loaded


def _named(rank: RankConfig) -> dict[str, Any]:
    """Who it is, for a report."""
    tp_rank = rank.tp_rank if rank.tp_size > 1 else None
    return {"replica": rank.replica, "stage": rank.stage, "tp_rank": tp_rank}


def _replacement(rank: RankConfig, ranks: Iterable[RankLoaded]) -> RankConfig:
    """As at the start, but for what the others have settled: they hold their KV cache, and their head."""
    num_blocks = min(message.max_blocks for message in ranks)
    return msgspec.structs.replace(rank, num_blocks=num_blocks, num_sharers=1, tied_head="load", faults=[])
