"""Starts ranks beside a running pipe: they load their weights, and wait for a place in it.

    none ────the pipe has been whole for a while──▶ loading ──WeightsLoaded──▶ waiting ──take──▶ a member
      ▲                                                │                          │
      └─────────── it has ended, or its place is another one now ◀────────────────┘

A standby is a process like that of any rank, for the same layers and with the same checks of what it reads;
it is handed no endpoints. A rank that is lost is then replaced without reading weights. It costs the memory
of the weights a second time, so that there are none unless the user asks for them. Decides when;
`RankHost.start_rank` does it, on whatever host the rank is for. Used by
`engine.supervisor.pipeline_processes`, in the supervisor's thread.
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

WHOLE_S = 10.0  # without a loss, before one is started
KEEP_FREE_BYTES = 2 << 30  # of the host's memory, beyond the weights of the standby


class StandbyRanks(Protocol):
    """The standbys of one replica: ranks that have loaded their weights and wait beside the pipe."""

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
            ranks: of the pipe; none while it is not whole.
            loaded: what they have reported when they had loaded, by number.
            config_of: makes the config of the process that may replace a rank, by number.
        """
        ...

    def take(self, rank: RankConfig, member_index: int) -> Member | None:
        """Return the standby of this rank, if it has loaded, as the member with this index; else None."""
        ...

    def close(self) -> None:
        """End the processes of all standbys."""
        ...


class NoStandbys:
    """The null `StandbyRanks`: a rank that replaces a lost one reads its weights again."""

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
    rank: RankConfig  # for whom, as the pipe knows that rank
    member: Member
    was_announced: bool = False


class Standbys:
    """Keeps a standby for each rank of some stages.

    Args:
        hosts: by name.
        stages: numbers of the stages whose ranks have one.
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

        Implements `StandbyRanks.tend`. They are started once the pipe has been whole for `WHOLE_S`, where the
        host has memory to spare.
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
        """Return the standby of this rank, if it has loaded, as the member with this index; else None.

        Implements `StandbyRanks.take`.
        """
        standby = self._of(rank)
        if standby is None:
            return None
        # Heard first: it may have loaded, or ended, since the last look.
        standby.member.read_status()
        if not standby.member.has_loaded or standby.member.exit_code is not None:
            return None  # its end is seen to by `tend`
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
        """Return whether the rank's host can spare the memory; that of a GPU is not looked at."""
        host = self._hosts[rank.host]
        if not host.is_there:
            return False
        needed = loaded.tensor_bytes if rank.device_type == "cpu" else 0
        return host.resources().free_bytes >= needed + KEEP_FREE_BYTES

    def _start(self, rank: RankConfig, config: RankConfig, now: float) -> None:
        name = f"{_name(rank)} standby"
        try:
            self._standbys.append(_Standby(rank, self._hosts[rank.host].start_rank(config, name, -1)))
        except OSError:  # no descriptors, no memory: later
            self._whole_since = now

    def _hear(self, standby: _Standby, now: float) -> None:
        """Take what a standby has said; one that has ended is removed, and tried again after a while."""
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
    """Return what keeps standbys for the ranks of these stages; without stages, what keeps none."""
    return Standbys(hosts, stages, reporter) if stages else NO_STANDBYS


def _name(rank: RankConfig) -> str:
    return of_replica(rank.replica, rank.name)
