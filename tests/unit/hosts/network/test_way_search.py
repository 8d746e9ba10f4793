"""Ways are looked for in a thread: who begins it goes on with other work, and passes questions on."""

from __future__ import annotations

import itertools
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes import FakeClock
from penstock.hosts.bell import Bell
from penstock.hosts.network.interfaces import address_named
from penstock.hosts.network.measuring_door import ListeningPlace
from penstock.hosts.network.scout import Listening, Survey, WayToTry
from penstock.hosts.network.scout_messages import (
    FromScout,
    ListenForHost,
    ListensForHost,
    RestScout,
    Surveyed,
    SurveyHost,
)
from penstock.hosts.network.way_search import PATIENCE_S, WaySearch
from penstock.process.readiness import Waitable
from penstock.trust.peer_names import AGENT_ROLE, HEAD_ROLE, PeerName

HEAD = PeerName(cluster="0" * 32, host="tower", role=HEAD_ROLE)
DESK = PeerName(cluster="0" * 32, host="desk", role=AGENT_ROLE)
HOSTS = ["desk", "tower"]
WAIT_S = 30.0


class OwnScout:
    """The scout of the head: it finds that no way leads anywhere."""

    peer = HEAD

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def listen(self, peer: PeerName) -> Listening:
        self.threads.add(threading.get_ident())
        return Listening(places=[ListeningPlace(address_named("127.0.0.1"), 7701)])

    def survey(self, peer: PeerName, ways: Sequence[WayToTry]) -> Survey:
        self.threads.add(threading.get_ident())
        return Survey(open=[], dead=[])

    def rest(self) -> None:
        self.threads.add(threading.get_ident())


class Elsewhere:
    """A host that says where it listens when a test lets it, and answers all else at once."""

    def __init__(self, name: str = "desk") -> None:
        self.name = name
        self.numbers = itertools.count(1)
        self.scout_answers: dict[int, FromScout] = {}
        self.told: list[msgspec.Struct] = []
        self.tellers: set[int] = set()
        self.wire = Bell()
        self.wires: list[Waitable] = [self.wire]
        self._answers: list[FromScout] = []

    def tell(self, message: msgspec.Struct) -> None:
        self.told.append(message)
        self.tellers.add(threading.get_ident())
        if isinstance(message, SurveyHost):
            self._answers.append(Surveyed(number=message.number, survey=Survey(open=[], dead=[])))
            self.wire.ring()

    def attend(self) -> None:
        self.wire.hush()
        for answer in self._answers:
            self.scout_answers[answer.number] = answer
        self._answers.clear()

    def answer(self) -> None:
        """It has no address for links."""
        question = next(message for message in self.told if isinstance(message, ListenForHost))
        self._answers.append(ListensForHost(number=question.number, listening=Listening(places=[])))
        self.wire.ring()


class Searching:
    """A search, attended as the supervisor does it."""

    def __init__(self, directory: Path) -> None:
        self.lines: list[tuple[int, str]] = []
        self.clock = FakeClock()
        self.search = WaySearch(directory / "ways", self._tell, self._tell, self.clock)
        self.own, self.desk = OwnScout(), Elsewhere()

    def _tell(self, text: str) -> None:
        self.lines.append((threading.get_ident(), text))

    def begin(self) -> None:
        self.search.find(self.own, self.search.scout_of(self.desk, DESK))

    def attend_until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            assert select.select([self.search], [], [], WAIT_S)[0], "it says nothing"
            self.search.attend()

    @property
    def hears_desk(self) -> bool:
        """Whether something has come over the wire of the host, and makes the search readable."""
        return self.desk.wire.fileno() in dict(self.search._sources.poll(0))

    def close(self) -> None:
        self.search.close()
        self.desk.wire.close()


@pytest.fixture
def searching(tmp_path: Path) -> Iterator[Searching]:
    made = Searching(tmp_path)
    yield made
    made.close()


def test_r15_a_search_goes_on_beside_other_work(searching: Searching) -> None:
    search, desk, here = searching.search, searching.desk, threading.get_ident()
    assert search.is_idle
    searching.begin()
    searching.attend_until(lambda: desk.told)
    assert not search.is_idle
    assert searching.lines == []
    search.attend()  # nothing has come, which holds nobody up
    assert not select.select([search], [], [], 0)[0]
    desk.answer()
    searching.attend_until(lambda: search.is_idle)
    ((thread, line),) = searching.lines
    assert "no path for links between desk and tower was found" in line
    assert thread == here
    assert desk.tellers == {here}, "its wire belongs to one thread"
    assert here not in searching.own.threads
    assert any(isinstance(message, RestScout) for message in desk.told)
    assert search.links() == []
    assert search.between("tower", "desk").listener == "tower"
    desk.wire.ring()
    assert not searching.hears_desk, "nobody listens to the host any more"


def test_r15_ways_are_reviewed_once_for_each_occasion(searching: Searching) -> None:
    search, desk = searching.search, searching.desk
    assert not search.review("one loss", HOSTS)
    searching.attend_until(lambda: search.review("one loss", HOSTS))
    assert desk.told == [], "no way was ever looked for"
    searching.begin()
    searching.attend_until(lambda: desk.told)
    desk.answer()
    searching.attend_until(lambda: search.is_idle)
    desk.told.clear()
    assert search.review("one loss", HOSTS)
    assert not search.review("another loss", HOSTS)
    searching.attend_until(lambda: desk.told)
    desk.answer()
    searching.attend_until(lambda: search.review("another loss", HOSTS))


def test_r15_a_search_holds_up_those_alone_that_need_it_and_not_for_long(searching: Searching) -> None:
    """Running requests wait for it when a stage is lost."""
    search = searching.search
    searching.begin()
    assert not search.is_settled(HOSTS)
    assert not search.is_settled(["attic", "desk", "tower"])
    assert search.is_settled(["attic", "tower"])
    assert search.is_settled(["desk"])
    searching.clock.advance(PATIENCE_S - 0.1)
    assert not search.is_settled(HOSTS)
    searching.clock.advance(0.1)
    assert search.is_settled(HOSTS)
    assert not search.is_idle
    assert not search.review("a loss", HOSTS), "which has just begun"
    searching.clock.advance(PATIENCE_S)
    assert search.review("a loss", HOSTS)


def test_r15_a_review_goes_before_searches_that_wait(searching: Searching) -> None:
    search, desk, attic = searching.search, searching.desk, Elsewhere("attic")
    searching.begin()
    searching.attend_until(lambda: desk.told)
    search.find(searching.own, search.scout_of(attic, msgspec.structs.replace(DESK, host="attic")))
    search.review("a loss", HOSTS)
    desk.answer()
    desk.told.clear()
    searching.attend_until(lambda: any(isinstance(message, ListenForHost) for message in desk.told))
    assert attic.told == []
    desk.answer()
    searching.attend_until(lambda: attic.told)
    attic.wire.close()


def test_r15_a_host_that_is_lost_meanwhile_holds_nobody_up(searching: Searching) -> None:
    searching.begin()
    searching.attend_until(lambda: searching.desk.told)
    searching.desk.wires = []
    searching.search.attend()
    searching.attend_until(lambda: searching.search.is_idle)
    assert [line for _, line in searching.lines] == [
        "the paths between desk and tower were not searched: the connection to the host desk is broken."
    ]


def test_r15_a_broken_connection_of_a_host_that_was_asked_is_not_news_while_others_are_asked(
    searching: Searching,
) -> None:
    attic = Elsewhere("attic")
    searching.begin()
    searching.search.find(
        searching.own, searching.search.scout_of(attic, msgspec.structs.replace(DESK, host="attic"))
    )
    searching.attend_until(lambda: searching.desk.told)
    searching.desk.attend = lambda: None  # type: ignore[method-assign]
    searching.desk.wires = []
    searching.desk.wire.ring()  # and for ever
    searching.attend_until(lambda: attic.told)
    assert not searching.hears_desk
    searching.desk.wires = [searching.desk.wire]
    searching.search.attend()
    assert searching.hears_desk, "it is back"
    attic.wire.close()


class WatchedLines:
    """The lines of a search, which goes on to its end when all that it has said is shown."""

    def __init__(self, search: WaySearch) -> None:
        self._lines, self._end = search._lines, search._jobs.end
        self._may_end, self._has_ended = threading.Event(), threading.Event()
        self.put, self.get = self._lines.put, self._lines.get

    def empty(self) -> bool:
        is_empty = self._lines.empty()
        if is_empty:
            self._may_end.set()
            assert self._has_ended.wait(WAIT_S)
        return is_empty

    def find(self, one: object, other: object) -> None:
        assert self._may_end.wait(WAIT_S)
        self.put((print, "the last word"))

    def end(self, number: int) -> None:
        self._end(number)
        self._has_ended.set()


def test_r15_whoever_knows_of_the_end_of_a_search_has_been_shown_what_it_said(
    searching: Searching, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = WatchedLines(searching.search)
    monkeypatch.setattr(searching.search, "_lines", watched)
    monkeypatch.setattr(searching.search._finder, "find", watched.find)
    monkeypatch.setattr(searching.search._jobs, "end", watched.end)
    searching.begin()
    while not searching.search.is_idle:
        searching.search.attend()
    assert capsys.readouterr().out == "the last word\n"


def test_a_search_that_fails_in_a_way_nobody_thought_of_is_settled_too(
    searching: Searching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(peer: PeerName) -> Listening:
        raise RuntimeError("surprise")

    monkeypatch.setattr(searching.own, "listen", fail)
    searching.begin()
    searching.attend_until(lambda: searching.desk.told)
    searching.desk.answer()
    searching.attend_until(lambda: searching.search.is_idle)
    assert any("surprise" in line for _, line in searching.lines)


def test_the_end_does_not_wait_for_a_host_that_does_not_answer(searching: Searching) -> None:
    searching.begin()
    searching.attend_until(lambda: searching.desk.told)
