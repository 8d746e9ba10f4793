"""Keeps a spare process on a host, which waits to become a rank (`rank.spare`).

    none ──keep, memory is free──▶ starting ──Warm──▶ waiting ──take──▶ a member like any other
      ▲                               │                  │                 ▲
      └──── it ended, or memory is short ◀───────────────┘                 │
    none ──start_ahead──▶ starting in haste ──────take, warm or not────────┘

Used by `hosts.local`; the supervisor says when (`engine.supervisor.spares`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from penstock.hosts.member import Member
from penstock.process.child import Warm, encode_config
from penstock.process.config import RankConfig, RankProcessConfig, SpareProcessConfig
from penstock.process.control import BecomeRank
from penstock.process.successor import SpareSelf

START_FREE_BYTES = 2 << 30  # a spare is started only with so much free memory; it takes a tenth of that
KEEP_FREE_BYTES = 1 << 29  # with less free memory the spare is ended
LEAST_NICE = 19  # the lowest priority, so that steps of ranks lose next to nothing to the imports


class StartSpare(Protocol):
    """A function that starts and returns a spare process; it raises OSError where the host cannot."""

    def __call__(self, config: SpareProcessConfig) -> Member: ...


class SpareProcess:
    """The spare process of a host, at most one: it has its imports done, and waits to become a rank.

    A rank starts sooner in it than in a new process.

    Args:
        start: starts a spare process.
        free_bytes: returns the bytes of host memory that are free now; with too few, there is no spare.
    """

    def __init__(self, start: StartSpare, free_bytes: Callable[[], int]) -> None:
        self._start = start
        self._free_bytes = free_bytes
        self._member: Member | None = None
        self._threads = 0  # the most threads of a rank that it was started for
        self._own_bytes = 0  # bytes of memory that it holds once it waits; 0: none waits
        self._is_hasty = False  # whether it was started at normal priority (`start_ahead`)

    def keep(self, threads: int) -> int:
        """Start a spare process if there is none, or end it if memory is short; call it every few seconds.

        Args:
            threads: the most threads that a rank of this host has.

        Returns:
            Bytes of memory that the process holds once it waits; 0 while none waits.
        """
        self._hear()
        free = self._free_bytes()
        if self._member is None and free >= START_FREE_BYTES:
            self._begin(threads, LEAST_NICE)
        elif free < KEEP_FREE_BYTES:
            self.close()
        return self._own_bytes

    def start_ahead(self, threads: int) -> None:
        """Start a spare process at normal priority, because a rank is about to need it.

        Do nothing if there is one already, or if memory is short.

        Args:
            threads: the most threads that the rank may have.
        """
        if self._member is None and self._free_bytes() >= START_FREE_BYTES:
            self._begin(threads, 0)

    def adopt(self, member: Member, own: SpareSelf) -> None:
        """Keep a spare process that an earlier worker on this machine has started, and that waits already.

        Args:
            member: the process.
            own: what the process has reported about itself.
        """
        self._member, self._threads, self._own_bytes = member, own.threads, own.own_bytes
        self._is_hasty = False

    def take(self, rank: RankConfig, name: str, member_index: int) -> Member | None:
        """Let the spare process become this rank, and return it; return None if none is fit for the rank.

        It is fit if it waits or was started ahead, and was started for at least as many threads.
        """
        self._hear()
        member = self._member
        is_soon_warm = self._own_bytes or self._is_hasty
        if member is None or not is_soon_warm or rank.threads > self._threads:
            return None
        config_fd = os.memfd_create("rank config")  # unlike a pipe, it takes a config of any length at once
        try:
            os.write(config_fd, encode_config(RankProcessConfig(rank=rank, parent_pid=os.getpid())))
            os.lseek(config_fd, 0, os.SEEK_SET)
            member.hand(BecomeRank(config_fd))
        finally:
            os.close(config_fd)
        member.begin_as(name, rank.stage, member_index)
        self._forget()
        return member

    def close(self) -> None:
        """Kill the spare process, if there is one."""
        if self._member is not None:
            self._member.kill_now()
            self._member.close()
        self._forget()

    def _begin(self, threads: int, nice: int) -> None:
        self._threads, self._is_hasty = threads, nice == 0
        config = SpareProcessConfig(threads=threads, nice=nice, parent_pid=os.getpid())
        self._member = self._start(config)

    def _hear(self) -> None:
        """Take the reports of the spare process, and forget the process if it has ended."""
        if self._member is None:
            return
        for event in self._member.read_status():
            if isinstance(event, Warm):
                self._own_bytes = event.own_bytes
        if self._member.exit_code is not None:
            self.close()

    def _forget(self) -> None:
        self._member, self._own_bytes = None, 0
