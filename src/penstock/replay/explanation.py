"""The reasons why a plan has these rows and not others, in plain words, for users that replay decisions.

    step 41: rows 1, decoding 1, tokens 1; plans in flight before: 1
    a: decodes position 70, from the sample of step 37
    b is not in it: its token of step 40 has not returned; it may run from step 42 without it
    c waits: it needs 5 KV blocks of the 4 that are free, besides 2 that the running requests may need next

An explanation is made right after its plan, and repeats the checks by which the scheduler left requests out.
While a plan is filled, free blocks, free rows and room for tokens only become fewer. So a check that failed
then still fails now. The explanation changes nothing in the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.batch import GUESSED, KNOWN, ScheduledBatch
from penstock.scheduler.queues import RequestState
from penstock.scheduler.scheduler import SchedulerParts
from penstock.scheduler.start_order import StartOrder

_MOST_TOLD = 50  # most waiting requests that are explained one by one


class PlanExplanation:
    """An explanation of the plan that a scheduler made last, from the state of its parts.

    Args:
        parts: those of the scheduler that made the plan.
    """

    def __init__(self, parts: SchedulerParts) -> None:
        self._parts = parts

    def sentences(self, plan: ScheduledBatch) -> list[str]:
        """Return sentences that say what is in the plan, and why each other request is not."""
        return [*self._head(plan), *self._placed(plan), *self._running(plan), *self._line()]

    def _head(self, plan: ScheduledBatch) -> Iterator[str]:
        if not plan.rows and not plan.new_rows:
            yield f"step {plan.step_id} has no rows: it checks the stages, or frees blocks and rows"
            return
        decodes = len(plan.rows) - plan.token_from.count(KNOWN)
        yield (
            f"step {plan.step_id}: rows {len(plan.rows)}, decoding {decodes}, tokens {plan.total_tokens}; "
            f"plans in flight before: {len(self._parts.issued) - 1}"
        )
        number = self._parts.placement.num_micro_batches
        yield f"micro-batches of the decoding requests: {number}"
        allocator, rows = self._parts.allocator, self._parts.rows
        blocks = f"{allocator.num_free_blocks} of {allocator.num_blocks}"
        yield f"free after it: KV blocks {blocks}, rows {rows.num_free} of {rows.num_rows}"

    def _placed(self, plan: ScheduledBatch) -> Iterator[str]:
        holders = {request.row: request for request in self._parts.queues.running}
        starting = {new.row for new in plan.new_rows}
        for index, row in enumerate(plan.rows):
            request = holders.get(row)
            name = f"row {row}" if request is None else request.request_id
            start, count, source = plan.start_positions[index], plan.num_tokens[index], plan.token_from[index]
            if source == GUESSED:
                yield f"{name}: a window of {count} drafts, after the tokens in flight, from position {start}"
            elif source != KNOWN:
                drafts = f", and {count - 1} drafts after it" if count > 1 else ""
                yield f"{name}: decodes position {start}, from the sample of step {source}{drafts}"
            else:
                known = "" if request is None else f" of {request.prefill_len}"
                begins = f" (it starts, with {start} tokens found in the cache)" if row in starting else ""
                yield f"{name}: tokens {start} to {start + count - 1}{known} of its prompt{begins}"
        for row in starting.difference(plan.rows):
            yield (
                f"{holders[row].request_id if row in holders else row}: gets a row, and waits for its grammar"
            )

    def _running(self, plan: ScheduledBatch) -> Iterator[str]:
        placed = set(plan.rows).union(new.row for new in plan.new_rows)
        decoding = {request.arrival for request in self._parts.queues.decoding()}
        for request in self._parts.queues.running:
            if request.row not in placed:
                yield f"{request.request_id} is not in it: {self._why_not(request, plan, decoding)}"

    def _why_not(self, request: RequestState, plan: ScheduledBatch, decoding: set[int]) -> str:
        if self._parts.paused == "keep":
            return "an administrator has paused the engine"
        if request.num_unproven:
            return "blocks of its prefix are still loading"
        if request.is_prefilling:
            if request.num_runnable <= 0:
                return "its grammar is still being built"
            return f"the plan had no more tokens for prompts; {request.num_runnable} of its tokens are left"
        last = request.last_sampled_step
        if request.arrival not in decoding:
            return f"all tokens that it may have are in flight, the last since step {last}"
        if request.awaits_drafts:
            return "it waits for drafts that are worth the wait"
        returned = self._parts.issued.returned_step
        if last > returned and (request.awaits_result or request.num_windows_ahead):
            return f"its token of step {last} has not returned, and drafts will be worth more then"
        soonest = last + self._parts.placement.lag
        if last > returned and soonest > plan.step_id:
            return f"its token of step {last} has not returned; it may run from step {soonest} without it"
        num_decodes = len(plan.rows) - plan.token_from.count(KNOWN)
        if self._parts.allocator.num_free_blocks == 0:
            return "no KV block was free for its next token, and no younger request could be preempted"
        return (
            f"the plan took its share, {num_decodes} of {len(decoding)} decoding requests; it is first in "
            "the next"
        )

    def _line(self) -> Iterator[str]:
        """Yield why each waiting request has no row, in the order in which they will start."""
        line, reason, first = list(self._parts.queues.line()), "", ""
        order = StartOrder(self._parts.queues, self._parts.grammars)
        held_back = self._parts.held_back
        may_start = order.next_request(newcomers=self._parts.paused is None and not held_back)
        for request in line[:_MOST_TOLD]:
            name = request.request_id
            if self._parts.paused == "keep" or (self._parts.paused and not request.has_started):
                yield f"{name} waits: an administrator has paused the engine"
            elif held_back and not request.has_started:
                yield f"{name} waits: {held_back}"
            elif not self._parts.rows.num_free:
                yield f"{name} waits: all {self._parts.rows.num_rows} rows are taken"
            elif request is may_start:
                first, reason = name, self._what_lacks(request)
                yield f"{name} waits: {reason}"
            elif first:
                yield f"{name} waits behind {first}"
            else:
                yield f"{name} waits: there is no memory for its grammar besides those of the rows"
        if len(line) > _MOST_TOLD:
            yield f"{len(line) - _MOST_TOLD} more wait after these"

    def _what_lacks(self, request: RequestState) -> str:
        """Return why the request that may start next did not start with this plan."""
        if request.num_pending:
            return "it was preempted for older requests, and its last tokens are still in flight"
        found = self._parts.prefixes.find(request)
        if self._parts.prefixes.must_wait(request):
            return "more of its prefix is loading from the store"
        if self._parts.prefixes.must_follow(request, len(found)):
            leader = request.leader
            name = "another request" if leader is None else leader.request_id
            return f"its prompt is being computed for {name}"
        num_running = len(self._parts.queues.running)
        if not self._parts.admission.may_start(request, num_running, found):
            allocator = self._parts.allocator
            needed = allocator.blocks_for(request.num_to_prefill) - len(found)
            return (
                f"it needs {needed} KV blocks of the {allocator.num_free_blocks} that are free, besides "
                f"{num_running} that the running requests may need next"
            )
        return f"the plan had no more tokens for prompts; {request.num_to_prefill} of its tokens remain"
