"""The decision log: a chain of digests over the plans of one epoch, by which differing histories are noticed.

The digest of a plan is the crc32 of its encoding, carried on from the digest of the plan before. The digest
of the first plan is carried on from a value that names the epoch. So a digest stands for all that was decided
since the epoch began:

    epoch, first step ──▶ digest 0 ──▶ digest 1 ──▶ digest 2 ──▶ …
                            plan 0       plan 1       plan 2

`executor.base` seals the plans of the core with it. Every rank (`pipeline.stage`) carries on a log of its own
from the plans that it applies, and compares. Headers of frames, token returns and results bear the digest
too. If the histories of two ranks differ, they find that out in the first step in which one sends to the
other [d4]. A log knows no requests and no tensors, and keeps no plans. No torch here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from penstock.batch import ScheduledBatch, plan_digest, seal
from penstock.errors import ProtocolError, concerned


class DecisionLog:
    """The log as the core or one rank has seen it: the digest of all plans so far, and no plans.

    Args:
        epoch, first_step: epoch and step of the first plan.

    Attributes:
        epoch: epoch of all its plans.
        next_step: step of the plan that comes next.
        digest: digest of all plans so far.
    """

    def __init__(self, epoch: int = 0, first_step: int = 0) -> None:
        self.epoch = epoch
        self.next_step = first_step
        self.digest = zlib.crc32(f"epoch {epoch} from step {first_step}".encode())

    def seal(self, plan: ScheduledBatch) -> ScheduledBatch:
        """Return the plan with its digest filled in, and carry the log on by it. Only the core seals."""
        sealed = seal(plan, self.digest)
        self._carry_on(sealed)
        return sealed

    def append(self, plan: ScheduledBatch, names_of: Callable[[ScheduledBatch], Sequence[str]]) -> None:
        """Check that a plan which has arrived is the next of the log, and carry the log on by it.

        Args:
            names_of: returns the ids of the requests in a plan, for the error.

        Raises:
            ProtocolError: a plan was lost or repeated; or this plan, or one before it, differs from the
                core's.
        """
        expected, received = (self.epoch, self.next_step), (plan.epoch, plan.step_id)
        if received != expected:
            raise ProtocolError(
                f"expected the plan of (epoch, step) {expected}, found {received}.{concerned(names_of(plan))}"
            )
        digest = plan_digest(plan, self.digest)
        if digest != plan.digest:
            raise ProtocolError(
                f"the plan of step {plan.step_id} does not continue the log of this stage: digest expected "
                f"{digest:#010x}, found {plan.digest:#010x}.{concerned(names_of(plan))}"
            )
        self._carry_on(plan)

    def _carry_on(self, sealed: ScheduledBatch) -> None:
        self.next_step, self.digest = sealed.step_id + 1, sealed.digest
