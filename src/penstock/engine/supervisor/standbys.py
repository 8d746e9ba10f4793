"""Starts ranks beside a running pipe: they load their weights, and wait for a place in it.

    none ────the pipe has been whole for a while──▶ loading ────▶ has loaded ──take──▶ a rank of the pipe
      ▲                                                │                │
      └──── it has ended, or the rank that it stands for has moved ◀────┘

The pipe is *whole* while all of its ranks are connected and serve. A standby is a process like that of the
rank that it stands for, with the same layers and the same checks of what it reads; only endpoints are not
handed to it. If the rank is lost, the standby replaces it without reading weights. It costs the memory of the
weights a second time, so there are no standbys unless a program asks for them (`standby_stages` of the
supervisor; there is no flag so far). This module decides when; `RankHost.start_rank` starts the process on
the rank's host. Used by `engine.supervisor.pipeline_processes`, in the supervisor's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.batch import RankLoaded
from penstock.engine.supervisor.reports import Notice, Reporter, of_replica
from penstock.hosts.member import Member
from penstock.hosts.rank_host import RankHost
from penstock.process.config import RankConfig

WHOLE_S = 10.0  # how long the pipe must have been whole before a standby is started
KEEP_FREE_BYTES = 2 << 30  # of the host's memory, once the standby has its weights


class StandbyRanks(Protocol):
    """The standbys of one replica: ranks that load their weights, and then wait beside the pipe."""

    def tend(
        self,
        now: float,
        ranks: Sequence[RankConfig],
        loaded: Mapping[int, RankLoaded],
        config_of: Callable[[int], RankConfig],
    ) -> None:
        """Start, check and end the standbys; to be called at least every second.

        Args:
            now: monotonic seconds.
            ranks: ranks of the pipe; empty while it is not whole.
            loaded: what each rank reported when it had loaded, by the rank's number.
            config_of: makes the config of a process that may replace a rank, from the number of the rank.
        """
        ...

    def take(self, rank: RankConfig, member_index: int) -> Member | None:
        """Return this rank's standby if it has loaded, now with the rank's name and number; else None."""
        ...

    def close(self) -> None:
        """End the processes of all standbys."""
        ...


class NoStandbys:
    """`StandbyRanks` that keeps none: a rank that replaces a lost one reads its weights again."""

    def tend(
        self,
        now: float,
        ranks: Sequence[RankConfig],
        loaded: Mapping[int, RankLoaded],
        config_of: Callable[[int], RankConfig],
    ) -> None:
        """Do nothing, since no standbys are kept."""

    def take(self, rank: RankConfig, member_index: int) -> Member | None:
        return None

    def close(self) -> None:
        """Do nothing, since no standbys are kept."""


NO_STANDBYS = NoStandbys()


@dataclass(slots=True, eq=False)
class _Standby:
    rank: RankConfig  # config of the rank that it stands for, as the layout of the pipe has it
    member: Member
    was_announced: bool = False


class Standbys:
    """Keeps a standby for each rank of some stages.

    Args:
        hosts: all hosts, by name.
        stages: numbers of the stages whose ranks get a standby.
        reporter: gets notices about standbys.
    """

    def __init__(self, hosts: Mapping[str, RankHost], stages: Collection[int], reporter: Reporter) -> None:
        self._hosts = hosts
        self._stages = stages
        self._reporter = reporter
        self._standbys: list[_Standby] = []
        self._whole_since: float | None = None

    def tend(
        self,
        now: float,
        ranks: Sequence[RankConfig],
        loaded: Mapping[int, RankLoaded],
        config_of: Callable[[int], RankConfig],
    ) -> None:
        """Start, check and end the standbys; to be called at least every second.

        Implements `StandbyRanks.tend`. Standbys are started once the pipe has been whole for `WHOLE_S`, on
        hosts that have memory to spare.
        """
        for standby in [*self._standbys]:
            self._hear(standby, now)
        if not ranks:
            self._whole_since = None
            return
        if self._whole_since is None:
            self._whole_since = now
        for standby in [each for each in self._standbys if each.rank not in ranks]:
            self._end(standby)
        if now - self._whole_since < WHOLE_S:
            return
        for index, rank in enumerate(ranks):
            if rank.stage in self._stages and self._of(rank) is None and self._has_room(rank, loaded[index]):
                self._start(rank, config_of(index), now)

    def take(self, rank: RankConfig, member_index: int) -> Member | None:
        """Return this rank's standby if it has loaded, now with the rank's name and number; else None.

        Implements `StandbyRanks.take`.
        """
        standby = self._of(rank)
        if standby is None:
            return None
        # Its reports are read first: it may have loaded, or ended, since the last look.
        standby.member.read_status()
        if not standby.member.has_loaded or standby.member.exit_code is not None:
            return None  # `tend` removes a standby that has ended
        self._standbys.remove(standby)
        standby.member.begin_as(_name(rank), rank.stage, member_index)
        self._say(rank, "takes over, with its weights in memory")
        return standby.member

    def close(self) -> None:
        """End the processes of all standbys."""
        for standby in [*self._standbys]:
            self._end(standby)

    def _of(self, rank: RankConfig) -> _Standby | None:
        return next((standby for standby in self._standbys if standby.rank == rank), None)

    def _has_room(self, rank: RankConfig, loaded: RankLoaded) -> bool:
        """Return whether the rank's host can spare the memory; memory of a GPU is not looked at."""
        host = self._hosts[rank.host]
        if not host.is_there:
            return False
        needed = loaded.tensor_bytes if rank.device_type == "cpu" else 0
        return host.resources().free_bytes >= needed + KEEP_FREE_BYTES

    def _start(self, rank: RankConfig, config: RankConfig, now: float) -> None:
        name = f"{_name(rank)} standby"
        try:
            self._standbys.append(_Standby(rank, self._hosts[rank.host].start_rank(config, name, -1)))
        except OSError:  # there are no descriptors or no memory: it is tried again after `WHOLE_S`
            self._whole_since = now

    def _hear(self, standby: _Standby, now: float) -> None:
        """Take the reports of a standby; one that has ended is removed, and started again after a while."""
        standby.member.read_status()
        if standby.member.exit_code is not None:
            self._say(standby.rank, f"has ended: {standby.member.end().message}")
            self._end(standby)
            self._whole_since = now
        elif standby.member.has_loaded and not standby.was_announced:
            standby.was_announced = True
            self._say(standby.rank, "has loaded its weights and is ready")

    def _end(self, standby: _Standby) -> None:
        self._standbys.remove(standby)
        standby.member.kill_now()
        standby.member.close()

    def _say(self, rank: RankConfig, what: str) -> None:
        self._reporter.report(Notice(text=f"the standby of {_name(rank)} on {rank.host} {what}."))


def standbys_of(stages: Collection[int], hosts: Mapping[str, RankHost], reporter: Reporter) -> StandbyRanks:
    """Return the keeper of standbys for the ranks of these stages; without stages, one that keeps none."""
    return Standbys(hosts, stages, reporter) if stages else NO_STANDBYS


def _name(rank: RankConfig) -> str:
    return of_replica(rank.replica, rank.name)
