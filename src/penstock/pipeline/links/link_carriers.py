"""Chooses, by kind of endpoint, the carrier of a link, or of the exchange of tensors in a stage.

A new carrier gets a line in a table (docs/adding-a-carrier.md). Carriers of message channels, which need no
torch, are in `pipeline.links.channel_carriers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.distributed.group import MeetingPlace, open_shared_memory
from penstock.pipeline.links.link import Link
from penstock.pipeline.links.memory import MemoryLink
from penstock.pipeline.links.ring import SharedMemoryLink
from penstock.pipeline.links.stream_link import open_stream_link
from penstock.process.endpoints import (
    LinkEndpoint,
    MeetingEndpoint,
    MeetingHandle,
    MemoryHandle,
    RingHandle,
    StreamLinkHandle,
    opener_of,
)

_LINK_OPENERS: Mapping[type, Callable[..., Link]] = {
    RingHandle: SharedMemoryLink,
    MemoryHandle: MemoryLink.known_by,
    StreamLinkHandle: open_stream_link,
}
_MEETING_OPENERS: Mapping[type, Callable[..., MeetingPlace]] = {MeetingHandle: open_shared_memory}


def open_link(endpoint: LinkEndpoint, name: str, timeout_s: float) -> Link:
    """Return this process's end of a link between two stages.

    Args:
        endpoint: as its host has handed it over. Its descriptors stay the caller's.
        name: for error messages, such as "stage 0 -> stage 1".
        timeout_s: deadline of every wait for a frame or for room.

    Raises:
        ProtocolError: this build has no carrier for endpoints of this kind, or a certificate cannot be used.
    """
    return opener_of(_LINK_OPENERS, endpoint, f"link {name}")(endpoint, name, timeout_s)


def open_meeting(endpoint: MeetingEndpoint, name: str) -> MeetingPlace:
    """Return the place, such as shared memory, at which the ranks of a stage meet to form their group.

    The caller keeps the endpoint's descriptors as long as the epoch lasts.

    Args:
        name: name of the stage, for error messages.

    Raises:
        ProtocolError: this build has no carrier for endpoints of this kind.
    """
    return opener_of(_MEETING_OPENERS, endpoint, f"the opening of {name}")(endpoint)
