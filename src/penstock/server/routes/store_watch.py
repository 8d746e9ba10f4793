"""Writes to the log when the KV store fails and when it works again: requests only see cache misses.

Reads the numbers of the engine once a second; see `kvstore.guard` for what counts as a failure.
"""

from __future__ import annotations

import asyncio

from penstock.engine.stats import CoreStats
from penstock.server.engine_port import EngineLike
from penstock.server.http.keep_alive import Clock
from penstock.server.http.request_log import RequestLog

LOOK_S = 1.0
QUIET_S = 60.0  # after a line on failures; later failures wait so long for the next line, which counts them


class StoreWatch:
    def __init__(self, log: RequestLog, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._told = (0, 0)  # numbers of failed calls and of bad records that the log has
        self._num_off = 0  # processes that do not use the store, at the last look
        self._quiet_until = clock()

    def look(self, stats: CoreStats | None) -> None:
        """Log new failures of the KV store, or that all processes use it again.

        If a further process stops using it, that is logged at once.
        """
        if stats is None:
            return
        counts, num_off = (
            (stats.store.use.call_failures, stats.store.use.verify_failures),
            stats.store.use.switched_off,
        )
        now = self._clock()
        if num_off > self._num_off or (counts != self._told and now >= self._quiet_until):
            failed_calls, bad_records = (
                new - reported for new, reported in zip(counts, self._told, strict=True)
            )
            self._log.warning(
                "KV store fails",
                failed_calls=failed_calls,
                bad_records=bad_records,
                processes_without_it=num_off,
                error=stats.store.use.failure,
            )
            self._told, self._quiet_until = counts, now + QUIET_S
        elif num_off == 0 < self._num_off:
            self._log.event("KV store is in use again")
        self._num_off = num_off

    async def run(self, engine: EngineLike) -> None:
        """Look once a second until cancelled."""
        while True:
            self.look(engine.status().stats)
            await asyncio.sleep(LOOK_S)
