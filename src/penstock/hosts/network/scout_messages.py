"""The messages between the head and the scout of another host.

The messages are part of `hosts.agent_messages`. Each question has a number, which its answer bears.

    head                                       agent
    ListenForHost(4, peer)             ──▶     ListensForHost(4, places)
    SurveyHost(5, peer, ways)          ──▶     Surveyed(5, what was found), or ScoutFailed(5, why)
    RestScout()                        ──▶
"""

from __future__ import annotations

import msgspec

from penstock.bounds import Small
from penstock.errors import ErrorInfo
from penstock.hosts.network.scout import Listening, Survey, WayToTry
from penstock.trust.peer_names import PeerName


class ListenForHost(msgspec.Struct, frozen=True, kw_only=True, tag="listen_for_host"):
    """A request to let a host of the cluster measure the ways to this one."""

    number: int
    peer: PeerName


class SurveyHost(msgspec.Struct, frozen=True, kw_only=True, tag="survey_host"):
    """A request to measure the ways to a host of the cluster, which listens."""

    number: int
    peer: PeerName
    ways: list[WayToTry]


class RestScout(msgspec.Struct, frozen=True, tag="rest_scout"):
    """A request to stop listening."""


class ListensForHost(msgspec.Struct, frozen=True, kw_only=True, tag="listens_for_host"):
    """An answer that the host listens."""

    number: Small
    listening: Listening


class Surveyed(msgspec.Struct, frozen=True, kw_only=True, tag="surveyed"):
    """An answer that the ways were measured."""

    number: Small
    survey: Survey


class ScoutFailed(msgspec.Struct, frozen=True, kw_only=True, tag="scout_failed"):
    """An answer that a question has failed."""

    number: Small
    error: ErrorInfo


ToScout = ListenForHost | SurveyHost | RestScout
FromScout = ListensForHost | Surveyed | ScoutFailed
