"""Decides on which hosts the next epoch of a pipeline runs, and which lost hosts are still waited for.

    all are there ──a host is lost──▶ it is waited for
        it is back ───────────────────────────────────────────────▶ epoch on the same hosts
        `RETURN_S` is over, and as many hosts are there as at first ──▶ epoch on as many of them
        `rejoin_timeout_s` is over ───────────────────────────────▶ epoch on the hosts that are there

The caller says which hosts are connected and what time it is. This module talks to no host and reads no
clock. Used by `engine.supervisor.pipe_layout`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

RETURN_S = 1.0  # a host that lost only its connection is usually back by then; others must load stages first


class HostChoice:
    """Chooses the hosts of one pipeline for each epoch; an epoch lasts until a process of it is lost.

    Args:
        names: names of the hosts that the first epoch runs on; later epochs run on at most as many.
        rejoin_timeout_s: seconds for which a lost host is waited for at most.
        of_others: names of the hosts on which other replicas of the model (pipelines) run. This pipeline uses
            them only if none of the remaining hosts is connected.

    Attributes:
        laid_over: names of the hosts of the present epoch; between two epochs, those of the last one.
    """

    def __init__(
        self, names: Collection[str], rejoin_timeout_s: float, of_others: Collection[str] = ()
    ) -> None:
        self.laid_over = tuple(names)
        self._num_wanted = len(names)
        self._rejoin_timeout_s = rejoin_timeout_s
        self._missing_since: dict[str, float] = {}
        self._of_others = frozenset(of_others)

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the pipeline's hosts that were missing at the last `look`, if no epoch began since."""
        return tuple(self._missing_since)

    def look(self, there: Collection[str], now: float) -> None:
        """Record which of the pipeline's hosts are missing now.

        Args:
            there: names of the hosts that are connected.
            now: monotonic seconds.
        """
        since = self._missing_since
        self._missing_since = {name: since.get(name, now) for name in self.laid_over if name not in there}

    def next_hosts(self, there: Sequence[str], now: float) -> tuple[str, ...]:
        """Return the names of the hosts that the next epoch is to run on.

        The result is empty while a host is waited for, and if no host is connected. Hosts that came back
        while the pipeline served without them are considered too. If more hosts that
        no other replica uses are connected than the first epoch had, those of the last epoch are taken first.

        Args:
            there: names of the hosts that are connected.
            now: monotonic seconds.
        """
        self.look(there, now)
        missing_s = [now - at for at in self._missing_since.values()]
        free = [name for name in there if name not in self._of_others]
        can_others_serve = len(free) >= self._num_wanted
        patience_s = min(RETURN_S, self._rejoin_timeout_s) if can_others_serve else self._rejoin_timeout_s
        if any(seconds < patience_s for seconds in missing_s):
            return ()
        candidates = free or there
        preferred = sorted(candidates, key=lambda name: name not in self.laid_over)[: self._num_wanted]
        return tuple(name for name in there if name in preferred)

    def lay_over(self, names: Sequence[str]) -> None:
        """Record that the next epoch begins on these hosts."""
        self.laid_over = tuple(names)
        self._missing_since.clear()
