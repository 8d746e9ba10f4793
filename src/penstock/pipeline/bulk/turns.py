"""Decides when the next chunk of a bulk channel may go: behind hidden states, and within a byte rate.

    a chunk ──▶ room in the channel ──▶ no link is sending ──▶ the rate allows it ──▶ it goes

A chunk (a part of a payload) that has its turn is handed to the kernel before the next one asks for a turn.
So a frame of hidden states that is queued meanwhile waits for one chunk at most. Precedence is strict: while
links send without a pause, no chunk goes. A chunk's wait for its turn therefore has a deadline, which
`pipeline.bulk.bulk_channel` sets. No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.errors import WaitTimeoutError

LOOK_S = 0.001  # between two looks at links that are sending: they do not report when they are done
_LONGEST_PAUSE_S = 0.05


class SendingLink(Protocol):
    """A link of hidden states, which goes before chunks (`pipeline.links.link.Link`)."""

    @property
    def is_sending(self) -> bool:
        """Whether a frame waits to leave this process."""
        ...


class Rate(Protocol):
    """A limit on the bytes that may be sent over time."""

    def take(self, num_bytes: int) -> float:
        """Take the right to send `num_bytes` now; return 0.0 if it is granted, else the seconds to wait."""
        ...


class NoRateLimit:
    """The stand-in for a `Rate` where there is no limit: no chunk waits."""

    def take(self, num_bytes: int) -> float:
        return 0.0


class ByteRate:
    """A token bucket: bytes a second on average, and a burst at once.

    Args:
        bytes_per_s: the average, above 0.
        burst_bytes: the size of the bucket, which may go at once after a pause. A longer chunk goes when the
            bucket is full, and leaves a debt that later chunks wait off.
        clock: monotonic seconds.
    """

    def __init__(
        self, bytes_per_s: float, burst_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert bytes_per_s > 0, bytes_per_s
        assert burst_bytes > 0, burst_bytes
        self._bytes_per_s, self._burst_bytes, self._clock = bytes_per_s, burst_bytes, clock
        self._level = float(burst_bytes)  # below 0: the debt of a chunk longer than the bucket
        self._filled_at = clock()

    def take(self, num_bytes: int) -> float:
        """Take the right to send `num_bytes` now; return 0.0 if it is granted, else the seconds to wait."""
        now = self._clock()
        filled = self._level + (now - self._filled_at) * self._bytes_per_s
        self._level, self._filled_at = min(filled, float(self._burst_bytes)), now
        lacking = min(num_bytes, self._burst_bytes) - self._level
        if lacking > 1e-6:  # a smaller number is an error of rounding
            return lacking / self._bytes_per_s
        self._level -= num_bytes
        return 0.0


class Turns:
    """The turns of a bulk channel: its next chunk may go when no link is sending and the rate allows it.

    Args:
        links: links of hidden states that go before the channel.
        rate: limit on the channel's bytes; None: there is none.
        clock: monotonic seconds.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        links: Sequence[SendingLink] = (),
        rate: Rate | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._links, self._rate = links, rate or NoRateLimit()
        self._clock, self._pause = clock, pause

    def await_turn(self, num_bytes: int, timeout_s: float) -> None:
        """Wait until a chunk of `num_bytes` may go at once.

        Raises:
            WaitTimeoutError: hidden states or the rate have not let it go in time.
        """
        deadline = self._clock() + timeout_s
        while (wait_s := self._wait_s(num_bytes)) > 0:
            if self._clock() >= deadline:
                raise WaitTimeoutError(
                    f"a chunk has waited {timeout_s:g} s for its turn.",
                    remedy="Raise the byte rate, or use another path than that of the hidden states.",
                )
            self._pause(min(wait_s, _LONGEST_PAUSE_S))

    def _wait_s(self, num_bytes: int) -> float:
        if any(link.is_sending for link in self._links):
            return LOOK_S
        return self._rate.take(num_bytes)
