"""Ends of streams as hosts make them, and their way to a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from carriers import ANY_PORT, stream, tls
from penstock.errors import LinkClosedError
from penstock.hosts.rank_host import BulkNeed, ChannelNeed, HostEnd, LinkNeed, PlanNeed
from penstock.hosts.stream_ends import NUM_PLAN_MESSAGES, ListeningEnd, StreamInvitation
from penstock.pipeline.links.channel_carriers import open_channel
from penstock.process.control import ControlReader, ControlSocket, close_descriptors, descriptors_of
from penstock.process.endpoints import RankEndpoints, StreamChannelHandle, StreamLinkHandle
from penstock.process.link_ports import listen_in_range

LONG_S = 30.0


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("joining_dials", [True, False])
def test_g1_what_a_stream_carries_and_who_dials_do_not_depend_on_each_other(
    closing: ExitStack, joining_dials: bool
) -> None:
    need = LinkNeed(frame_bytes=4096, num_frames=3)
    joining, accepting = stream(need, closing, joining_dials=joining_dials)
    for end, direction in ((joining, "out"), (accepting, "in")):
        assert isinstance(end.endpoint, StreamLinkHandle)
        assert (end.endpoint.direction, end.endpoint.num_frames) == (direction, 3)
    assert (joining.invitation is None) == joining_dials
    assert (accepting.invitation is None) != joining_dials


def test_g1_a_channel_has_room_for_what_was_asked(closing: ExitStack) -> None:
    for need, expected in ((ChannelNeed(num_messages=9, num_rows=4), 9), (PlanNeed(), NUM_PLAN_MESSAGES)):
        for end in stream(need, closing):
            assert isinstance(end.endpoint, StreamChannelHandle)
            assert end.endpoint.num_messages == expected


def test_g1_a_bulk_channel_yields_and_its_sender_keeps_one_chunk(closing: ExitStack) -> None:
    joining, accepting = (end.endpoint for end in stream(BulkNeed(num_chunks=5), closing))
    assert isinstance(joining, StreamChannelHandle)
    assert isinstance(accepting, StreamChannelHandle)
    assert (joining.num_messages, accepting.num_messages) == (1, 5)
    assert joining.path.precedence == accepting.path.precedence == "low"


def test_g1_an_invitation_names_the_port() -> None:
    listener = listen_in_range("127.0.0.1", ANY_PORT)
    end: HostEnd = ListeningEnd(PlanNeed(), listener, "head.example")
    assert end.invitation == StreamInvitation(host="head.example", port=listener.getsockname()[1])
    assert msgspec.json.decode(msgspec.json.encode(end.invitation), type=StreamInvitation) == end.invitation
    end.delivered()
    assert listener.fileno() < 0
    end.end()
    end.end()
    end.close()


def test_g1_endpoints_of_streams_travel_over_the_control_socket(closing: ExitStack) -> None:
    """With descriptors of credentials, listeners and ends, which become the receiver's own."""
    ends = stream(PlanNeed(), closing, tls)
    channels = []
    for end in ends:
        control = ControlSocket()
        closing.callback(control.close)
        reader = ControlReader(os.dup(control.child_fd))
        closing.callback(reader.close)
        sent = RankEndpoints(epoch=3, plans=end.endpoint, tokens=[])
        control.send(sent)
        received = reader.receive()
        assert isinstance(received, RankEndpoints)
        assert len(descriptors_of(received)) == len(descriptors_of(sent)) >= 2
        assert not set(descriptors_of(received)) & set(descriptors_of(sent))
        channels.append(open_channel(received.plans, "core - stage 1"))
        closing.callback(channels[-1].close)
        close_descriptors(received)
        end.delivered()
    channels[0].send(b"plan", LONG_S)
    assert channels[1].recv(LONG_S) == b"plan"
    for end in ends:
        end.end()
    for channel in channels:
        with pytest.raises(LinkClosedError):
            channel.recv(LONG_S)
