"""The interface of channels, over which whole messages travel: plans, results and token returns.

Three modules implement it: `pipeline.links.plan_channel` over zmq and in memory,
`pipeline.links.ring_channel` over a ring, and `pipeline.links.stream_channel` between hosts. `rank.rank`
gives channels to `pipeline.token_return` and `pipeline.ports`. A channel carries bytes (encoded by msgspec),
never tensors.
"""

from __future__ import annotations

from typing import Any, Protocol

from penstock.errors import LinkClosedError, WaitTimeoutError

SEND_TIMEOUT_S = 60.0


class MessageChannel(Protocol):
    """One end of an ordered, loss-free channel of messages between two threads or processes.

    It goes in both directions, except over a ring: there one end only sends, and the other only receives.
    """

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Queue one message, given as its bytes; wait while there is no room.

        Args:
            timeout_s: the longest wait while the queue is full or the other end has not connected yet; 0: do
                not wait.

        Raises:
            LinkClosedError: the other end is gone, or this one has been closed.
            WaitTimeoutError: the queue did not take it in time.
        """
        ...

    def recv(self, timeout_s: float | None) -> bytes | None:
        """Return the next message, or None when none came in time.

        Args:
            timeout_s: 0: do not wait; None: wait until a message comes or the other end is gone.

        Raises:
            LinkClosedError: no message is left and the other end is gone.
        """
        ...

    def close(self) -> None:
        """Close this end, so that the other learns that nothing follows.

        Messages sent before are still delivered if the other end takes them within a second or so.
        """
        ...


class PolledChannel(MessageChannel, Protocol):
    """A channel between processes that can be polled, so that a thread waits for several channels at once."""

    def pollables(self) -> list[Any]:
        """Return zmq sockets or descriptors to poll.

        One of them is readable while there is a message, or once the peer has gone.
        """
        ...

    def filenos(self) -> list[int]:
        """Return file descriptors, for an event loop, that become readable when something *may* have come.

        Edge-triggered: look for messages after each event and each send.
        """
        ...


def send_of_step(channel: MessageChannel, frame: bytes, what: str, step_id: int) -> None:
    """Send a message of a step; errors of `MessageChannel.send` then name `what` and the step."""
    try:
        channel.send(frame)
    except (LinkClosedError, WaitTimeoutError) as error:
        raise type(error)(f"{error.message} The message was {what} of step {step_id}.") from error
