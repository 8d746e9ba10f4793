"""Settles the result of a step: appends tokens, hands out scores and vectors, and ends requests.

    result of a step ──▶ scores of prompts ──▶ samples, in plan order ──▶ vectors, and prompts without output

Called by `scheduler.scheduler` in step order. Owns the totals of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.batch import StepResult
from penstock.request import FinishReason, RequestUpdate, TokenLogprobs
from penstock.scheduler.plan_builder import PlanBuilder
from penstock.scheduler.pooled import returned_vectors
from penstock.scheduler.prefix_reuse import PrefixReuse
from penstock.scheduler.prompt_scores import returned_scores
from penstock.scheduler.queues import RequestPhase, RequestQueues, RequestState
from penstock.scheduler.request_endings import RequestEndings
from penstock.scheduler.updates import (
    ended_without_tokens,
    numerical_error,
    row_error,
    scores_came,
    tokens_came,
)
from penstock.scheduler.windows import NoWindows


class ResultSettlement:
    """Turns the results of steps into updates for the clients of the requests.

    Args:
        queues: all live requests.
        prefixes: makes the blocks that new tokens fill findable.
        endings: ends the requests whose last token has come, or that have failed.
        windows: learns which drafts (guessed tokens) were right.

    Attributes:
        prompt_tokens: prompt tokens of requests that have yielded their first token, or ended without one.
        generated_tokens: tokens that were appended to requests.
    """

    def __init__(
        self, queues: RequestQueues, prefixes: PrefixReuse, endings: RequestEndings, windows: NoWindows
    ) -> None:
        self._queues = queues
        self._prefixes = prefixes
        self._endings = endings
        self._windows = windows
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def settle(self, issued: PlanBuilder, result: StepResult) -> list[RequestUpdate]:
        """Apply the result of a step: append its tokens to their requests, and end those that are done.

        Results of requests that have finished or been aborted in the meantime are dropped [D11]. If the
        step was not computed, its requests end with the result's error.

        Args:
            issued: the plan of the step.

        Returns:
            The updates for the clients.
        """
        if result.error is not None:
            return self._endings.fail_step(issued, result.error)
        logprobs = result.logprobs or [None] * len(result.token_ids)
        updates = self._take_scores(issued, result)
        rows = zip(issued.sampling, issued.window_sizes, result.token_ids, strict=True)
        for index, (request, size, ids) in enumerate(rows):
            request.num_pending -= size
            if request.num_void:
                request.num_void -= size
                continue
            if index in result.failed and index not in result.unmet:
                self._prefixes.distrust(request)
            if request.phase is RequestPhase.FINISHED:
                continue
            if size > 1:
                self._take_back(request, result.num_rejected[index])
            drafts = self._windows.follow(request, ids, size, issued.step_id)
            if request.is_rewound:
                self._queues.turns_changed()
            accepted = ids if index not in result.failed else ids[:-1]
            update = None
            if accepted:
                self._windows.hear(request, accepted, result.guesses.get(index, ()))
                update = self._accept(request, accepted, logprobs[index], *drafts)
                updates.append(update)
            if index in result.failed and (update is None or update.finish_reason is None):
                error = row_error(request, issued.step_id, result.unmet.get(index))
                updates.append(self._endings.fail(request, error))
        step_id, ended = issued.step_id, returned_vectors(issued.ending, result)
        updates += [self._end(done, vector, step_id) for done, vector in ended]
        return updates

    def _take_back(self, request: RequestState, num_rejected: int) -> None:
        """Take rejected drafts off `num_scheduled`, unless the request has lost its row since."""
        if request.phase is RequestPhase.RUNNING:
            request.num_scheduled -= num_rejected
            request.num_rejected += num_rejected
            self._queues.turns_changed()

    def _accept(
        self,
        request: RequestState,
        token_ids: Sequence[int],
        logprobs: list[TokenLogprobs] | None,
        num_drafts: int,
        num_accepted: int,
    ) -> RequestUpdate:
        """Append tokens up to the one that ends the request.

        Args:
            num_drafts, num_accepted: drafts that the step decided on, and those of them that were right.
        """
        if request.num_outputs == 0:
            self.prompt_tokens += request.prompt_len
        reason, num_before = None, request.num_outputs
        for token_id in token_ids:
            self._queues.note_token(request, token_id)
            reason = finish_reason(request)
            if reason is not None:
                break
        num_tokens = request.num_outputs - num_before
        num_accepted = min(num_tokens, num_accepted)
        self.generated_tokens += num_tokens
        if request.phase is RequestPhase.RUNNING:
            self._prefixes.note(request)
        self._windows.settle(request, num_drafts, num_accepted)
        if reason is not None:
            self._endings.remove(request)
        drafts = num_accepted, num_drafts - num_accepted
        return tokens_came(request, num_tokens, logprobs, reason, drafts)

    def _take_scores(self, issued: PlanBuilder, result: StepResult) -> list[RequestUpdate]:
        updates = []
        for request, scores in returned_scores(issued.scoring, result, self._queues):
            if scores:
                updates.append(scores_came(request, scores))
            else:
                self._prefixes.distrust(request)
                updates.append(self._endings.fail(request, numerical_error(request, result.step_id)))
        return updates

    def _end(self, request: RequestState, vector: bytes, step_id: int) -> RequestUpdate:
        if request.pooling is not None and not vector:
            return self._endings.fail(request, numerical_error(request, step_id))
        self.prompt_tokens += request.prompt_len
        self._endings.remove(request)
        return ended_without_tokens(request, vector)


def finish_reason(request: RequestState) -> FinishReason | None:
    """Return "stop" or "length" if `request` ends with its newest token, else None [D11].

    Stop strings are not looked for here: `engine.client.outputs`, which has the text, finds them.

    A stop id wins over a length reached by the same token. A stop id among the first `min_tokens` outputs
    ends nothing; the sampler does not let one through anyway.
    """
    if request.token_ids[-1] in request.stop_ids and request.num_outputs > request.sampling.min_tokens:
        return "stop"
    return "length" if len(request.token_ids) >= request.max_len else None
