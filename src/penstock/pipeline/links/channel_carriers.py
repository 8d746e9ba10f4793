"""Chooses the carrier (the implementation) that opens a message channel, by the kind of its endpoint.

A new carrier gets a line in the table (docs/adding-a-carrier.md). Carriers of links are in
`pipeline.links.link_carriers`, which needs torch; this module does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.pipeline.links.channel import PolledChannel
from penstock.pipeline.links.plan_channel import ZmqChannel
from penstock.pipeline.links.ring_channel import RingChannel
from penstock.pipeline.links.stream_channel import StreamChannel
from penstock.process.endpoints import (
    ChannelEndpoint,
    RingHandle,
    SocketHandle,
    SocketListener,
    StreamChannelHandle,
    opener_of,
)

_OPENERS: Mapping[type, Callable[..., PolledChannel]] = {
    RingHandle: RingChannel,
    SocketListener: ZmqChannel.listen_at,
    SocketHandle: ZmqChannel.connect_to,
    StreamChannelHandle: StreamChannel,
}


def open_channel(endpoint: ChannelEndpoint, name: str) -> PolledChannel:
    """Return this process's end of a message channel to another process.

    Args:
        endpoint: as its host has handed it over. Its descriptors stay the caller's, to be closed when the
            channel is closed.
        name: for error messages, such as "core - stage 1".

    Raises:
        ProtocolError: this build has no carrier for endpoints of this kind.
    """
    return opener_of(_OPENERS, endpoint, f"channel {name}")(endpoint, name)
