"""A wire between head and agent that outlasts its connection.

Each side keeps what it sends until the other one says that it has it, and counts what it receives. When the
connection breaks and the worker has joined again, both send once more what the other one lacks: whatever runs
on the worker's host goes on as if nothing had happened.

    AgentHello(talk, num_received)          ──▶
                                            ◀──     TalkGoesOn(num_received)   if the head knows the talk
                                                    TalkBegins()               if not: nothing of before holds
    messages, each kept until it has arrived ◀─▶    messages
    Heartbeat(num_received) about each second ◀─▶   Heartbeat(num_received)

A *talk* is all that a head and an agent say to each other while both run, over any number of connections.
`Agent` and `RemoteHost` have one end each.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Generic, Literal, TypeVar

import msgspec

from penstock.errors import PeerError
from penstock.hosts.agent_messages import AgentHello, Heartbeat, Leaving, NotNeeded, TalkBegins, TalkGoesOn
from penstock.hosts.agent_wire import AgentWire

MOST_KEPT = 20_000  # messages: far beyond what is said between two heartbeats, or while a host is away

_OF_CONNECTION = (  # neither kept nor counted
    AgentHello,
    TalkBegins,
    TalkGoesOn,
    NotNeeded,
    Heartbeat,
    Leaving,
)

Incoming = TypeVar("Incoming")
Reception = Literal["awaited", "welcome", "not_needed"]


class LastingWire(Generic[Incoming]):
    """One end of a wire that outlasts its connection.

    Args:
        connection: the first one. Belongs to the wire, as all later ones do.
        talk: name of the talk.

    Attributes:
        connection: the present one; where it is broken, still that one.
        num_received: messages of the talk that have come.
        reception: what the head has said to the agent over the connection.
        is_over: the talk has ended (`forget`), and nothing is sent before there is another connection.
    """

    def __init__(self, connection: AgentWire[Incoming], talk: str) -> None:
        self.connection = connection
        self.talk = talk
        self.num_received = 0
        self.reception: Reception = "awaited"
        self._kept: deque[msgspec.Struct] = deque()  # that the other side may lack
        self._num_dropped = 0  # that were sent before those
        self._has_begun = False
        self._is_open = False  # over this connection both sides know where the talk is
        self.is_over = False

    @property
    def failure(self) -> PeerError | None:
        """The reason why nothing crosses now; None while the connection stands."""
        return self.connection.failure

    def send(self, message: msgspec.Struct) -> None:
        """Send a message of the talk, as soon as there is a connection. Never fails."""
        if self.is_over:
            return
        # Kept before it is sent: what breaks with the connection is sent again over the next one.
        self._kept.append(message)
        if self._is_open:
            self.connection.send(message)
        if len(self._kept) > MOST_KEPT:
            self.connection.give_up(f"it has not acknowledged {MOST_KEPT} messages.")

    def send_heartbeat(self, *messages: msgspec.Struct) -> None:
        """Say that this side is there, and what has come; before the talk goes on it means nothing.

        Args:
            messages: of the talk, sent along with it.
        """
        with self.together():
            self.connection.send(Heartbeat(num_received=self.num_received if self._is_open else 0))
            for message in messages:
                self.send(message)

    def together(self) -> AbstractContextManager[None]:
        """Let what is sent in the body of a `with` leave at its end."""
        return self.connection.together()

    def receive(self) -> list[Incoming]:
        """Return what has come, those messages too that belong to the connection alone."""
        return list(self._received())

    def begin(self) -> None:
        """Tell the other side that the talk begins: for the head, over a connection that has said hello."""
        # Before anything that is kept: the agent counts messages from here on.
        self.connection.send(TalkBegins())
        self._open(0)

    def knows(self, hello: AgentHello) -> bool:
        """Return whether an agent that says hello can go on where this end is."""
        num_sent = self._num_dropped + len(self._kept)
        return self.talk == hello.talk and self._num_dropped <= hello.num_received <= num_sent

    def go_on(self, connection: AgentWire[Incoming], num_received: int) -> None:
        """Go on over another connection: for the head, whose agent has received so many messages."""
        self._replace(connection)
        connection.send(TalkGoesOn(num_received=self.num_received))
        self._open(num_received)

    def reconnect(self, connection: AgentWire[Incoming]) -> None:
        """Use another connection: for the agent, which says hello over it and hears whether the talk goes on.

        What is sent meanwhile waits.
        """
        self._replace(connection)
        self.is_over = False

    def forget(self) -> None:
        """End the talk: what the other side may lack is not sent any more. The next one has another name."""
        self._begin_anew()
        self.talk = new_talk()
        self._is_open, self.is_over = False, True

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self.connection.close()
        self._is_open = False

    def _received(self) -> Iterator[Incoming]:
        for message in self.connection.receive():
            if isinstance(message, TalkBegins):
                self.reception = "welcome"
                if self._has_begun:
                    self._begin_anew()
                self._open(0)
            elif isinstance(message, TalkGoesOn):
                self.reception = "welcome"
                self._open(message.num_received)
            elif isinstance(message, NotNeeded):
                self.reception = "not_needed"
                self.connection.give_up("the head does not need this host yet.")
            elif isinstance(message, Heartbeat):
                self._drop(message.num_received)
            elif not isinstance(message, _OF_CONNECTION):
                self.num_received += 1
            yield message

    def _open(self, num_received: int) -> None:
        """Send what the other side lacks, which has so many messages, and from now on send at once."""
        self._drop(num_received)
        self._is_open = self._has_begun = True
        for message in self._kept:
            self.connection.send(message)

    def _drop(self, num_received: int) -> None:
        """Drop what the other side has received."""
        if not 0 <= num_received - self._num_dropped <= len(self._kept):
            if num_received > self._num_dropped:
                self.connection.give_up("it acknowledges more messages than were sent.")
            return
        for _ in range(num_received - self._num_dropped):
            self._kept.popleft()
        self._num_dropped = num_received

    def _replace(self, connection: AgentWire[Incoming]) -> None:
        # Nothing may wait at the old connection any more: its number may go to another file at once.
        self.connection.close()
        self.connection = connection
        self.reception = "awaited"
        self._is_open = False

    def _begin_anew(self) -> None:
        self._kept.clear()
        self._num_dropped = self.num_received = 0
        self._has_begun = False


def new_talk() -> str:
    """Return a name for a talk that no other one has."""
    return secrets.token_hex(16)
