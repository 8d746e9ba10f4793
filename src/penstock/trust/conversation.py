"""The seam between what is said when a connection opens and the socket that carries it.

A conversation knows no socket and no clock, so that every order of bytes can be tested. Whoever drives it
sends what it has to say, hands it what arrives, never more than it wants, and reports the end.
"""

from __future__ import annotations

from typing import Protocol


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
        """The peer has closed the connection though more was wanted.

        Raises:
            PenstockError: always; it says what the peer may have missed.
        """
        ...

    def abandon(self) -> None:
        """The connection is closed before all is said: let go of what was held for the peer."""
        ...
