"""The messages between the head and a visitor: a host that looks whether it could join (`doctor --join`).

The conversation of `trust` comes first: the visitor has a token or a certificate, and the same version.

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
    """The message of a visiting host that it has tried the head; now the head is to try the visitor."""


class HeadListens(msgspec.Struct, frozen=True, kw_only=True, tag="head_listens"):
    """The head's answer to a visitor: where it listens to be measured, and its link ports to be checked."""

    listening: Listening
    ports: CheckedPorts


class LookedBack(msgspec.Struct, frozen=True, kw_only=True, tag="looked_back"):
    """A message with the head's own findings about the network between it and a visiting host.

    Attributes:
        survey: what it has found about the network paths to the visitor.
        unreached: ports of the visitor that cannot be dialled, and why.
    """

    survey: Survey
    unreached: Annotated[dict[Port, Word], msgspec.Meta(max_length=MOST_PORTS)]


class VisitRefused(msgspec.Struct, frozen=True, kw_only=True, tag="visit_refused"):
    """A message that the head does not answer the visitor, or not any more, and why."""

    error: ErrorInfo


ToVisited = VisitorListens | LookBack
ToVisitor = HeadListens | LookedBack | VisitRefused
