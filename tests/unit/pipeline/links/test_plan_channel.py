"""All two-way channels of messages (`tests/support/carriers.py`) keep the same promises; and zmq's own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from carriers import TWO_WAY_CHANNELS, connect_channel
from hand_core import Crew
from penstock.errors import LinkClosedError, PortInUseError, WaitTimeoutError
from penstock.pipeline.links.channel import MessageChannel
from penstock.pipeline.links.plan_channel import QueueChannel, ZmqChannel, wait_any

LONG = 30.0
Pair = tuple[MessageChannel, MessageChannel]


@pytest.fixture(params=TWO_WAY_CHANNELS)
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[], Pair]]:
    """Makes the core's end of a channel, and that of a rank."""
    with ExitStack() as closing:

        def make() -> Pair:
            rank, core = connect_channel(TWO_WAY_CHANNELS, request.param, closing, "core - stage 7")
            return core, rank

        yield make


def test_messages_go_both_ways_in_order(connect: Callable[[], Pair]) -> None:
    core, rank = connect()
    for i in range(500):
        core.send(b"plan %d" % i)
    rank.send(b"")
    assert [rank.recv(LONG) for _ in range(500)] == [b"plan %d" % i for i in range(500)]
    assert core.recv(LONG) == b""
    assert rank.recv(0) is None
    assert rank.recv(0.001) is None


def test_a_close_is_noticed_after_the_last_message(connect: Callable[[], Pair]) -> None:
    core, rank = connect()
    core.send(b"hello")
    assert rank.recv(LONG) == b"hello"
    rank.send(b"last words")
    rank.close()
    assert core.recv(LONG) == b"last words"
    for timeout_s in (None, LONG, 0):
        with pytest.raises(LinkClosedError, match="core - stage 7"):
            core.recv(timeout_s)


def test_an_endless_wait_returns_when_the_other_end_closes(connect: Callable[[], Pair]) -> None:
    core, rank = connect()
    core.send(b"x")
    assert rank.recv(LONG) == b"x"
    crew = Crew()
    crew.start(core.close)
    with pytest.raises(LinkClosedError):
        rank.recv(None)
    crew.join()


def test_nothing_can_be_sent_over_a_closed_channel(connect: Callable[[], Pair]) -> None:
    core, rank = connect()
    core.send(b"x")
    assert rank.recv(LONG) == b"x"
    rank.close()
    rank.close()
    for end in (core, rank):
        with pytest.raises(LinkClosedError):
            end.recv(LONG)
        with pytest.raises(LinkClosedError):
            end.send(b"too late")


def test_a_message_that_nobody_can_take_fails_by_its_deadline(tmp_path: Path) -> None:
    lonely = ZmqChannel.bind(f"ipc://{tmp_path}/lonely")
    for timeout_s in (0.0, 0.002):
        with pytest.raises(WaitTimeoutError, match="lonely"):
            lonely.send(b"x", timeout_s)
    lonely.close()


def test_the_connecting_end_may_come_first(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/late"
    early = ZmqChannel.connect(address)
    early.send(b"hello")
    late = ZmqChannel.bind(address)
    assert late.recv(LONG) == b"hello"
    late.close()
    early.close()


def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    with pytest.raises(PortInUseError, match="/nowhere/at/all"):
        ZmqChannel.bind("ipc:///nowhere/at/all")


def test_an_inherited_listening_socket_needs_no_path(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        place = os.open(path, os.O_PATH)
        path.unlink()
        binder = ZmqChannel.bind(f"fd:{os.dup(listener.fileno())}")
        connector = ZmqChannel.connect(f"ipc:///proc/self/fd/{place}")
        connector.send(b"through the handle")
        assert binder.recv(LONG) == b"through the handle"
        connector.close()
        binder.close()
        os.close(place)


def test_a_killed_process_is_noticed(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/victim"
    core = ZmqChannel.bind(address)
    program = (
        "import sys; from penstock.pipeline.links.plan_channel import ZmqChannel\n"
        "channel = ZmqChannel.connect(sys.argv[1]); channel.send(b'here'); channel.recv(None)"
    )
    with subprocess.Popen([sys.executable, "-c", program, address]) as child:
        assert core.recv(LONG) == b"here"
        child.send_signal(signal.SIGKILL)
        with pytest.raises(LinkClosedError):
            core.recv(LONG)
    core.close()


def test_many_channels_can_be_waited_for_together(tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/{i}" for i in range(3)]
    bound, connected = [ZmqChannel.bind(a) for a in addresses], [ZmqChannel.connect(a) for a in addresses]
    connected[2].send(b"x")
    wait_any(bound, LONG)
    assert [channel.recv(0) for channel in bound] == [None, None, b"x"]
    connected[0].close()
    wait_any(bound, LONG)
    with pytest.raises(LinkClosedError):
        bound[0].recv(0)
    assert len({fd for channel in bound for fd in channel.filenos()}) == 6
    for channel in (*bound, *connected):
        channel.close()

    cores, ranks = QueueChannel.star(["stage 0 tp 0", "stage 0 tp 1", "stage 1"])
    ranks[1].send(b"y")
    QueueChannel.wait_any(cores, LONG)
    assert [channel.recv(0) for channel in cores] == [None, b"y", None]
    QueueChannel.wait_any(cores, 0.001)
    ranks[1].close()
    with pytest.raises(LinkClosedError, match="channel core - stage 0 tp 1: the other end is closed"):
        cores[1].recv(0)
