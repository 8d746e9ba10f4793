"""The interface of channels, over which whole messages travel: plans, results and token returns.

`pipeline.links.plan_channel` implements it over zmq and in memory, `pipeline.links.ring_channel` in one
direction over a ring, `pipeline.links.stream_channel` between hosts; `pipeline.token_return` and
`pipeline.ports` are given one. It carries bytes (msgspec), never tensors.
"""

from __future__ import annotations

from typing import Any, Protocol

from penstock.errors import LinkClosedError, WaitTimeoutError

SEND_TIMEOUT_S = 60.0


class MessageChannel(Protocol):
    """One end of a two-way, ordered, loss-free channel of messages between two threads or processes."""

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Queue one message, given as its bytes; wait while there is no room.

        Args:
            timeout_s: for a queue that is full or has no other end yet; 0 only tries.

        Raises:
            LinkClosedError: the other end is gone, or this one has been closed.
            WaitTimeoutError: the queue did not take it in time.
        """
        ...

    def recv(self, timeout_s: float | None) -> bytes | None:
        """Return the next message, or None when none came in time.

        Args:
            timeout_s: 0 only looks; None waits without end, but returns when the other end closes.

        Raises:
            LinkClosedError: no message is left and the other end is gone.
        """
        ...

    def close(self) -> None:
        """Tell the other end that nothing follows. Messages sent before are still delivered."""
        ...


class PolledChannel(MessageChannel, Protocol):
    """A channel between processes that can be polled, so that a thread waits for several channels at once."""

    def pollables(self) -> list[Any]:
        """Return zmq sockets or descriptors to poll: readable if a message is there or the peer has gone."""
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
