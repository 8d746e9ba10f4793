"""Decides on which hosts the next epoch of a pipeline runs, and which lost hosts are still waited for.

    all are there ──a host is lost──▶ it is waited for ──it is back──▶ over the hosts of before
                                        │        └──another host can take its place──▶ over that one too
                                        └──the time is over──▶ over those that are there

It is told which hosts are there and what time it is, and knows no host and no clock. Used by
`engine.supervisor.pipe_layout`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

RETURN_S = 1.0  # in which a host is back whose connection broke, sooner than another one has its stages


class HostChoice:
    """Chooses the hosts of one pipeline for each epoch, the time until a process of it is lost.

    Args:
        names: names of the hosts that the first epoch runs on; so many are to serve together.
        rejoin_timeout_s: seconds for which each of them is waited for when it is lost.
        of_others: names of the hosts of other replicas, which take over only where no other host is left.

    Attributes:
        laid_over: names of the hosts of the present epoch, or between two of the last one.
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
        """The names of the pipeline's hosts that were not connected at the last look."""
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
        """Return the names of the hosts that the next epoch is to run on; none while a host is waited for.

        Hosts that come back while the pipeline serves without them are among them. Where more are connected
        than serve together, those of the present pipeline go before the others.

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
