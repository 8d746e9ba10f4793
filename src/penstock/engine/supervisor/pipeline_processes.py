"""The core and the stages of an epoch as processes, and what happens when one of them is lost.

    epoch e ──a member has ended, or left it──▶ between epochs ──due──▶ epoch e + 1 ──a step──▶ whole again
                                                     ▲                      │    crosses it
                                                     └───lost before that───┘

A member is the process of the core or of a rank. The loss of a member ends the epoch: all connections are
closed, and all members get new ones. Only what was lost is started again; the other stages keep their
weights, and a core that lives keeps its requests. If that fails again and again, the pauses between tries
grow, and running requests end. The end of a member is noticed even if the member reports nothing.
`engine.supervisor.pipe_layout` decides where the next epoch runs: a rank whose place has changed is ended and
started anew. Used by `engine.supervisor.supervisor`, in the supervisor's thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.batch import RankLoaded
from penstock.engine.supervisor.first_loads import FirstLoads
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.engine.supervisor.losses import CORE, Losses
from penstock.engine.supervisor.numeric_classes import NumericClasses
from penstock.engine.supervisor.pipe_layout import PipeLayout
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
from penstock.engine.supervisor.standbys import NO_STANDBYS, StandbyRanks
from penstock.engine.supervisor.told_hosts import link_speed_report
from penstock.engine.supervisor.wiring import RankAddress, Wiring
from penstock.errors import ErrorInfo, PeerError, PenstockError
from penstock.executor.base import first_cause
from penstock.hosts.local_socket import LocalSocket
from penstock.hosts.member import Member
from penstock.hosts.member_watch import CAUSE_GRACE_S, MemberWatch
from penstock.hosts.rank_host import Hosts
from penstock.process import child as child_process
from penstock.process.config import FirstLoad, RankConfig
from penstock.process.control import EpochLost, ExchangeLink, Stop
from penstock.process.endpoints import Restarts
from penstock.runner.kv_demand import stranded_bytes

COMPANY_S = 0.05  # a pause after a loss, since what ends one member often ends others
DUMP_S = 0.05  # so long a member has to print where its threads are


class PipelineProcesses:
    """Starts, connects and replaces the processes of one replica, its *members*: its core and its ranks.

    Args:
        layout: decides where each rank runs, from epoch to epoch.
        hosts: all hosts.
        watch: watches the processes; the owner passes their events on to `take`.
        standbys: ranks that wait beside the pipe to replace a lost one; this replica closes them.

    Attributes:
        client: the socket where the core meets its clients.
        classes: numeric classes of the ranks.
    """

    def __init__(
        self,
        layout: PipeLayout,
        hosts: Hosts,
        watch: MemberWatch,
        reporter: Reporter,
        standbys: StandbyRanks = NO_STANDBYS,
    ) -> None:
        self._layout = layout
        self._hosts = hosts
        self._watch = watch
        self.client = LocalSocket()
        self._reporter = reporter
        self._standbys = standbys
        plan = layout.plan
        self._wiring = Wiring(plan, hosts)
        self._members: dict[int, Member] = {}  # by member index, members whose process was not reaped
        self._placed: dict[int, RankConfig] = {}  # by member index, the config that each rank was started for
        self._ranks: dict[int, RankLoaded] = {}  # by member index, what each rank reported when it was ready
        self._first_loads = FirstLoads()
        self.classes = NumericClasses()
        self._restarts: Counter[int] = Counter()
        self._losses = Losses(leave_s=plan.ranks[0].wait_timeout_s / plan.num_stages)  # as for one stage
        self._rank_indices = range(len(plan.ranks))  # the member index of a rank is its number in the replica

    @property
    def members(self) -> list[Member]:
        """The members, also those that have ended and are not reaped yet."""
        return list(self._members.values())

    @property
    def _plan(self) -> LaunchPlan:
        """What runs where in the present epoch; once the next epoch is settled, in the next one."""
        return self._layout.plan

    @property
    def have_loaded(self) -> bool:
        """Whether all ranks have loaded their weights, and the core has loaded its draft model, if any."""
        return all(self._members[index].has_loaded for index in _loading(self._plan, self._members))

    @property
    def is_whole(self) -> bool:
        """Whether no member is lost, and a step has crossed all stages since the last loss."""
        return self._losses.is_whole

    def start(self) -> None:
        """Start the processes of all members, without waiting; ranks first, because they take longest."""
        for index in (*self._rank_indices, CORE):
            self._fill(index)

    def begin(self) -> None:
        """Begin the first epoch: hand all members the ends of their connections."""
        self._hand_endpoints()

    def take(self, member: Member, event: child_process.StatusEvent) -> None:
        """Handle a status event of a member, such as that it has loaded or why it has left the epoch."""
        if isinstance(event, child_process.Ready):
            if event.rank is not None:
                self._ranks[member.member_index] = event.rank
            is_present = event.epoch == self._losses.epoch and self._losses.missing is None
            if member.stage is None and is_present and event.epoch > 0:
                self._note_recovery(event)
        elif isinstance(event, child_process.Abandoned):
            self._losses.leave(event.epoch, event.error, member.member_index, leave_s=event.leave_s)
        elif isinstance(event, child_process.LinkExchanged):
            self._wiring.release_link(event.epoch, event.number)
        elif isinstance(event, child_process.LoadProgressed):
            self._reporter.report(_progress(self._plan.ranks[member.member_index], event))
        elif isinstance(event, child_process.TensorsRead):
            self._first_loads.add(event.digests)
        elif isinstance(event, child_process.LinkJudged):
            self._reporter.report(link_speed_report(event))
        elif isinstance(event, child_process.WeightsLoaded):
            self._first_loads.identify(member.member_index, event.identity)
            self._reporter.report(_has_loaded(self._plan.ranks[member.member_index], member, event))

    def _note_recovery(self, event: child_process.Ready) -> None:
        """Report that a step has crossed the pipe again, with notes on the numeric classes of the ranks."""
        seconds = self._losses.recovered(time.monotonic())
        notes = self.classes.settle(self._plan.ranks, event.numeric_classes)
        replica = self._plan.core.replica
        self._reporter.report(Recovered(replica=replica, epoch=event.epoch, seconds=seconds, notes=notes))

    def recover(self) -> None:
        """End the epoch if a member is lost or has left it; begin the next one when it is due."""
        losses, has_ended = self._losses, self._has_ended()
        if losses.causes and not has_ended:
            self._await_culprit()
        if losses.causes or has_ended:
            time.sleep(COMPANY_S)
            self._end_epoch()
        for text in self._layout.look():
            self._reporter.report(Notice(text=text))
        if losses.is_due(time.monotonic()) and self._is_settled() and self._have_ways():
            try:
                self._begin_epoch()
            except (OSError, PenstockError) as error:
                # There is no memory, or a host or a file has gone: a later try may work.
                self._lose(PeerError(f"no new epoch can begin: {error}.").info(), {})
        core = self._members.get(CORE)
        if core is not None and core.is_ready:  # one that waits for ranks would take this for the epoch's end
            self._layout.tell(core)

    def keep_standbys(self, now: float) -> None:
        """Start, check and end standby ranks; call it at least every second (`now`: `time.monotonic`)."""
        ranks = self._plan.ranks if self.is_whole else []
        self._standbys.tend(now, ranks, self._ranks, self._replacement)

    def exchange_link(self, sender: RankAddress, receiver: RankAddress, first_step: int = 0) -> None:
        """Replace the link between two ranks in the present epoch, from `first_step` or a later step on."""
        assert self.is_whole, "lost ranks rejoin in another epoch"
        exchange = self._wiring.exchange_link(sender, receiver, first_step)
        for index, rank in enumerate(self._plan.ranks):
            if (end := exchange.ends.get((rank.stage, rank.tp_rank))) is not None:
                self._members[index].hand(end)
        exchange.connection.delivered()
        # The core last: both ranks must have been handed their ends when it orders the exchange.
        self._members[CORE].hand(ExchangeLink(exchange.order))

    def kill_hung(self) -> None:
        """Kill ranks that have not left the epoch that is over in time; they count as lost."""
        ready = {index for index, member in self._members.items() if index != CORE and member.is_ready}
        away = {index for index in ready if self._members[index].is_away}
        for index in self._losses.hung(ready, time.monotonic(), away):
            self.kill(self._members[index], f"has not left epoch {self._losses.epoch - 1}")

    def kill_slow_loaders(self) -> None:
        """Kill ranks that have not loaded within the load timeout: their disk or file server may hang."""
        limit_s, now = self._plan.core.parallel.load_timeout_s, time.monotonic()
        for index, member in self._members.items():
            if index != CORE and not member.has_loaded and now - member.started_at > limit_s:
                self.kill(member, f"had not loaded after {limit_s:g} s")

    def kill(self, member: Member, reason: str) -> None:
        """Kill a process that does not react; before, it and all members print where their threads are."""
        for each in {*self.members, member}:
            if each.has_spoken:  # only then it has set up the signal that prints the threads
                each.show_threads()
                time.sleep(DUMP_S)  # one after the other, so that what they print does not mix
        member.kill(reason)

    def stop_all(self) -> None:
        """Tell all members to leave, without waiting for it; those that are not ready yet are killed."""
        for member in self._members.values():
            member.hand(Stop())
            if not member.is_ready:
                member.kill_now()  # it still loads, and takes no orders meanwhile

    def close(self) -> None:
        """Close all connections and end the standbys; the members are ended by `MemberWatch`."""
        self._wiring.close()
        self.client.close()
        self._standbys.close()

    def startup_notices(self) -> Iterator[Notice | StageReady]:
        """Yield notes on what was decided for the user, and an event for each rank, once all are ready."""
        return _startup_notices(self._plan, self._ranks, self._members, self.classes)

    def _fill(self, index: int) -> None:
        """Start the process of one member."""
        member = self._start_core() if index == CORE else self._start_rank(index)
        self._members[index] = self._watch.add(member)

    def _start_core(self) -> Member:
        core = self._plan.core
        return self._hosts.head.start_core(core, self.client, of_replica(core.replica, "core"), CORE)

    def _start_rank(self, index: int) -> Member:
        rank = self._placed[index] = self._plan.ranks[index]
        if (standby := self._standbys.take(rank, index)) is not None:
            return standby
        if self._losses.epoch > 0:
            rank = self._replacement(index)
        return self._hosts[rank.host].start_rank(rank, of_replica(rank.replica, rank.name), index)

    def _replacement(self, index: int) -> RankConfig:
        return _replacement(self._plan.ranks[index], self._ranks.values(), self._first_loads.of(index))

    def _hand_endpoints(self) -> None:
        """Hand all members the endpoints at which they meet in this epoch."""
        restarts = Restarts(stages=[0] * self._plan.num_stages, core=self._restarts[CORE])
        for index, rank in enumerate(self._plan.ranks):
            restarts.stages[rank.stage] += self._restarts[index]
        self._members[CORE].hand(msgspec.structs.replace(self._wiring.core(), restarts=restarts))
        for index, rank in enumerate(self._plan.ranks):
            self._members[index].hand(self._wiring.rank(rank.stage, rank.tp_rank))
        self._wiring.delivered()

    def _await_culprit(self) -> None:
        """Wait for the end of the member because of which another has left the epoch."""

        def has_ended() -> bool:
            for member in self.members:
                if member.failure is not None:  # it has reported its failure, and is about to exit
                    member.kill_now()
            return self._has_ended() or not self._are_hosts_there()

        self._watch.hear_until(has_ended, CAUSE_GRACE_S)

    def _end_epoch(self) -> None:
        """End the epoch for all members; those that have ended are started again, maybe after a pause."""
        ended = self._ended()
        guilty = ended[max(ended)] if ended else None  # a rank rather than the core, whose index is -1
        cause = self._watch.first_cause(guilty, self.members) if guilty else first_cause(self._losses.causes)
        self._lose(cause, self._ended())  # finding the cause may have taken a while

    def _is_settled(self) -> bool:
        """Return whether it is decided where the next epoch runs; if it can run nowhere, requests end."""
        loaded = {index for index, member in self._members.items() if index != CORE and member.has_loaded}
        settlement = self._layout.settle(self._ranks, loaded)
        for text in settlement.notes:
            self._reporter.report(Notice(text=text))
        if settlement.refusal is not None and CORE in self._members:  # each time: requests may have come
            self._members[CORE].hand(EpochLost(settlement.refusal, "all"))
        return settlement.is_settled

    def _have_ways(self) -> bool:
        """Return whether paths between hosts are known; check them first if no member is to start anew."""
        routes = self._hosts.routes
        names = {self._hosts.head.name, *(rank.host for rank in self._plan.ranks)}
        if self._losses.missing or any(self._has_moved(index) for index in self._members):
            return routes.is_settled(names)
        return routes.review((self._plan.core.replica, self._losses.epoch), names)

    def _has_ended(self) -> bool:
        """Return whether any member has ended."""
        return any(member.exit_code is not None for member in self.members)

    def _are_hosts_there(self) -> bool:
        """Return whether all hosts of ranks are connected; without a host links break, but ranks may live."""
        return all(self._hosts[rank.host].is_there for rank in self._placed.values())

    def _ended(self) -> dict[int, Member]:
        """Return the members that have ended, by member index, after all their reports were taken."""
        ended = {index: member for index, member in self._members.items() if member.exit_code is not None}
        for member in ended.values():
            self._watch.hear(member)
        return ended

    def _lose(self, cause: ErrorInfo, ended: Mapping[int, Member]) -> None:
        losses, epoch = self._losses, self._losses.epoch
        places = {CORE, *self._rank_indices}
        lost = (places - set(self._members)) | set(ended)
        failures = [(member.end(), member.trace) for member in ended.values()]
        pause_s = losses.end(lost, time.monotonic())
        self._reporter.report(
            StageLost(
                error=cause,
                others=[failure.message for failure, _ in failures if failure != cause],
                trace="".join(trace for failure, trace in failures if failure.code == "internal_error"),
                replica=self._plan.core.replica,
                epoch=epoch,
                restarts=[self._plan.ranks[index].name for index in sorted(lost - {CORE})],
                restarts_core=CORE in lost,
                retry_s=pause_s,
            )
        )
        # The core gets the cause before its connections end, since their end alone does not tell it why.
        if CORE not in lost:
            self._members[CORE].hand(EpochLost(cause, "started" if losses.is_repeated else "none"))
        self._wiring.end()
        for index in ended:
            self._bury(index)

    def _begin_epoch(self) -> None:
        """Start the members that are missing or have another place, and connect all members anew."""
        moved = {index for index in self._members if self._has_moved(index)}
        for index in moved:
            self._members[index].kill_now()
        for index in moved:
            self._bury(index)
        self._losses.give_up(moved)
        missing = self._losses.begin()
        for index in missing:
            self._fill(index)
            self._restarts[index] += 1
        self._wiring = Wiring(self._plan, self._hosts, self._losses.epoch)
        self._hand_endpoints()

    def _has_moved(self, index: int) -> bool:
        """Return whether a rank has another place in the plan than it was started at."""
        return index != CORE and not _is_same_place(self._placed[index], self._plan.ranks[index])

    def _bury(self, index: int) -> None:
        self._watch.reap(self._members.pop(index))


def begin_together(replicas: Sequence[PipelineProcesses]) -> bool:
    """Begin the first epoch of all replicas if all have loaded their weights; return whether they have.

    How much memory is free for KV caches is known only when all weights are loaded.
    """
    have_loaded = all(replica.have_loaded for replica in replicas)
    if have_loaded:
        for replica in replicas:
            replica.begin()
    return have_loaded


def _loading(plan: LaunchPlan, indices: Iterable[int]) -> list[int]:
    """Return the indices of members that load weights, and of the core if its drafting process does."""
    return [index for index in indices if index != CORE or plan.core.drafter is not None]


def _startup_notices(
    plan: LaunchPlan,
    ranks: Mapping[int, RankLoaded],
    members: Mapping[int, Member],
    classes: NumericClasses,
) -> Iterator[Notice | StageReady]:
    kernels = dict.fromkeys(rank.kernels for rank in ranks.values())
    texts = [*plan.notes, *(f"kernels: {description}" for description in kernels)]
    texts += classes.settle(plan.ranks, [ranks[index].numeric_class for index in range(len(plan.ranks))])
    yield from (Notice(text=text) for text in texts)
    num_blocks = min((rank.max_blocks for rank in ranks.values()), default=0)
    for index, config in enumerate(plan.ranks):
        rank = ranks[index]
        yield StageReady(
            **_named(config),
            process=members[index].identity,
            parts=rank_parts(config),
            tensor_bytes=rank.tensor_bytes,
            num_blocks=num_blocks,
            kv_bytes=num_blocks * rank.block_bytes,
            peak_bytes=rank.peak_bytes,
            margin_bytes=rank.margin_bytes,
            stranded_bytes=stranded_bytes(rank.max_blocks, num_blocks, rank.block_bytes),
        )


def _named(rank: RankConfig) -> dict[str, Any]:
    """Return the fields of an event that say which rank it is about."""
    tp_rank = rank.tp_rank if rank.tp_size > 1 else None
    return {"replica": rank.replica, "stage": rank.stage, "tp_rank": tp_rank}


def _progress(rank: RankConfig, event: child_process.LoadProgressed) -> LoadProgress:
    return LoadProgress(**_named(rank), done_bytes=event.done, total_bytes=event.total, what=event.what)


def _has_loaded(rank: RankConfig, member: Member, event: child_process.WeightsLoaded) -> StageLoaded:
    return StageLoaded(
        **_named(rank), process=member.identity, bytes_read=event.bytes_read, seconds=event.seconds
    )


def _is_same_place(one: RankConfig, other: RankConfig) -> bool:
    """Return whether two configs of a rank differ in its links at most, which each epoch makes anew."""
    return one == msgspec.structs.replace(other, link_frames=one.link_frames)


def _replacement(rank: RankConfig, ranks: Iterable[RankLoaded], first_load: FirstLoad) -> RankConfig:
    """Return the config of a rank that is started again.

    It is the rank's config in the present plan, but the number of KV blocks is settled, since other ranks
    keep their KV caches; no other rank loads beside it; and no fault of a test is set off again. The weights
    that it reads must be those of the first load. (An output layer that is tied to the embedding is sent down
    the pipe in every epoch anyway.)
    """
    num_blocks = min(message.max_blocks for message in ranks)
    return msgspec.structs.replace(
        rank, num_blocks=num_blocks, num_sharers=1, faults=[], first_load=first_load
    )
