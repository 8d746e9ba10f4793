"""The messages between the head and a visitor: a host that looks whether it could join (`doctor --join`).

The conversation of `trust` comes first: the visitor has a token or a certificate, and the same version.

    visitor                                                          head
    VisitorListens(where, ports, memory)              ──▶
                                                      ◀──   HeadListens(where, ports)
    measures the ways to the head, dials its ports
    LookBack()                                        ──▶   dials the visitor's places and ports
                                                      ◀──   LookedBack(what it has found)
                                                      ◀──   at any time: VisitRefused(why)
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.bounds import Port, Word
from penstock.errors import ErrorInfo
from penstock.hosts.network.port_check import MOST_PORTS, CheckedPorts
from penstock.hosts.network.scout import Listening, Survey


class VisitorListens(msgspec.Struct, frozen=True, kw_only=True, tag="visitor_listens"):
    """The places at which the visitor can be tried."""

    listening: Listening
    ports: CheckedPorts


class LookBack(msgspec.Struct, frozen=True, tag="look_back"):
    """A message that the visitor has seen what it wanted; now it is the head's turn."""


class HeadListens(msgspec.Struct, frozen=True, kw_only=True, tag="head_listens"):
    """The places at which the head can be tried."""

    listening: Listening
    ports: CheckedPorts


class LookedBack(msgspec.Struct, frozen=True, kw_only=True, tag="looked_back"):
    """A message with the head's own findings about the network between it and a visiting host.

    Attributes:
        unreached: ports of the visitor that cannot be dialled, and why.
    """

    survey: Survey
    unreached: Annotated[dict[Port, Word], msgspec.Meta(max_length=MOST_PORTS)]


class VisitRefused(msgspec.Struct, frozen=True, kw_only=True, tag="visit_refused"):
    """A message that the head does not answer, or not any more."""

    error: ErrorInfo


ToVisited = VisitorListens | LookBack
ToVisitor = HeadListens | LookedBack | VisitRefused
