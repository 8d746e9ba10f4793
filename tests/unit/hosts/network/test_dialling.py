"""Many addresses are dialled at once: who answers is connected, and all others have a reason."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from fakes import FakeClock
from penstock.hosts.network.dialling import Dial, close_all, dial_all, reason


def test_who_listens_is_connected_and_others_have_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        open_port, closed_port = (end.getsockname()[1] for end in (listener, closed))
        ends = dial_all(
            [
                Dial("127.0.0.1", closed_port),
                Dial("127.0.0.1", open_port, "127.0.0.1"),
                Dial("no.address", open_port),
                Dial("127.0.0.1", open_port, "192.0.2.1"),
                Dial("::1", open_port, "127.0.0.1"),
            ]
        )
        connected = ends[1]
        assert isinstance(connected, socket.socket)
        assert connected.getpeername() == listener.getsockname()
        assert not connected.getblocking()
        reasons = [reason(end) for end in ends if isinstance(end, OSError)]
        assert reasons[0] == "connection refused"
        assert len(reasons) == 4
        close_all(ends)
        assert connected.fileno() < 0


def test_who_does_not_answer_in_time_is_given_up() -> None:
    """The queue of the listener is full, and the kernel answers nobody."""
    with ExitStack() as closing:
        listener = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            filling = closing.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(listener.getsockname())
        (end,) = dial_all([Dial(*listener.getsockname())], 0.0, FakeClock())
    assert isinstance(end, OSError)
    assert reason(end) == "no answer"


def test_who_has_answered_is_connected_however_late_that_is_seen() -> None:
    """As on a host that is too busy to look before the time is over."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as closing:
        times = iter([0.0, 10.0, 20.0])

        def clock() -> float:
            now = next(times)
            if now == 10.0:  # it was dialled, and now has answered
                closing.enter_context(listener.accept()[0])
            return now

        (end,) = dial_all([Dial(*listener.getsockname())], 1.0, clock)
        assert isinstance(end, socket.socket)
        end.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_both_versions_of_ip_are_dialled(family: int) -> None:
    address = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((address, 0), family=family) as listener:
        ends = dial_all([Dial(address, listener.getsockname()[1], address)])
        assert isinstance(ends[0], socket.socket)
        close_all(ends)
