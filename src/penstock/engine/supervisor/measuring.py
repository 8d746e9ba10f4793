"""Starts the processes that measure ranks, each on its host, and gathers what they report.

Called by `engine.supervisor.auto_partition`. The processes end with the thread that calls `measure`, which
has ended them all when it returns or raises. Each loads at its own pace; timing begins when all have loaded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from penstock.errors import WaitTimeoutError, error_from_info
from penstock.hosts.connections import Connection, Place, connect
from penstock.hosts.member import Member
from penstock.hosts.member_watch import MemberWatch
from penstock.hosts.rank_host import Hosts, MeetingNeed
from penstock.planner.stage_costs import StageCosts
from penstock.process.child import Measured, StatusEvent
from penstock.process.config import MeasureConfig, RankConfig
from penstock.process.control import BeginMeasuring
from penstock.process.endpoints import MeetingEndpoint
from penstock.trust.peer_names import rank_role

LOOK_S = 1.0  # the longest wait without a message to other hosts, which shows them that the head lives
TIMEOUT_S = 900.0  # for the measurements, once all have loaded; a rank that dies is noticed at once


def measure(
    configs: Sequence[MeasureConfig],
    hosts: Hosts,
    load_timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[StageCosts]:
    """Measure how long steps take on each rank, and return the costs of the ranks, in order.

    A process for each rank is started on its host; all have ended when this returns or raises.

    Args:
        load_timeout_s: seconds for the ranks to get their weights and to load them.
        clock: monotonic seconds.

    Raises:
        StageLostError: a measuring process ended without a report.
        WaitTimeoutError: the measurements were not done in time.
        PenstockError: the error that a measuring process has reported.
    """
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(contextlib.closing(_Fleet(hosts, clock)))
        meetings = _meetings([config.rank for config in configs], hosts, stack)
        members = [fleet.start(config) for config in configs]
        fleet.await_loaded(members, load_timeout_s)
        for config, member in zip(configs, members, strict=True):
            member.hand(BeginMeasuring(_meeting_of(config.rank, meetings)))
        fleet.await_costs(members)
        return [fleet.costs[member] for member in members]


def _meetings(
    ranks: Sequence[RankConfig], hosts: Hosts, closing: contextlib.ExitStack
) -> dict[int, Connection]:
    """Return the meeting of each stage that has several ranks, by the number of the stage."""
    meetings = {}
    for first in ranks:
        if first.tp_size > 1 and first.tp_rank == 0:
            own = [
                Place(hosts[rank.host], rank_role(number))
                for number, rank in enumerate(ranks)
                if rank.stage == first.stage
            ]
            meetings[first.stage] = connect(MeetingNeed(num_ranks=first.tp_size), 0, *own)
            closing.callback(meetings[first.stage].close)
    return meetings


def _meeting_of(rank: RankConfig, meetings: dict[int, Connection]) -> MeetingEndpoint | None:
    if rank.stage not in meetings:
        return None
    meeting = meetings[rank.stage]
    endpoint: MeetingEndpoint = [meeting.accepting, *meeting.joining][rank.tp_rank]
    return endpoint


class _Fleet:
    """The measuring processes.

    Args:
        clock: monotonic seconds.

    Attributes:
        costs: the costs that processes have reported when they were done.
    """

    def __init__(self, hosts: Hosts, clock: Callable[[], float]) -> None:
        self.costs: dict[Member, StageCosts] = {}
        self._hosts = hosts
        self._clock = clock
        self._watch = MemberWatch(self._take)

    def start(self, config: MeasureConfig) -> Member:
        rank = config.rank
        return self._watch.add(
            self._hosts[rank.host].start_measuring(config, f"the measuring of {rank.name}")
        )

    def await_loaded(self, members: Sequence[Member], limit_s: float) -> None:
        """Wait until all have loaded."""
        deadline = self._clock() + limit_s
        while slow := [member.name for member in members if not member.is_ready]:
            if not self._hear(deadline):
                raise WaitTimeoutError(
                    f"{' and '.join(slow)} had not loaded after {limit_s:g} s.",
                    remedy="Raise --load-timeout; it includes the time to fetch weights from another host.",
                )

    def await_costs(self, members: Sequence[Member]) -> None:
        """Wait until all have measured."""
        deadline = self._clock() + TIMEOUT_S
        while len(self.costs) < len(members):
            if not self._hear(deadline):
                raise WaitTimeoutError(
                    f"the stages could not be measured in {TIMEOUT_S:g} s.",
                    remedy="Set the layers of each stage with --partition, or stop other work on the hosts.",
                )

    def _hear(self, deadline: float) -> bool:
        """Wait for reports and take them; return False if there were none and the deadline has passed."""
        remaining = deadline - self._clock()
        news, _ = self._watch.wait(min(LOOK_S, max(0.0, remaining)))
        self._hosts.tend(self._clock())
        self._take_news(news)
        return bool(news) or remaining > 0

    def _take_news(self, news: Collection[Member]) -> None:
        for member in news:
            has_ended = member.exit_code is not None  # asked first: then all its reports are in the pipe
            self._watch.hear(member)
            if has_ended:
                self._bury(member)

    def _take(self, member: Member, event: StatusEvent) -> None:
        if isinstance(event, Measured):
            self.costs[member] = msgspec.json.decode(event.costs, type=StageCosts)

    def _bury(self, member: Member) -> None:
        if member.failure is not None or member not in self.costs:
            raise error_from_info(member.end())
        self._watch.reap(member)

    def close(self) -> None:
        """End the processes that are left."""
        self._watch.close()
