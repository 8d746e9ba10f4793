"""A link that can be replaced by another one from a given step on, without a new epoch.

    frames of steps < N ──▶ old link ────────╮
                                             ├──▶ the same receive, in the order of steps
    frames of steps >= N ─▶ link 7 ──────────╯

Both ends know N from a plan before step N, and frames name their steps, so that no frame is lost, repeated or
overtaken. The sender puts step N into the new link when the old one has all frames up to N - 1. The receiver
turns to the new link when it has taken those frames, and closes the old link at once. The sender keeps the
old link open for as many steps as can be in flight: by then the result of step N has come back, and so the
old link is empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from penstock.pipeline.links.frame import FrameHeader
from penstock.pipeline.links.link import Link, RecvHandle
from penstock.trace.phases import NOBODYS, PhaseClock


class SwitchedLink:
    """One end of a link that can be exchanged between two steps. Implements `Link`; belongs to one thread.

    Args:
        link: link with which the epoch begins; it and all links that replace it belong to this object.
        keep_steps: number of steps for which a replaced link stays open; 0 at a receiver.
    """

    def __init__(self, link: Link, keep_steps: int = 0) -> None:
        self._present = link
        self._keep_steps = keep_steps
        self._coming: deque[tuple[int, Link, Callable[[], None]]] = deque()  # by first step
        # Replaced links, each with the step at which it is closed. The tuple is replaced and never changed,
        # since any thread may read `is_sending`.
        self._left: tuple[tuple[int, Link, Callable[[], None]], ...] = ()

    @property
    def is_sending(self) -> bool:
        """Whether the link in use, or a replaced one, has a frame that has not left this process.

        Implements `Link.is_sending`.
        """
        return self._present.is_sending or any(link.is_sending for _, link, _ in self._left)

    def attach(self, link: Link, first_step: int, released: Callable[[], None] = lambda: None) -> None:
        """Use another link for the frames of a step and of all later ones.

        Args:
            link: the new link, which is used when the first of these frames is sent or received.
            first_step: not lower than that of any link attached earlier. If the step is over, the new link
                is used from the next step on. Both ends then do the same, since one plan orders it for both.
            released: called when the old link has been closed at this end.
        """
        self._coming.append((first_step, link, released))

    def send_frame(self, header: FrameHeader, tensors: Sequence[Tensor], clock: PhaseClock = NOBODYS) -> None:
        """Send a frame over the link of its step; change over first if a new link is due.

        Implements `Link.send_frame`.
        """
        if self._coming or self._left:
            self._advance(header.step_id)
        self._present.send_frame(header, tensors, clock)

    def receive_frame(
        self,
        header: FrameHeader,
        out: Sequence[Tensor],
        requests: Sequence[str] = (),
        clock: PhaseClock = NOBODYS,
    ) -> RecvHandle:
        """Prepare to receive a frame over the link of its step; change over first if a new link is due.

        All frames before this one must have been waited for. Implements `Link.receive_frame`.
        """
        if self._coming or self._left:
            self._advance(header.step_id)
        return self._present.receive_frame(header, out, requests, clock)

    def close(self) -> None:
        """Close the link in use, replaced links that are still open, and links that were not used yet."""
        for _, link, _ in (*self._left, *self._coming):
            link.close()
        self._present.close()

    def _advance(self, step_id: int) -> None:
        """Change over to the link of this step, and close replaced links that are not needed any more."""
        while self._coming and self._coming[0][0] <= step_id:
            first_step, link, released = self._coming.popleft()
            self._left = (*self._left, (first_step + self._keep_steps, self._present, released))
            self._present = link
        # After the change-over: a receiver, which keeps no replaced link, so closes the one just replaced.
        while self._left and self._left[0][0] <= step_id:
            (_, link, released), *rest = self._left
            self._left = tuple(rest)
            link.close()
            released()
