"""The messages between the head and the scout of another host.

The messages are part of `hosts.agent_messages`. Each question has a number, and its answer has the same.

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
    """The head's request to a worker to listen, so that the host `peer` can measure the paths to it."""

    number: int
    peer: PeerName


class SurveyHost(msgspec.Struct, frozen=True, kw_only=True, tag="survey_host"):
    """The head's request to a worker to dial the host `peer`, and measure the network paths to it."""

    number: int
    peer: PeerName
    ways: list[WayToTry]


class RestScout(msgspec.Struct, frozen=True, tag="rest_scout"):
    """The head's request to a worker to stop listening for other hosts that measure."""


class ListensForHost(msgspec.Struct, frozen=True, kw_only=True, tag="listens_for_host"):
    """A worker's answer to `ListenForHost`: where it listens now."""

    number: Small
    listening: Listening


class Surveyed(msgspec.Struct, frozen=True, kw_only=True, tag="surveyed"):
    """A worker's answer to `SurveyHost`: what it has found about the network paths."""

    number: Small
    survey: Survey


class ScoutFailed(msgspec.Struct, frozen=True, kw_only=True, tag="scout_failed"):
    """A worker's answer that it could not do what the head has asked for, and why."""

    number: Small
    error: ErrorInfo


ToScout = ListenForHost | SurveyHost | RestScout
FromScout = ListensForHost | Surveyed | ScoutFailed
