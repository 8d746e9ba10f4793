"""Questions about ways travel to an agent and back: answered beside its work, and refused in its words."""

from __future__ import annotations

import itertools
import select
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from penstock.errors import LinkClosedError, PeerError, PortInUseError, ProtocolError, WaitTimeoutError
from penstock.hosts.agent_messages import ToAgent, ToHead
from penstock.hosts.network import scouting_agent
from penstock.hosts.network.interfaces import address_named
from penstock.hosts.network.measuring_door import ListeningPlace
from penstock.hosts.network.remote_scout import RemoteScout
from penstock.hosts.network.scout import Listening, Survey, WayToTry
from penstock.hosts.network.scout_messages import (
    FromScout,
    ListenForHost,
    ListensForHost,
    RestScout,
    SurveyHost,
    ToScout,
)
from penstock.hosts.network.scouting_agent import NoScout, ScoutAnswers, ScoutingAgent
from penstock.trust.peer_names import AGENT_ROLE, HEAD_ROLE, PeerName

HEAD = PeerName(cluster="0" * 32, host="tower", role=HEAD_ROLE)
DESK = PeerName(cluster="0" * 32, host="desk", role=AGENT_ROLE)
LISTENING = Listening(places=[ListeningPlace(address_named("127.0.0.1"), 7701)])
WAIT_S = 30.0


class StandInScout:
    """Answers what it is told to. Implements `Scout`."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.failure: Exception | None = None
        self.peer = DESK

    def listen(self, peer: PeerName) -> Listening:
        self._ask(peer)
        return LISTENING

    def survey(self, peer: PeerName, ways: Sequence[WayToTry]) -> Survey:
        self._ask((peer, list(ways)))
        return Survey(open=[], dead=[])

    def rest(self) -> None:
        self.asked.append("rest")

    def _ask(self, what: object) -> None:
        self.asked.append(what)
        if self.failure is not None:
            raise self.failure


class Elsewhere:
    """The host of an agent, as `RemoteScout` knows it: messages pass as they would over a wire."""

    def __init__(self, agent: ScoutAnswers) -> None:
        self.name = "desk"
        self.is_there = True
        self.numbers = itertools.count(1)
        self.scout_answers: dict[int, FromScout] = {}
        self._agent = agent

    def tell(self, message: msgspec.Struct) -> None:
        received = msgspec.json.decode(msgspec.json.encode(message), type=ToAgent)
        assert isinstance(received, ToScout)
        self._agent.ask(received)

    def pump_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        while not condition() and self.is_there:
            assert select.select([self._agent], [], [], WAIT_S)[0]
            for answer in self._agent.take():
                received = msgspec.json.decode(msgspec.json.encode(answer), type=ToHead)
                assert isinstance(received, FromScout)
                self.scout_answers[received.number] = received
        return condition()


@pytest.fixture
def scout() -> StandInScout:
    return StandInScout()


@pytest.fixture
def agent(scout: StandInScout) -> Iterator[ScoutingAgent]:
    made = ScoutingAgent(scout)
    yield made
    made.close()


@pytest.fixture
def remote(agent: ScoutingAgent) -> RemoteScout:
    return RemoteScout(Elsewhere(agent), DESK)


def test_g1_questions_reach_the_scout_of_the_host_and_its_answers_come_back(
    remote: RemoteScout, scout: StandInScout
) -> None:
    assert remote.peer == DESK
    assert remote.listen(HEAD) == LISTENING
    assert remote.survey(HEAD, []) == Survey(open=[], dead=[])
    remote.rest()
    assert remote.listen(HEAD) == LISTENING
    assert scout.asked == [HEAD, (HEAD, []), "rest", HEAD]


@pytest.mark.parametrize(
    ("failure", "raised", "words"),
    [
        (PortInUseError("no port of 7701 is free."), PortInUseError, "no port of 7701"),
        (OSError(24, "Too many open files"), PeerError, "Too many open files"),
        (RuntimeError("can't start new thread"), PeerError, "can't start new thread"),
    ],
)
def test_g1_what_a_scout_cannot_do_is_said_in_its_words(
    remote: RemoteScout, scout: StandInScout, failure: Exception, raised: type[Exception], words: str
) -> None:
    scout.failure = failure
    with pytest.raises(raised, match=words):
        remote.listen(HEAD)
    scout.failure = None
    assert remote.listen(HEAD) == LISTENING, "the next question is answered"


def test_g1_an_agent_is_not_held_up_by_a_question(agent: ScoutingAgent, scout: StandInScout) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def rest() -> None:
        begun.set()
        assert go_on.wait(WAIT_S)

    scout.rest = rest  # type: ignore[method-assign]
    agent.ask(RestScout())
    assert begun.wait(WAIT_S)
    assert agent.take() == []
    go_on.set()


def test_g1_a_question_that_takes_long_does_not_hold_up_the_agent_that_ends(
    agent: ScoutingAgent, scout: StandInScout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head would take the host as lost, whose agent only makes way for the scout of another talk."""
    begun, go_on = threading.Event(), threading.Event()

    def listen(peer: PeerName) -> Listening:
        begun.set()
        assert go_on.wait(WAIT_S)
        return LISTENING

    monkeypatch.setattr(scouting_agent, "CLOSE_S", 1e-3)
    monkeypatch.setattr(scout, "listen", listen)
    agent.ask(ListenForHost(number=1, peer=HEAD))
    agent.ask(SurveyHost(number=2, peer=HEAD, ways=[]))
    assert begun.wait(WAIT_S)
    closing = threading.Thread(target=agent.close)
    closing.start()
    closing.join(WAIT_S)
    is_held_up = closing.is_alive()
    assert agent.fileno() >= 0, "the thread still rings its bell"
    go_on.set()
    agent._thread.join(WAIT_S)
    assert not is_held_up
    assert scout.asked == ["rest"], "the other question is not answered any more"
    assert agent.fileno() == -1


def test_g1_a_host_that_looks_for_no_ways_says_so() -> None:
    agent = NoScout()
    remote = RemoteScout(Elsewhere(agent), DESK)
    remote.rest()
    with pytest.raises(PeerError, match="does not search for paths"):
        remote.listen(HEAD)
    agent.close()


class Mute:
    """A host whose agent says what a test likes, or nothing."""

    def __init__(self, *answers: FromScout, is_there: bool = True) -> None:
        self.name, self.is_there = "desk", is_there
        self.numbers = itertools.count(1)
        self.scout_answers: dict[int, FromScout] = {}
        self._answers = answers

    def tell(self, message: msgspec.Struct) -> None:
        self.scout_answers.update((answer.number, answer) for answer in self._answers)

    def pump_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        return condition()


class Late(Mute):
    """A host whose agent answers each question when the next one has come."""

    def tell(self, message: msgspec.Struct) -> None:
        assert isinstance(message, ListenForHost)
        self.scout_answers.update((answer.number, answer) for answer in self._answers)
        self._answers = (ListensForHost(number=message.number, listening=Listening(places=[])),)


def test_g1_a_late_answer_is_not_taken_for_that_to_another_question() -> None:
    """Each pair of hosts has a scout of its own, and all ask over one connection."""
    host = Late()
    with pytest.raises(WaitTimeoutError):
        RemoteScout(host, DESK).listen(HEAD)
    with pytest.raises(WaitTimeoutError):
        RemoteScout(host, DESK).listen(HEAD)


def test_g1_a_host_that_does_not_answer_is_named() -> None:
    with pytest.raises(WaitTimeoutError, match="the host desk has not answered for 8 s"):
        RemoteScout(Mute(), DESK).listen(HEAD)
    with pytest.raises(LinkClosedError, match="the connection to the host desk is broken"):
        RemoteScout(Mute(is_there=False), DESK).survey(HEAD, [])
    listens = ListensForHost(number=1, listening=LISTENING)
    with pytest.raises(ProtocolError, match="paths: ListensForHost"):
        RemoteScout(Mute(listens), DESK).survey(HEAD, [])
