"""A talk of head and agent that outlasts its connections: every message comes, and comes once."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import msgspec
import pytest

from penstock.hosts.agent_messages import (
    AgentHello,
    Heartbeat,
    KeepSpare,
    SpareKept,
    TalkBegins,
    TalkGoesOn,
    ToAgent,
    ToHead,
)
from penstock.hosts.agent_wire import AgentWire
from penstock.hosts.lasting_wire import MOST_KEPT, LastingWire
from penstock.hosts.resources import HostResources

RESOURCES = HostResources(num_cpus=2, free_bytes=1, num_gpus=0, name="desk")


class Talk:
    """Both ends, and one connection after the other.

    Attributes:
        come_to_head, come_to_agent: messages of the talk, in order.
    """

    def __init__(self) -> None:
        agent_wire, head_wire = self._connection()
        self.agent: LastingWire[ToAgent] = LastingWire(agent_wire, "a talk")
        self.head: LastingWire[ToHead] = LastingWire(head_wire, "a talk")
        self.come_to_head: list[int] = []
        self.come_to_agent: list[int] = []
        self.welcomes: list[msgspec.Struct] = []
        self.head.begin()

    def _connection(self) -> tuple[AgentWire[ToAgent], AgentWire[ToHead]]:
        self.ends = socket.socketpair()
        return AgentWire(self.ends[0], ToAgent), AgentWire(self.ends[1], ToHead)

    def say_to_head(self, number: int) -> None:
        self.agent.send(SpareKept(own_bytes=number))

    def say_to_agent(self, number: int) -> None:
        self.head.send(KeepSpare(threads=number))

    def hear_at_head(self) -> None:
        received = self.head.receive()
        self.come_to_head += [message.own_bytes for message in received if isinstance(message, SpareKept)]

    def hear_at_agent(self) -> None:
        for message in self.agent.receive():
            if isinstance(message, KeepSpare):
                self.come_to_agent.append(message.threads)
            elif isinstance(message, TalkBegins | TalkGoesOn):
                self.welcomes.append(message)

    def break_connection(self) -> None:
        """What has not been read is lost, on both sides."""
        self.agent.connection.give_up("it is broken.")
        self.head.connection.give_up("it is broken.")

    def hello(self) -> AgentHello:
        return AgentHello(
            resources=RESOURCES, kinds=[], talk=self.agent.talk, num_received=self.agent.num_received
        )

    def join_again(self) -> None:
        """The worker comes back, and the head knows the talk."""
        agent_wire, head_wire = self._connection()
        hello = self.hello()
        self.agent.reconnect(agent_wire)
        assert self.head.knows(hello)
        self.head.go_on(head_wire, hello.num_received)

    def join_another_head(self) -> None:
        agent_wire, head_wire = self._connection()
        hello = self.hello()
        self.agent.reconnect(agent_wire)
        self.head.close()
        self.head = LastingWire(head_wire, hello.talk)
        self.head.begin()

    def close(self) -> None:
        self.agent.close()
        self.head.close()


@pytest.fixture
def talk() -> Iterator[Talk]:
    made = Talk()
    yield made
    made.close()


def test_before_the_head_says_that_the_talk_begins_all_waits(talk: Talk) -> None:
    talk.say_to_head(1)
    talk.hear_at_head()
    assert talk.come_to_head == []
    talk.hear_at_agent()
    talk.hear_at_head()
    assert talk.come_to_head == [1]
    assert talk.welcomes == [TalkBegins()]


def test_r15_what_is_lost_with_a_connection_or_said_without_one_comes_over_the_next(talk: Talk) -> None:
    talk.hear_at_agent()
    talk.say_to_agent(1)
    talk.say_to_head(1)
    talk.hear_at_agent()
    talk.hear_at_head()
    talk.say_to_agent(2)
    talk.say_to_head(2)
    talk.break_connection()
    talk.say_to_agent(3)
    talk.say_to_head(3)
    assert talk.head.failure is not None
    talk.join_again()
    talk.hear_at_agent()
    talk.hear_at_head()
    talk.say_to_agent(4)
    talk.say_to_head(4)
    talk.hear_at_agent()
    talk.hear_at_head()
    assert (talk.come_to_agent, talk.come_to_head) == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert talk.welcomes == [TalkBegins(), TalkGoesOn(num_received=1)]


@pytest.mark.parametrize("seed", range(20))
def test_r15_every_message_comes_once_wherever_connections_break(talk: Talk, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(200):
        talk.say_to_head(number)
        talk.say_to_agent(number)
        if chance.random() < 0.5:
            talk.hear_at_agent()
        if chance.random() < 0.5:
            talk.hear_at_head()
        if chance.random() < 0.3:
            talk.agent.send_heartbeat()
            talk.head.send_heartbeat()
        if chance.random() < 0.1:
            talk.break_connection()
            talk.join_again()
    for _ in range(2):
        talk.hear_at_agent()
        talk.hear_at_head()
    assert talk.come_to_head == talk.come_to_agent == list(range(200))


def test_what_has_come_is_not_kept(talk: Talk) -> None:
    for number in range(3):
        talk.say_to_agent(number)
    talk.hear_at_agent()
    assert talk.head.knows(msgspec.structs.replace(talk.hello(), num_received=0))
    talk.agent.send_heartbeat()
    talk.hear_at_head()
    assert not talk.head.knows(msgspec.structs.replace(talk.hello(), num_received=0)), (
        "it cannot be said again"
    )
    assert talk.head.knows(talk.hello())


@pytest.mark.parametrize("num_received", [-1, 4])
def test_r15_an_agent_that_has_heard_what_was_not_said_is_not_known(talk: Talk, num_received: int) -> None:
    for number in range(3):
        talk.say_to_agent(number)
    assert not talk.head.knows(msgspec.structs.replace(talk.hello(), num_received=num_received))
    assert not talk.head.knows(msgspec.structs.replace(talk.hello(), talk="another"))


def test_r15_with_a_head_that_does_not_know_it_the_talk_begins_anew(talk: Talk) -> None:
    talk.hear_at_agent()
    talk.say_to_agent(1)
    talk.hear_at_agent()
    talk.break_connection()
    talk.say_to_head(7)  # of what the next head knows nothing
    talk.join_another_head()
    talk.agent.send_heartbeat()  # before it knows
    talk.say_to_agent(2)
    talk.hear_at_agent()
    talk.say_to_head(8)
    talk.hear_at_head()
    assert talk.head.failure is None
    assert (talk.come_to_agent, talk.come_to_head) == ([1, 2], [8])
    talk.agent.send_heartbeat()
    talk.hear_at_head()
    assert talk.head.failure is None
    assert talk.agent.num_received == 1


def test_a_talk_that_was_forgotten_is_not_known_any_more(talk: Talk) -> None:
    talk.hear_at_agent()
    talk.break_connection()
    talk.say_to_head(1)
    talk.agent.forget()
    talk.say_to_head(2)
    assert not talk.head.knows(talk.hello())
    talk.join_another_head()
    talk.say_to_head(3)
    talk.hear_at_agent()
    talk.hear_at_head()
    assert talk.come_to_head == [3]


def test_r15_who_says_that_more_has_come_than_was_sent_is_left(talk: Talk) -> None:
    talk.agent.connection.send(Heartbeat(num_received=1))
    talk.hear_at_head()
    assert "acknowledges more messages than were sent" in str(talk.head.failure)


def test_r15_who_never_says_that_anything_has_come_is_left(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.hosts.lasting_wire.MOST_KEPT", 10)
    for number in range(10):
        talk.say_to_agent(number)
    assert talk.head.failure is None
    talk.say_to_agent(10)
    assert "has not acknowledged 10 messages" in str(talk.head.failure)
    assert MOST_KEPT > 10
