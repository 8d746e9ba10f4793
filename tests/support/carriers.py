"""The carriers that the contract tests run over: a new carrier is a new line of a table here.

`tests/unit/pipeline/links/test_link.py` and `tests/fault/test_faulty_links.py` hold every carrier of links to
what a `Link` promises, `test_channel.py` and `test_plan_channel.py` every carrier of messages. A carrier is
opened as a rank opens it: by its endpoints, which its host has made (docs/adding-a-carrier.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from link_peers import LinkPeers
from penstock.hosts.local import LocalHost
from penstock.hosts.rank_host import BulkNeed, ChannelNeed, LinkNeed, Need, Parties, PlanNeed
from penstock.hosts.stream_ends import DiallingEnd, ListeningEnd, StreamEnd, StreamNeed
from penstock.pipeline.bulk.bulk_channel import ChunkChannel, open_bulk
from penstock.pipeline.links.channel import MessageChannel
from penstock.pipeline.links.channel_carriers import open_channel
from penstock.pipeline.links.frame import frame_bytes
from penstock.pipeline.links.link import Link
from penstock.pipeline.links.link_carriers import open_link
from penstock.pipeline.links.memory import MemoryLink
from penstock.pipeline.links.plan_channel import QueueChannel
from penstock.process.config import THIS_HOST
from penstock.process.endpoints import PlainText, StreamSecurity
from penstock.process.link_ports import PortRange, listen_in_range

Endpoints = tuple[Any, Any]  # of the sender, or the joining end; of the receiver, or the accepting end
Channels = tuple[MessageChannel, MessageChannel]
PARTIES = Parties(epoch=0, own="rank-0", peer="rank-1", peer_host=THIS_HOST)
MAX_TOKENS, WIDTH, ITEM_BYTES = 8, 6, 4  # of the frames of links


def local(kind: str) -> Callable[[Need, ExitStack], Endpoints]:
    """Endpoints of a kind that `LocalHost` makes."""

    def make(need: Need, closing: ExitStack) -> Endpoints:
        host = LocalHost()
        accepted = host.accept(kind, need, PARTIES)
        closing.callback(accepted.close)
        joined = host.join(kind, need, PARTIES, accepted.invitation)
        closing.callback(joined.close)
        return joined.endpoint, accepted.endpoint

    return make


Secured = tuple[StreamSecurity, StreamSecurity]  # of the joining end; of the accepting one
ANY_PORT = PortRange(0, 0)


def plain_text(closing: ExitStack) -> Secured:
    return PlainText(), PlainText()


def challenged(closing: ExitStack) -> Secured:
    """Two ends that have the key of one epoch, each of which expects the other."""
    peers = closing.enter_context(LinkPeers())
    return peers.challenged(0), peers.challenged(1)


def tls(closing: ExitStack) -> Secured:
    """Two ends with certificates of one authority, each of which expects the other."""
    peers = closing.enter_context(LinkPeers())
    return peers.certified(0), peers.certified(1)


def stream(
    need: StreamNeed,
    closing: ExitStack,
    secured: Callable[[ExitStack], Secured] = plain_text,
    *,
    host: str = "127.0.0.1",
    joining_dials: bool = True,
    open_timeout_s: float = 30.0,
) -> tuple[StreamEnd, StreamEnd]:
    """The joining and the accepting end of a stream over loopback, as two hosts make them."""
    of_joining, of_accepting = secured(closing)
    of_dialler, of_listener = (of_joining, of_accepting) if joining_dials else (of_accepting, of_joining)
    listener = listen_in_range(host, ANY_PORT)
    listening = ListeningEnd(
        need,
        listener,
        host,
        is_joining=not joining_dials,
        security=of_listener,
        open_timeout_s=open_timeout_s,
    )
    closing.callback(listening.close)
    assert listening.invitation is not None
    dialling = DiallingEnd(
        need,
        listening.invitation,
        is_joining=joining_dials,
        security=of_dialler,
        open_timeout_s=open_timeout_s,
    )
    closing.callback(dialling.close)
    return (dialling, listening) if joining_dials else (listening, dialling)


def _stream_link(
    secured: Callable[[ExitStack], Secured], *, joining_dials: bool = True
) -> Callable[[LinkNeed, ExitStack, str, float], Endpoints]:
    def make(need: LinkNeed, closing: ExitStack, name: str, timeout_s: float) -> Endpoints:
        joining, accepting = stream(need, closing, secured, joining_dials=joining_dials)
        return joining.endpoint, accepting.endpoint

    return make


def _stream_channel(
    secured: Callable[[ExitStack], Secured], need: StreamNeed
) -> Callable[[ExitStack, str], Channels]:
    def make(closing: ExitStack, name: str) -> Channels:
        joining, accepting = stream(need, closing, secured)
        return open_channel(joining.endpoint, name), open_channel(accepting.endpoint, name)

    return make


def _link_in_memory(need: LinkNeed, closing: ExitStack, name: str, timeout_s: float) -> Endpoints:
    link = MemoryLink(name, timeout_s, need.num_frames)
    closing.callback(link.close)  # and so it lives until then
    return link.handle, link.handle


def _link(kind: str) -> Callable[[LinkNeed, ExitStack, str, float], Endpoints]:
    return lambda need, closing, name, timeout_s: local(kind)(need, closing)


def _channel(kind: str, need: Need) -> Callable[[ExitStack, str], Channels]:
    def make(closing: ExitStack, name: str) -> Channels:
        joining, accepting = local(kind)(need, closing)
        return open_channel(joining, name), open_channel(accepting, name)

    return make


LINKS: Mapping[str, Callable[[LinkNeed, ExitStack, str, float], Endpoints]] = {
    "memory": _link_in_memory,
    "shared memory": _link("ring"),
    "tcp": _stream_link(plain_text),
    "tcp, the sender is dialled": _stream_link(plain_text, joining_dials=False),
    "tcp, challenged": _stream_link(challenged),
    "tls": _stream_link(tls),
}
# Where the sender waits once as many frames are under way as the link was made for, and not some more.
COUNTING_LINKS = ("memory", "shared memory")
TWO_WAY_CHANNELS: Mapping[str, Callable[[ExitStack, str], Channels]] = {
    "zmq": _channel("socket", PlanNeed()),
    "memory": lambda closing, name: QueueChannel.pair(name),
    "tcp": _stream_channel(plain_text, PlanNeed()),
    "tcp, challenged": _stream_channel(challenged, PlanNeed()),
    "tls": _stream_channel(tls, PlanNeed()),
}
ONE_WAY_CHANNELS: Mapping[str, Callable[[ExitStack, str], Channels]] = {
    "ring": _channel("ring", ChannelNeed(num_messages=16, num_rows=64)),
    **TWO_WAY_CHANNELS,
    "tcp": _stream_channel(plain_text, ChannelNeed(num_messages=16, num_rows=64)),
    "tls": _stream_channel(tls, ChannelNeed(num_messages=16, num_rows=64)),
}

BULK_CHANNELS: Mapping[str, Callable[[ExitStack], Endpoints]] = {
    "ring": lambda closing: local("ring")(BulkNeed(), closing),
    "tcp": lambda closing: _bulk_stream(closing, plain_text),
    "tls": lambda closing: _bulk_stream(closing, tls),
}


def _bulk_stream(closing: ExitStack, secured: Callable[[ExitStack], Secured]) -> Endpoints:
    joining, accepting = stream(BulkNeed(), closing, secured)
    return joining.endpoint, accepting.endpoint


def connect_bulk(carrier: str, closing: ExitStack, name: str) -> tuple[ChunkChannel, ChunkChannel]:
    """The sending and the receiving end of what carries a bulk channel, closed with `closing`."""
    sending, receiving = (open_bulk(endpoint, name) for endpoint in BULK_CHANNELS[carrier](closing))
    for end in (sending, receiving):
        closing.callback(end.close)
    return sending, receiving


def connect_link(
    carrier: str,
    closing: ExitStack,
    name: str,
    timeout_s: float,
    *,
    num_frames: int = 1,
    max_num_tokens: int = MAX_TOKENS,
    width: int = WIDTH,
) -> tuple[Link, Link]:
    """The sending and the receiving end of a link, both closed with `closing`."""
    size = frame_bytes(max_num_tokens=max_num_tokens, width=width, itemsize=ITEM_BYTES, num_tensors=2)
    need = LinkNeed(frame_bytes=size, num_frames=num_frames)
    sending, receiving = LINKS[carrier](need, closing, name, timeout_s)
    ends = open_link(sending, name, timeout_s), open_link(receiving, name, timeout_s)
    for end in ends:
        closing.callback(end.close)
    return ends


def connect_channel(
    carriers: Mapping[str, Callable[[ExitStack, str], Channels]], carrier: str, closing: ExitStack, name: str
) -> Channels:
    """The joining and the accepting end of a channel, closed with `closing`; one-way: the first sends."""
    ends = carriers[carrier](closing, name)
    for end in ends:
        closing.callback(end.close)
    return ends
