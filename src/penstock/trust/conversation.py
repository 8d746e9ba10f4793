"""The interface between a handshake on a connection and the socket that carries its bytes.

A conversation knows no socket and no clock, so that every order of bytes can be tested. Its driver
sends what it has to say, hands it what arrives, never more than it wants, and reports the end.
"""

from __future__ import annotations

from typing import Protocol

from penstock.errors import LinkClosedError, ProtocolError

WELCOME = b"\x06"  # of `Welcoming`


class Conversation(Protocol):
    """One side of the first words on a connection."""

    @property
    def wanted(self) -> int:
        """The most bytes that `receive` takes next; 0 when all is said."""
        ...

    def take_outgoing(self) -> bytes:
        """Return what is to be sent now, once."""
        ...

    def receive(self, data: bytes) -> None:
        """Take what has arrived.

        Raises:
            PenstockError: the peer is refused; what `take_outgoing` then returns tells it so.
        """
        ...

    def end_of_stream(self) -> None:
        """Take the end of the stream: the peer has closed the connection though more was wanted.

        Raises:
            PenstockError: always; it says what the peer may have missed.
        """
        ...

    def abandon(self) -> None:
        """Release what is held for the peer: the connection is closed before all is said and sent."""
        ...


class Welcoming:
    """The last word of the side that accepts a link, once the other has proved itself; a `Conversation`.

    What the dialler sends of its own comes only behind it. So a peer that has not proved itself has no reason
    to send much (`trust.door`), and a dialler that is refused knows it before its link counts as open.
    """

    wanted = 0

    def __init__(self) -> None:
        self._outgoing = WELCOME

    def take_outgoing(self) -> bytes:
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def receive(self, data: bytes) -> None:
        raise AssertionError("no bytes are expected")

    def end_of_stream(self) -> None:
        raise AssertionError("no bytes are expected")

    def abandon(self) -> None:
        """Do nothing: nothing is held."""


class Welcomed:
    """The side that has dialled and proved itself, and waits for that word; a `Conversation`."""

    def __init__(self) -> None:
        self.wanted = len(WELCOME)

    def take_outgoing(self) -> bytes:
        return b""

    def receive(self, data: bytes) -> None:
        if data != WELCOME:
            raise ProtocolError(
                "the other side of a link refused it.",
                remedy="Run the same version of Penstock on all hosts.",
                code="not_a_link",
            )
        self.wanted = 0

    def end_of_stream(self) -> None:
        raise LinkClosedError("the other side closed a link before it was open.")

    def abandon(self) -> None:
        self.wanted = 0
