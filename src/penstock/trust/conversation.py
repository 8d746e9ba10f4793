"""The interface between an exchange of proofs of identity and the socket that carries its bytes.

A conversation knows no socket and no clock, so that every order of bytes can be tested. Its driver, such as
`trust.door`, sends the bytes that the conversation has to send. It hands over the bytes that arrive, never
more than are wanted, and reports the end of the stream.
"""

from __future__ import annotations

from typing import Protocol

from penstock.errors import LinkClosedError, ProtocolError

WELCOME = b"\x06"  # the byte that `Welcoming` sends


class Conversation(Protocol):
    """One side of a handshake on a connection."""

    @property
    def wanted(self) -> int:
        """The most bytes that `receive` takes next; 0: the handshake needs no more bytes."""
        ...

    def take_outgoing(self) -> bytes:
        """Return the bytes that are to be sent now; each byte is returned only once."""
        ...

    def receive(self, data: bytes) -> None:
        """Take bytes that have arrived.

        Raises:
            PenstockError: the peer is refused; `take_outgoing` then returns what the peer is told, if
                anything.
        """
        ...

    def end_of_stream(self) -> None:
        """Take the end of the stream: the peer has closed the connection, though more bytes were wanted.

        Raises:
            PenstockError: always; the error suggests why the peer may have closed it.
        """
        ...

    def abandon(self) -> None:
        """Release what is held for the peer, since the connection is closed before the handshake is over."""
        ...


class Welcoming:
    """The last message of the side that accepts a link, once the dialler has proved itself.

    Implements `Conversation`. The dialler sends its own data only after this message. A peer that has not
    proved itself therefore has no reason to send much (`trust.door`), and a dialler that is refused notices
    it before its link counts as open.
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
    """The side that has dialled and proved itself, and waits for the welcome. Implements `Conversation`."""

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
