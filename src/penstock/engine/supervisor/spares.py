"""Decides when a host starts a spare process for a rank that may be lost: once all ranks serve.

A rank that takes over a spare process saves the time to start an interpreter and to import. An engine that
lives only for a moment never starts a spare. After a loss, the next spare is started soon after a step has
crossed the pipe, since another loss may follow; its imports run with low priority. Hosts without stages,
which could take some, keep a spare too. This module decides when. The host decides what a spare is and
whether there is memory for one (`RankHost.keep_spare`). Used by `engine.supervisor.supervisor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from penstock.engine.supervisor.reports import Reporter, SpareReady
from penstock.hosts.rank_host import RankHost
from penstock.process.config import RankConfig
from penstock.process.rhythm import next_beat

WHOLE_S = 10.0  # so long the engine has to be whole before the first spares are started
WHOLE_AGAIN_S = 1.0  # so long it has to be whole before spares are started after a loss
LOOK_EVERY_S = 1.0
LOOK_READY_S = 5.0  # between looks at a ready spare, which may have died, or memory may have become short


class Spares:
    """Keeps the spare processes, one on each host that has ranks or stands by to get some.

    Args:
        hosts: all hosts, by name; more may join later.
        ranks: ranks of all replicas; empty: no spares are kept.
        reporter: gets an event when a spare is ready.
    """

    def __init__(
        self, hosts: Mapping[str, RankHost], ranks: Iterable[RankConfig], reporter: Reporter
    ) -> None:
        self._hosts = hosts
        self._threads: dict[str, int] = {}  # for each host, the most threads that one of its ranks has
        for rank in ranks:
            self._threads[rank.host] = max(rank.threads, self._threads.get(rank.host, 0))
        self._reporter = reporter
        self._ready: set[str] = set()  # hosts whose spare is ready and was reported
        self._whole_since: float | None = None
        self._patience_s = WHOLE_S
        self._looked_at: dict[str, float] = {}  # when each host was looked at, while the engine is whole

    def tend(self, now: float, *, is_whole: bool) -> None:
        """Start and check the spares; to be called at least every second.

        Args:
            now: monotonic seconds.
            is_whole: all ranks serve; otherwise nothing is done.
        """
        if not is_whole:
            self._whole_since = None
            self._looked_at.clear()
            return
        if self._whole_since is None:
            self._whole_since = now
        if now - self._whole_since < self._patience_s:
            return
        self._patience_s = WHOLE_AGAIN_S
        most = max(self._threads.values(), default=0)
        for name, host in self._hosts.items():
            if most and host.is_there and now >= self._next_look(name):
                self._looked_at[name] = now
                self._keep(host, self._threads.get(name, most))

    def _next_look(self, host: str) -> float:
        period_s = LOOK_READY_S if host in self._ready else LOOK_EVERY_S
        return next_beat(self._looked_at.get(host, -math.inf), period_s)

    def _keep(self, host: RankHost, threads: int) -> None:
        try:
            own_bytes = host.keep_spare(threads)
        except OSError:  # there are no descriptors or no memory; a later try may work
            own_bytes = 0
        if own_bytes and host.name not in self._ready:
            self._reporter.report(SpareReady(host=host.name, own_bytes=own_bytes))
        (self._ready.add if own_bytes else self._ready.discard)(host.name)
