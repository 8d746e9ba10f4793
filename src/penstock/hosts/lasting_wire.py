"""A wire between head and agent that outlasts its connection.

Each side keeps a message until the other side acknowledges it, and counts the messages that it receives. When
the connection breaks and the agent connects again, each side sends what the other one lacks. The processes on
the agent's host run on meanwhile.

    AgentHello(talk, num_received)          ──▶
                                            ◀──     TalkGoesOn(num_received)   if the head knows the talk
                                                    TalkBegins()               if not: both begin anew
                                                    NotNeeded()                if the host is not needed yet
    messages, each kept until acknowledged  ◀─▶     messages
    Heartbeat(num_received) about each second ◀─▶   Heartbeat(num_received)

A *talk* is the numbered messages between a head and an agent, over any number of connections. Messages about
the connection itself, such as those that are named above, are not in it. `Agent` and `RemoteHost` have one
end each.
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

MOST_KEPT = 20_000  # messages: far more than are sent between two heartbeats, or while a host is away

_OF_CONNECTION = (  # about the connection and not of the talk: neither kept nor counted
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
    """One end of a wire between head and agent that outlasts its connection.

    It keeps each message until the other side acknowledges it, to send it again over the next connection.

    Args:
        connection: the first connection. The wire closes it, and all later ones.
        talk: name of the talk (see the module's docstring).

    Attributes:
        connection: the present connection; while there is none, the last one, which is broken.
        num_received: how many messages of the talk have arrived here.
        reception: at the agent, the head's answer to its hello: "welcome", "not_needed", or still "awaited".
        is_over: the talk was ended here (`forget`); messages are dropped until there is another connection.
    """

    def __init__(self, connection: AgentWire[Incoming], talk: str) -> None:
        self.connection = connection
        self.talk = talk
        self.num_received = 0
        self.reception: Reception = "awaited"
        self._kept: deque[msgspec.Struct] = deque()  # messages that the other side may lack
        self._num_dropped = 0  # number of earlier messages, which the other side has received
        self._has_begun = False
        self._is_open = False  # over this connection each side knows how many messages the other has received
        self.is_over = False

    @property
    def failure(self) -> PeerError | None:
        """The error that broke the present connection; None: it is not broken."""
        return self.connection.failure

    def send(self, message: msgspec.Struct) -> None:
        """Send a message of the talk now, or once both sides have agreed where the talk goes on. Never fails.

        The message is dropped if the talk was ended here.
        """
        if self.is_over:
            return
        # Kept before it is sent: if the connection breaks, the message is sent again over the next one.
        self._kept.append(message)
        if self._is_open:
            self.connection.send(message)
        if len(self._kept) > MOST_KEPT:
            self.connection.give_up(f"it has not acknowledged {MOST_KEPT} messages.")

    def send_heartbeat(self, *messages: msgspec.Struct) -> None:
        """Send a sign of life, which also acknowledges the messages that have arrived.

        Until both sides have agreed how far the talk is, it acknowledges nothing.

        Args:
            messages: messages of the talk, to be sent together with it.
        """
        with self.together():
            self.connection.send(Heartbeat(num_received=self.num_received if self._is_open else 0))
            for message in messages:
                self.send(message)

    def together(self) -> AbstractContextManager[None]:
        """Hold back messages that are sent in the `with` block, and send them all at its end."""
        return self.connection.together()

    def receive(self) -> list[Incoming]:
        """Return all messages that have arrived, without waiting, and act on those about the connection.

        Those, such as a `Heartbeat` or `TalkGoesOn`, are returned too.
        """
        return list(self._received())

    def begin(self) -> None:
        """Begin the talk; called at the head, once the agent has said hello over the present connection."""
        # Sent before the messages that are kept: the agent counts messages from here on.
        self.connection.send(TalkBegins())
        self._open(0)

    def knows(self, hello: AgentHello) -> bool:
        """Return whether the talk can go on with the agent that says hello.

        It can if the hello names this talk, and all messages that the agent lacks are still kept here. The
        agent must not claim more messages than were sent.
        """
        num_sent = self._num_dropped + len(self._kept)
        return self.talk == hello.talk and self._num_dropped <= hello.num_received <= num_sent

    def go_on(self, connection: AgentWire[Incoming], num_received: int) -> None:
        """Continue the talk over another connection, and send what the agent lacks; called at the head.

        Args:
            num_received: how many messages of the talk the agent has received, as its hello says.
        """
        self._replace(connection)
        connection.send(TalkGoesOn(num_received=self.num_received))
        self._open(num_received)

    def reconnect(self, connection: AgentWire[Incoming]) -> None:
        """Use another connection; called at the agent, which sends its hello over it next.

        Messages of the talk wait until the head has answered whether the talk goes on; heartbeats do not.
        """
        self._replace(connection)
        self.is_over = False

    def forget(self) -> None:
        """End the talk, and drop all messages that the other side may lack; the next talk gets a new name."""
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
        """Send the kept messages that the other side lacks; from now on `send` sends each one immediately.

        Args:
            num_received: how many messages of the talk the other side has received.
        """
        self._drop(num_received)
        self._is_open = self._has_begun = True
        for message in self._kept:
            self.connection.send(message)

    def _drop(self, num_received: int) -> None:
        """Drop the kept messages that the other side has received, given how many it has received in all."""
        if not 0 <= num_received - self._num_dropped <= len(self._kept):
            if num_received > self._num_dropped:
                self.connection.give_up("it acknowledges more messages than were sent.")
            return
        for _ in range(num_received - self._num_dropped):
            self._kept.popleft()
        self._num_dropped = num_received

    def _replace(self, connection: AgentWire[Incoming]) -> None:
        # The caller has taken the old connection out of its selectors: another file may get its number now.
        self.connection.close()
        self.connection = connection
        self.reception = "awaited"
        self._is_open = False

    def _begin_anew(self) -> None:
        self._kept.clear()
        self._num_dropped = self.num_received = 0
        self._has_begun = False


def new_talk() -> str:
    """Return a random name for a new talk, which no other talk has."""
    return secrets.token_hex(16)
