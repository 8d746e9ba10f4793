"""A link that can be replaced by another one from a given step on, without a new epoch.

    frames of steps < N ──▶ link of before ──╮
                                             ├──▶ the same receive, in the order of steps
    frames of steps >= N ─▶ link 7 ──────────╯

Both ends know N from the plans before it, and frames name their steps, so that nothing is lost, repeated or
overtaken: the sender puts step N into the new link when the one before has all frames up to N - 1, and the
receiver turns to the new one when it has taken those. The receiver lets go of the old link at once. The
sender keeps it for as many steps as can be in flight: by then step N has come back, and so the old link is
empty.
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
        link: link with which the epoch begins; this object owns it and all that follow.
        keep_steps: for how many steps a replaced link stays open; 0 at a receiver.
    """

    def __init__(self, link: Link, keep_steps: int = 0) -> None:
        self._present = link
        self._keep_steps = keep_steps
        self._coming: deque[tuple[int, Link, Callable[[], None]]] = deque()  # by first step
        # By the step that releases it; a tuple that is replaced, since any thread may read it.
        self._left: tuple[tuple[int, Link, Callable[[], None]], ...] = ()

    @property
    def is_sending(self) -> bool:
        """Whether the link in use, or a replaced one, has a frame that has not left this process.

        Implements `Link.is_sending`.
        """
        return self._present.is_sending or any(link.is_sending for _, link, _ in self._left)

    def attach(self, link: Link, first_step: int, released: Callable[[], None] = lambda: None) -> None:
        """Use another link for the frames of a step and of all later ones; the first of them changes over.

        Args:
            first_step: not before that of any link attached earlier. If it has passed, the next step takes
                its place, at both ends: they read of the link in the same plan.
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
        """Close the link in use, those that are kept open and those that were not used yet."""
        for _, link, _ in (*self._left, *self._coming):
            link.close()
        self._present.close()

    def _advance(self, step_id: int) -> None:
        """Change over to the link of this step, and close those that are not needed any more."""
        while self._coming and self._coming[0][0] <= step_id:
            first_step, link, released = self._coming.popleft()
            self._left = (*self._left, (first_step + self._keep_steps, self._present, released))
            self._present = link
        # After the change-over: a receiver, which keeps no link, so closes the one that it has just left.
        while self._left and self._left[0][0] <= step_id:
            (_, link, released), *rest = self._left
            self._left = tuple(rest)
            link.close()
            released()
