"""The server's one-second tick: pings on silent streams, and proof that the event loop is not stuck.

A ping is a comment, or an event that means nothing. One ticker serves all streams, so that a stream costs no
timer. Tests call `tick` with a clock of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from penstock.process.rhythm import next_beat

Clock = Callable[[], float]

TICK_S = 1.0
STUCK_S = 2.0


class PingableStream(Protocol):
    last_sent_at: float

    def ping(self) -> None:
        """Send a ping now, unless something is being sent."""


class KeepAlive:
    """Sends pings on silent streams, and knows whether the event loop turns.

    Args:
        clock: monotonic seconds.
        interval_s: seconds of silence after which a ping is sent.
    """

    def __init__(self, clock: Clock, interval_s: float = 15.0) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._streams: set[PingableStream] = set()
        self._last_tick_at = clock()

    def enter(self, stream: PingableStream) -> None:
        self._streams.add(stream)

    def leave(self, stream: PingableStream) -> None:
        self._streams.discard(stream)

    @property
    def loop_turns(self) -> bool:
        """Whether the event loop has run the ticker within the last seconds."""
        return self._clock() - self._last_tick_at < STUCK_S + TICK_S

    def tick(self) -> None:
        now = self._last_tick_at = self._clock()
        for stream in list(self._streams):
            if now - stream.last_sent_at >= self._interval_s:
                stream.ping()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(next_beat(now, TICK_S) - now)
