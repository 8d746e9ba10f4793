"""Plans which step scores which tokens of a prompt, and hands out the scores that return.

    position            0   1   2   3   4   5   6   7   8   9
    first chunk        [.   .   .   .]
    it scores              |1   2   3   4|
    num_scores_planned                  4
    second chunk                        [.   .   .   .]          5 .. 8
    returned            num_scores = 4, then 8

Each score is planned once for as long as its step is not lost: a request that is preempted computes its
prompt again, but only scores behind those planned are asked for, and since results come in the order of the
steps, scores come in the order of the tokens. When the steps in flight are lost, it goes back to the scores
that have returned; another core, to those that the client has. A request starts at its first token, whatever
a prefix cache has, until all its scores are planned.

A request that follows another with the same prompt (`n`) has the same scores: those of the leader go to
those in line behind it too, which wait for it (`scheduler.prefix_reuse`). A follower that gets less, because
the leader has ended or gives way, plans the rest itself and is told no more.

Called by `scheduler.plan_builder` and `scheduler.scheduler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.batch import ScoredTokens, StepResult
from penstock.request import TokenLogprobs
from penstock.scheduler.queues import RequestPhase, RequestQueues, RequestState


def plan_scores(request: RequestState, index: int, num_tokens: int) -> ScoredTokens | None:
    """Return the tokens that a chunk of the request's next `num_tokens` tokens scores.

    Args:
        index: of the request's row in the plan.
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
    """Yield each request that a step scored tokens of, with its scores in the result.

    Each is followed by the requests that wait for it, with the scores that are new to them. Requests that
    have ended since are left out.

    Args:
        scored_rows: what the plan of the step scores, with the requests.
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
