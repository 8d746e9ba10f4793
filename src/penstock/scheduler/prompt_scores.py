"""Plans which step scores which tokens of a prompt, and hands out the scores that return.

A score is the log-probability of a prompt token, given the tokens before it, with those of the likeliest.

    position            0   1   2   3   4   5   6   7   8   9
    first chunk        [.   .   .   .]
    it scores              |1   2   3   4|
    num_scores_planned                  4
    second chunk                        [.   .   .   .]          5 .. 8
    returned            num_scores = 4, then 8

Each score is planned once, unless its step is lost. A request that is preempted computes its prompt again,
but asks only for scores behind those planned. Results come in the order of the steps, so scores come in the
order of the tokens. When the steps in flight are lost, the request plans again from the scores that have
returned; in another core, from those that the client has. Until all its scores are planned, a request starts
at its first token, whatever the prefix cache has.

With `n` choices, followers have the prompt of their leader and so the same scores. The leader's scores also
go to the followers in line, which wait for them (`scheduler.prefix_reuse`). If the leader has ended or is
preempted, a follower plans the rest itself and gets no more scores from the leader.

Called by `scheduler.plan_builder` and `scheduler.result_settlement`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.batch import ScoredTokens, StepResult
from penstock.request import TokenLogprobs
from penstock.scheduler.queues import RequestPhase, RequestQueues, RequestState


def plan_scores(request: RequestState, index: int, num_tokens: int) -> ScoredTokens | None:
    """Return which prompt tokens the request's next chunk, of `num_tokens` tokens, is to score.

    To score a token is to return its log-probability. These tokens count as planned, so no later chunk scores
    them. Returns None if no scores are wanted, or if all within reach were planned before a preemption.

    Args:
        index: the place of the request's row in the plan.
    """
    if not request.wants_scores:
        return None
    first = request.num_scores_planned + 1
    end = min(request.num_scheduled + num_tokens, request.prompt_len - 1) + 1
    if end <= first:  # it is computed again after a preemption
        return None
    assert first > request.num_scheduled, "what stands before a token that is scored is computed here"
    request.num_scores_planned = end - 1
    return ScoredTokens(index, first, end - first)


def returned_scores(
    scored_rows: Iterable[tuple[RequestState, ScoredTokens]], result: StepResult, queues: RequestQueues
) -> Iterator[tuple[RequestState, list[TokenLogprobs]]]:
    """Yield each request that a step scored prompt tokens of, with their scores (log-probabilities).

    The list is empty if the numbers were not finite. Each request is followed by those in line with the same
    prompt that wait for its scores, with the scores that are new to them. Requests that have ended since are
    left out.

    Args:
        scored_rows: the requests whose prompt tokens the step's plan scores, and which tokens.
        result: the step's result.
    """
    for (request, scored), scores in zip(scored_rows, result.scores, strict=True):
        if request.phase is RequestPhase.FINISHED:
            continue
        request.num_scores += len(scores)
        yield request, scores
        for follower in queues.followers_in_line(request):
            known = follower.num_scores - (scored.first - 1)
            if follower.num_scores_planned == follower.num_scores and 0 <= known < len(scores):
                follower.num_scores += len(scores) - known
                follower.num_scores_planned = follower.num_scores
                yield follower, scores[known:]
