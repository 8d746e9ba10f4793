"""The messages between the head and a visitor: a host that looks whether it could join (`doctor --join`).

Before these messages the visitor has proved itself (`trust.head_join`), and both have the same version.

    visitor                                                          head
    VisitorListens(where, ports)                      ──▶
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
    """The first message of a visitor, a host that checks whether it could join the head.

    It says where the visitor listens to be measured, and which of its link ports are to be checked.
    """

    listening: Listening
    ports: CheckedPorts


class LookBack(msgspec.Struct, frozen=True, tag="look_back"):
    """The visitor's message that it has tried the head, so that the head now tries the visitor."""


class HeadListens(msgspec.Struct, frozen=True, kw_only=True, tag="head_listens"):
    """The head's answer to a visitor: where the head listens to be measured, and its ports to be checked."""

    listening: Listening
    ports: CheckedPorts


class LookedBack(msgspec.Struct, frozen=True, kw_only=True, tag="looked_back"):
    """A message with the head's own findings about the network between it and a visiting host.

    Attributes:
        survey: what the head has found about the network paths to the visitor.
        unreached: ports of the visitor that the head cannot reach, with the reason for each.
    """

    survey: Survey
    unreached: Annotated[dict[Port, Word], msgspec.Meta(max_length=MOST_PORTS)]


class VisitRefused(msgspec.Struct, frozen=True, kw_only=True, tag="visit_refused"):
    """The head's message that it does not answer the visitor any further, with the reason."""

    error: ErrorInfo


ToVisited = VisitorListens | LookBack
ToVisitor = HeadListens | LookedBack | VisitRefused
