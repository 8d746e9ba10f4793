"""A connection between head and agent that breaks: what runs goes on, or is ended; never anything between."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from agent_pairs import LINK, Pair, StandInModels, parties
from penstock.errors import LinkClosedError
from penstock.hosts.agent import KEEP_RANKS_S, Agent, AllowedNames
from penstock.hosts.agent_messages import ToAgent, ToHead, TouchMember
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.member import Member
from penstock.hosts.member_watch import MemberWatch
from penstock.hosts.remote_host import SILENCE_LIMIT_S
from penstock.process.child import Alive, Ready
from penstock.process.control import Stop
from stand_in_hosts import LOADED, StandInHost


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_r15_with_a_connection_that_breaks_nothing_is_lost(pair: Pair) -> None:
    """Members run on. What was asked and said meanwhile, or under way, comes when the worker is back."""
    member, own = pair.start()
    accepted = pair.host.accept("ring", LINK, parties("desk", "rank-2"))
    pair.serve()
    member.hand(Stop())  # under way when the connection breaks
    own.say(Ready(epoch=0, rank=LOADED))
    pair.break_connection()
    assert not pair.host.is_there
    assert pair.agent.has_members
    accepted.end()
    own.say(Alive())
    pair.serve()
    assert member.read_status() == []
    assert pair.join_again()
    pair.host.pump()
    assert pair.host.is_there
    assert [type(event) for event in member.read_status()] == [Ready, Alive]
    assert own.handed == [Stop()]
    assert own.done == []
    assert (member.exit_code, pair.lost, pair.num_broken) == (None, [], 1)
    ((_, end),) = pair.own.made
    assert end.happened == ["end"]
    assert pair.own.num_forgotten == 1, "at the beginning"


def test_r15_a_member_is_waited_for_at_the_connection_of_now(pair: Pair) -> None:
    member, own = pair.start()
    watch, heard = MemberWatch(lambda member, event: heard.append(event)), list[object]()
    watch.add(member)
    pair.break_connection()
    for _ in range(2):  # the bell, and the broken connection
        for each in watch.wait(0.0)[0]:
            watch.hear(each)
    assert watch.wait(0.0)[0] == set(), "a broken connection is not news for ever"
    assert pair.join_again()
    own.say(Alive())
    pair.serve()
    while not heard:
        members, _ = watch.wait(10.0)
        assert members == {member}
        watch.hear(member)
    assert heard == [Alive()]
    own.leave(0)
    pair.serve()
    watch.close()


class Successor:
    """A connection with news, which can take the number of one that was closed."""

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        self._ends[1].send(b"x")

    @contextlib.contextmanager
    def numbered(self, number: int) -> Iterator[socket.socket]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
        moved = socket.socket(fileno=os.dup2(self._ends[0].fileno(), number))
        with self._ends[0], self._ends[1], moved:
            yield moved


def watch_of(member: Member) -> MemberWatch:
    """What waits for a member, as the supervisor does."""
    watch = MemberWatch(lambda member, event: None)
    watch.add(member)
    watch.hear(member)
    return watch


def test_r15_the_number_of_a_lost_hosts_connection_may_be_given_to_what_is_watched_next(pair: Pair) -> None:
    member, _ = pair.start()
    watch, successor, number = watch_of(member), Successor(), pair.head_wire.fileno()
    pair.host.distrust(LinkClosedError("it talks nonsense."))
    with successor.numbered(number) as source:
        watch.watch(source)
        watch.hear(member)
        assert watch.wait(10.0)[1] == {source}
        watch.unwatch(source)
    watch.close()


def test_r15_the_number_of_a_replaced_connection_may_be_given_to_what_is_watched_next(pair: Pair) -> None:
    """The worker has noticed before the head that its connection was broken."""
    member, own = pair.start()
    watch, successor, number = watch_of(member), Successor(), pair.head_wire.fileno()
    pair.agent_wire.give_up("it was reset.")
    pair.agent.serve(0.0)
    assert pair.join_again()
    with successor.numbered(number) as source:
        watch.watch(source)
        assert watch.wait(10.0)[1] == {source}
        own.say(Ready(epoch=0, rank=LOADED))
        pair.serve()
        while not member.is_ready:
            watch.hear(*watch.wait(10.0)[0])
        watch.unwatch(source)
    own.leave(0)
    pair.serve()
    watch.close()


def test_r15_a_host_that_does_not_come_back_in_time_is_lost_and_ends_its_ranks(pair: Pair) -> None:
    member, own = pair.start()
    pair.tend(0.0)
    pair.break_connection()
    for second in range(1, round(SILENCE_LIMIT_S) + 1):
        pair.tend(float(second))
        assert (pair.lost, member.exit_code) == ([], None)
    pair.tend(SILENCE_LIMIT_S + 1.0)
    (error,) = pair.lost
    assert error.message == "it was reset. Since then it has sent nothing for 4.0 s."
    assert member.exit_code == 1
    assert pair.num_broken == 1
    pair.clock.advance(KEEP_RANKS_S - 1.0)
    pair.serve()
    assert own.done == []
    pair.serve()
    assert own.done == ["kill_now", "close"]
    assert not pair.agent.has_members
    assert pair.models.ended == [1]
    assert not pair.join_again(), "the talk is over"
    assert pair.host.is_there


def test_r15_ranks_that_the_head_has_given_up_are_ended_when_their_worker_is_back(pair: Pair) -> None:
    _, own = pair.start()
    pair.host.keep_spare(2)
    pair.tend(0.0)
    pair.serve()
    pair.break_connection()
    for second in range(1, 6):
        pair.tend(float(second))
    assert len(pair.lost) == 1
    assert not pair.join_again()
    assert own.done == ["kill_now", "close"]
    assert pair.own.num_forgotten == 2, "epochs may have the names of before"
    _, started = pair.start()
    assert started.done == []
    pair.host.keep_spare(2)
    pair.serve()
    pair.host.pump()
    assert pair.host.keep_spare(2) == pair.own.spare_bytes, "the spare process has outlived all that"


def test_r15_a_worker_that_begins_anew_has_lost_its_ranks_and_that_is_known_at_once(pair: Pair) -> None:
    """It was killed, and started again."""
    member, _ = pair.start()
    pair.break_connection()
    ends = socket.socketpair()
    wire: AgentWire[ToAgent] = AgentWire(ends[1], ToAgent)
    other = Agent(StandInHost("desk"), wire, StandInModels(), AllowedNames(), pair.clock)
    assert not pair.attach(AgentWire(ends[0], ToHead))
    assert (len(pair.lost), pair.num_broken) == (1, 1)
    assert "its worker has restarted" in member.end().message
    assert pair.host.is_there
    other.close()


def test_a_member_that_is_reaped_as_it_speaks_is_not_heard_any_more(pair: Pair) -> None:
    _, own = pair.start()
    own.say(Alive())
    pair.host.tell(TouchMember(number=1, what="forget"))
    pair.serve()
    assert own.done == ["kill_now", "close"]
