"""From the supervisor to its children, over a real socket pair."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from descriptors import no_descriptor_left
from penstock.batch import LinkOrder
from penstock.errors import ErrorInfo, LinkClosedError, PeerError, ProtocolError, WaitTimeoutError
from penstock.families.registry import resolve_model_directory
from penstock.process.config import RankConfig
from penstock.process.control import (
    AttachLink,
    ControlMessage,
    ControlReader,
    ControlSocket,
    EpochLost,
    ExchangeLink,
    Stop,
    UseModel,
    close_descriptors,
    descriptors_of,
)
from penstock.process.endpoints import (
    AcceptedStream,
    Certified,
    CoreEndpoints,
    RankEndpoints,
    RingHandle,
    SocketHandle,
    SocketListener,
    StreamChannelHandle,
    StreamPath,
)
from rank_configs import make_rank_configs

ERROR = ErrorInfo(kind="StageLostError", message="x", stage=0)


class Pair:
    def __init__(self) -> None:
        self.socket = ControlSocket()
        self.reader = ControlReader(os.dup(self.socket.child_fd))
        self.socket.close_child_end()

    def close(self) -> None:
        self.socket.close()
        self.reader.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def handle(base: int) -> RingHandle:
    return RingHandle(memory_fd=base, data_fd=base + 1, space_fd=base + 2, frame_bytes=64, num_frames=2)


ORDER = LinkOrder(number=7, first_step=40, stage=1, sender=0, receiver=2)


@pytest.mark.parametrize("message", [Stop(), EpochLost(ERROR, "all"), ExchangeLink(ORDER)])
def test_messages_arrive_one_by_one(pair: Pair, message: ControlMessage) -> None:
    pair.socket.send(message)
    pair.socket.send(Stop())
    assert [pair.reader.receive(), pair.reader.receive()] == [message, Stop()]


def test_r16_descriptors_that_this_process_has_no_room_for_are_an_error_that_says_so(pair: Pair) -> None:
    """The kernel drops them without a word but for a flag."""
    before = len(os.listdir("/proc/self/fd"))
    pair.socket.send(AttachLink(number=7, endpoint=handle(0)))
    pair.socket.send(Stop())
    with no_descriptor_left(), pytest.raises(PeerError, match="too many open files") as caught:
        pair.reader.receive()
    assert "ulimit -n" in caught.value.remedy
    assert len(os.listdir("/proc/self/fd")) == before
    assert pair.reader.receive() == Stop()


def test_the_end_of_the_supervisor_is_a_stop(pair: Pair) -> None:
    pair.socket.close()
    assert pair.reader.receive() == Stop()


def remote_ends(num_ranks: int, fds: Sequence[int], peer: str = "") -> CoreEndpoints:
    """Return the core's ends of streams to so many ranks on other hosts; each has three descriptors."""

    def end(number: int) -> StreamChannelHandle:
        listener, ending, credentials = (fds[(3 * number + place) % len(fds)] for place in range(3))
        path = StreamPath(
            way=AcceptedStream(listen_fd=listener),
            end_fd=ending,
            security=Certified(credentials_fd=credentials, peer=f"{peer}{number}"),
        )
        return StreamChannelHandle(path=path, num_messages=4096)

    plans = [end(number) for number in range(num_ranks)]
    return CoreEndpoints(epoch=3, plans=plans, stages=list(range(num_ranks)), results=end(num_ranks))


@pytest.mark.parametrize(
    ("num_ranks", "peer"),
    [(82, ""), (83, ""), (90, ""), (90, "long " * 80), (200, "")],
    ids=["one packet", "two more descriptors", "many descriptors", "a long text", "both"],
)
def test_g1_a_message_has_room_for_the_streams_to_all_ranks(pair: Pair, num_ranks: int, peer: str) -> None:
    fds = [fd for _ in range(2) for fd in os.pipe()]
    before = len(os.listdir("/proc/self/fd"))
    sent = remote_ends(num_ranks, fds, peer)
    pair.socket.send(sent)
    pair.socket.send(Stop())
    found = pair.reader.receive()
    assert isinstance(found, CoreEndpoints)
    own = descriptors_of(found)
    assert [os.fstat(fd).st_ino for fd in own] == [os.fstat(fd).st_ino for fd in descriptors_of(sent)]
    assert not any(os.get_inheritable(fd) for fd in own)
    named = [end.path.security for end in found.plans if isinstance(end, StreamChannelHandle)]
    assert [end.peer for end in named if isinstance(end, Certified)] == [
        f"{peer}{number}" for number in range(num_ranks)
    ]
    assert pair.reader.receive() == Stop()
    close_descriptors(found)
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in fds:
        os.close(fd)


def test_r16_many_descriptors_that_this_process_has_no_room_for_leave_the_next_message_whole(
    pair: Pair,
) -> None:
    fds = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    pair.socket.send(remote_ends(90, fds))
    pair.socket.send(Stop())
    with no_descriptor_left(), pytest.raises(PeerError, match="too many open files"):
        pair.reader.receive()
    assert len(os.listdir("/proc/self/fd")) == before
    assert pair.reader.receive() == Stop()
    for fd in fds:
        os.close(fd)


def test_a_supervisor_that_ends_within_a_message_is_a_stop(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(pair.socket._own, [b'\n{"type":"core_end'], [0, 1])
    pair.socket.close()
    assert pair.reader.receive() == Stop()
    assert len(os.listdir("/proc/self/fd")) == before - 1, "only the supervisor's end is closed"


def test_a_child_that_has_gone_harms_nobody(pair: Pair) -> None:
    pair.reader.close()
    pair.socket.send(Stop())


def test_descriptors_become_the_receivers_own(pair: Pair) -> None:
    pipes = [os.pipe() for _ in range(2)]
    fds = [fd for ends in pipes for fd in ends]
    results = RingHandle(memory_fd=fds[1], data_fd=fds[2], space_fd=fds[3], frame_bytes=64, num_frames=2)
    before = len(os.listdir("/proc/self/fd"))
    plans = [SocketListener(listen_fd=fds[0])]
    pair.socket.send(CoreEndpoints(epoch=3, plans=plans, stages=[0], results=results))
    found = pair.reader.receive()
    assert isinstance(found, CoreEndpoints)
    own = descriptors_of(found)
    assert found.epoch == 3
    assert len(os.listdir("/proc/self/fd")) == before + 4
    assert not set(own) & set(fds)
    assert [os.fstat(fd).st_ino for fd in own] == [os.fstat(fd).st_ino for fd in fds]
    assert not any(os.get_inheritable(fd) for fd in own)
    for fd in [*own, *fds]:
        os.close(fd)


def test_an_endpoint_of_an_unknown_kind_is_refused_with_a_remedy(pair: Pair) -> None:
    unknown = {"type": "pigeon", "loft": 7}
    ends = {"type": "rank_endpoints", "epoch": 1, "plans": unknown, "tokens": []}
    pair.socket._own.send(msgspec.json.encode(ends))
    with pytest.raises(ProtocolError, match=r"Invalid value 'pigeon' - at `\$\.plans\.type`") as caught:
        pair.reader.receive()
    assert "same Penstock version" in caught.value.remedy


def test_all_descriptors_of_a_ranks_ends_are_known() -> None:
    tokens = [handle(4), handle(7)]
    ends = RankEndpoints(epoch=1, plans=SocketHandle(handle_fd=3), tokens=tokens, incoming=handle(10))
    assert sorted(descriptors_of(ends)) == list(range(3, 13))


def rank_without_a_model() -> RankConfig:
    return make_rank_configs(resolve_model_directory("demo"), 2, model_path="")[1]


def test_g1_a_rank_waits_for_its_model_and_hears_the_rest_after(pair: Pair) -> None:
    pair.socket.send(EpochLost(ERROR))
    pair.socket.send(UseModel(path="/cache/1", identity=b"id"))
    located = pair.reader.await_model(rank_without_a_model())
    assert located is not None
    assert (located.model_path, located.model_identity) == ("/cache/1", b"id")
    assert pair.reader.has_news()
    assert pair.reader.receive() == EpochLost(ERROR)
    assert not pair.reader.has_news()


def test_a_rank_that_has_its_model_waits_for_none(pair: Pair) -> None:
    rank = msgspec.structs.replace(rank_without_a_model(), model_path="/here")
    assert pair.reader.await_model(rank) is rank


def test_a_rank_that_waits_for_its_model_leaves_with_its_host(pair: Pair) -> None:
    pair.socket.send(EpochLost(ERROR))
    pair.socket.close()
    assert pair.reader.await_model(rank_without_a_model()) is None


def link_end(pair: Pair, number: int) -> None:
    """Hand over an end of a link whose descriptors are those of a pipe."""
    reader, writer = os.pipe()
    endpoint = RingHandle(memory_fd=reader, data_fd=writer, space_fd=reader, frame_bytes=64, num_frames=2)
    pair.socket.send(AttachLink(number=number, endpoint=endpoint))
    os.close(reader)
    os.close(writer)


def test_g1_ends_of_links_are_taken_by_number(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in (4, 5, 6):
        link_end(pair, number)
    for number in (5, 6, 4):
        attached = pair.reader.await_link(number, 5.0)
        assert attached.number == number
        close_descriptors(attached)
    assert len(os.listdir("/proc/self/fd")) == before


def test_g1_an_end_that_is_not_handed_over_is_missed(pair: Pair) -> None:
    link_end(pair, 4)
    with pytest.raises(WaitTimeoutError, match=r"link 5 was not handed over within 0\.01 s"):
        pair.reader.await_link(5, 0.01)
    close_descriptors(pair.reader.await_link(4, 5.0))


def test_g1_r6_ends_that_no_plan_has_named_are_dropped_with_their_epoch(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    link_end(pair, 4)
    link_end(pair, 5)
    pair.socket.send(Stop())
    with pytest.raises(LinkClosedError, match="the epoch ended before link 6"):
        pair.reader.await_link(6, 5.0)
    assert pair.reader.receive() == Stop()
    assert len(os.listdir("/proc/self/fd")) == before
