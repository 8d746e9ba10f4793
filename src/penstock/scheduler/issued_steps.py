"""The steps in flight as the scheduler planned them, and the newest step whose result has come.

The scheduler issues a plan here and settles it when its result has come, in step order. Decides nothing.
"""

from __future__ import annotations

from penstock.scheduler.plan_builder import PlanBuilder
from penstock.scheduler.queues import NO_STEP, RequestState


class IssuedSteps:
    """The steps in flight: plans that were issued and whose results are not settled.

    Attributes:
        returned_step: the last step whose result has come; -1 before the first.
        prefill_tokens: prompt tokens of the steps in flight.
    """

    def __init__(self) -> None:
        self._issued: dict[int, PlanBuilder] = {}  # by step in flight
        self.returned_step = NO_STEP
        self.prefill_tokens = 0
        self._consume_through = NO_STEP  # of the newest plan; see `issue`

    def __len__(self) -> int:
        return len(self._issued)

    def issue(self, plan: PlanBuilder) -> int:
        """Record a plan that is issued now.

        Returns:
            The newest step whose sampled tokens the stages must have taken in before they run this plan.
        """
        self._issued[plan.step_id] = plan
        self.prefill_tokens += plan.prefill_tokens
        self._consume_through = max(self._consume_through, self.returned_step, *plan.token_from, NO_STEP)
        return self._consume_through

    def settle(self, step_id: int) -> PlanBuilder:
        """Remove the step whose result has come, and return its plan."""
        self.returned_step = step_id
        issued = self._issued.pop(step_id)
        self.prefill_tokens -= issued.prefill_tokens
        return issued

    def requests_of(self, step_id: int) -> list[str]:
        """Return the ids of the requests in a step; an empty list if it is a probe or not in flight."""
        issued = self._issued.get(step_id)
        return [] if issued is None else [request.request_id for request in issued.requests]

    def rows(self) -> set[int]:
        """Return the rows (requests' indices on the ranks) that the steps in flight run or let enter."""
        return {row for issued in self._issued.values() for row in issued.all_rows}

    def pending(self) -> list[RequestState]:
        """Return, for each token that the steps in flight will sample, the request that it is for.

        A request occurs once for each of its tokens. Drafts (guessed tokens) in flight are taken to be right.
        """
        return [
            request
            for issued in self._issued.values()
            for request, size in zip(issued.sampling, issued.window_sizes, strict=True)
            for _ in range(size)
        ]

    def give_up(self) -> None:
        """Forget all steps in flight, since none of them will return; the newest then counts as returned."""
        self.returned_step = max(self._issued, default=self.returned_step)
        self._issued.clear()
        self.prefill_tokens = 0

    def check_invariants(self) -> None:
        assert self.prefill_tokens == sum(issued.prefill_tokens for issued in self._issued.values())
