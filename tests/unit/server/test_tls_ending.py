"""The end of an HTTPS connection, by a clock that the test turns and a client that the test plays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.server.http import tls_ending
from penstock.server.http.tls_ending import GOODBYE_S, TlsTransport


class Loop:
    """What the transport uses of an event loop; time passes by `advance`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[float], None], float]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, work: Callable[[float], None], argument: float) -> None:
        self.timers.append((self.now + delay, work, argument))

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.timers and self.timers[0][0] <= end:
            self.now, work, argument = self.timers.pop(0)
            work(argument)
        self.now = end


class Transport:
    """The event loop's own.

    Attributes:
        queued: bytes that the client has not taken.
        calls: how it was ended.
    """

    def __init__(self) -> None:
        self.queued = 0
        self.calls: list[str] = []
        self.is_lost = False

    def get_extra_info(self, name: str) -> object:
        return None if self.is_lost else name

    def is_closing(self) -> bool:
        return bool(self.calls)

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")
        self.is_lost = True

    def get_write_buffer_size(self) -> int:
        return 7


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Transport:
    transport = Transport()
    monkeypatch.setattr(tls_ending, "num_queued", lambda asked: asked.queued)
    return transport


def test_the_time_to_confirm_begins_when_the_client_has_taken_all(loop: Loop, own: Transport) -> None:
    made = TlsTransport(own, loop)  # type: ignore[arg-type]
    own.queued = 1000
    made.close()
    loop.advance(10 * GOODBYE_S)
    assert own.calls == ["close"]
    own.queued = 0
    loop.advance(GOODBYE_S - 0.1)
    assert own.calls == ["close"]
    loop.advance(0.5)
    assert own.calls == ["close", "abort"]
    assert loop.timers == []


def test_bytes_that_the_event_loop_gives_the_system_later_count(loop: Loop, own: Transport) -> None:
    made = TlsTransport(own, loop)  # type: ignore[arg-type]
    made.close()
    loop.advance(GOODBYE_S - 0.5)
    own.queued = 1000
    loop.advance(1.0)
    own.queued = 0
    loop.advance(GOODBYE_S - 0.5)
    assert own.calls == ["close"]


def test_nobody_looks_after_a_connection_that_has_ended(loop: Loop, own: Transport) -> None:
    made = TlsTransport(own, loop)  # type: ignore[arg-type]
    made.close()
    own.is_lost = True
    loop.advance(2 * GOODBYE_S)
    assert (own.calls, loop.timers) == (["close"], [])


def test_a_connection_is_ended_once_and_all_else_is_the_event_loops(loop: Loop, own: Transport) -> None:
    made = TlsTransport(own, loop)  # type: ignore[arg-type]
    assert (made.get_write_buffer_size(), made.is_closing()) == (7, False)
    made.close()
    made.close()
    assert (own.calls, made.is_closing(), len(loop.timers)) == (["close"], True, 1)
