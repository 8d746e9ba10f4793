"""The head's stand-in for the scout of a worker (a scout finds network paths to other hosts).

It sends questions to the worker's agent, which answers them with `scouting_agent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from penstock.config.hosts import SAME_VERSION
from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError, error_from_info
from penstock.hosts.network.measuring_door import SURVEY_S
from penstock.hosts.network.scout import Listening, Survey, WayToTry
from penstock.hosts.network.scout_messages import (
    FromScout,
    ListenForHost,
    ListensForHost,
    RestScout,
    ScoutFailed,
    Surveyed,
    SurveyHost,
)
from penstock.trust.peer_names import PeerName

LISTEN_S = 8.0  # for an answer: the host may first have to end another answer, which takes up to 3 s


class AskedHost(Protocol):
    """The part of another host that a `RemoteScout` uses to ask it (`hosts.remote_host.RemoteHost`).

    Attributes:
        name: name of the host.
        numbers: numbers for questions, one sequence for all scouts of the host, so that no answer is taken
            for the answer to another question.
        scout_answers: answers that were not taken yet, by the number of the question.
    """

    name: str
    numbers: Iterator[int]
    scout_answers: dict[int, FromScout]

    @property
    def is_there(self) -> bool: ...

    def tell(self, message: msgspec.Struct) -> None: ...

    def pump_until(self, condition: Callable[[], bool], timeout_s: float) -> bool: ...


class RemoteScout:
    """A scout of a worker's host, at the head: asks the host's agent, and waits. Implements `Scout`.

    Args:
        peer: the name of the host's agent.
    """

    def __init__(self, host: AskedHost, peer: PeerName) -> None:
        self._host = host
        self._peer = peer

    @property
    def peer(self) -> PeerName:
        return self._peer

    def listen(self, peer: PeerName) -> Listening:
        number = next(self._host.numbers)
        answer = self._ask(number, ListenForHost(number=number, peer=peer), LISTEN_S)
        if not isinstance(answer, ListensForHost):
            raise self._misunderstood(answer)
        return answer.listening

    def survey(self, peer: PeerName, ways: Sequence[WayToTry]) -> Survey:
        number = next(self._host.numbers)
        answer = self._ask(number, SurveyHost(number=number, peer=peer, ways=list(ways)), SURVEY_S)
        if not isinstance(answer, Surveyed):
            raise self._misunderstood(answer)
        return answer.survey

    def rest(self) -> None:
        self._host.tell(RestScout())

    def _ask(self, number: int, question: msgspec.Struct, timeout_s: float) -> FromScout:
        answers = self._host.scout_answers
        answers.clear()  # answers to earlier questions, which came too late
        self._host.tell(question)
        if not self._host.pump_until(lambda: number in answers, timeout_s):
            if not self._host.is_there:
                raise LinkClosedError(f"the connection to the host {self._host.name} is broken.")
            raise WaitTimeoutError(f"the host {self._host.name} has not answered for {timeout_s:g} s.")
        answer = answers.pop(number)
        if isinstance(answer, ScoutFailed):
            raise error_from_info(answer.error)
        return answer

    def _misunderstood(self, answer: FromScout) -> ProtocolError:
        return ProtocolError(
            f"the host {self._host.name} sent an unexpected answer about paths: {type(answer).__name__}.",
            remedy=SAME_VERSION,
        )
