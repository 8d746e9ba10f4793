"""Ends requests that want a vector of their prompt, in place of tokens.

They are scheduled as any other: their prompt runs in chunks, and `max_len`, which is its length, leaves no
room for a sample. With the last chunk the last stage has pooled the prompt, and that step's result ends them,
as it ends those that want no token of any kind (`PlanBuilder.ending`).

    chunk 0        chunk 1        chunk 2 (`ScheduledBatch.pooled`)
    [ . . . . ]    [ . . . . ]    [ . . ]  ──▶ result ──▶ the only update

The hidden states of all their tokens are wanted, so that they begin behind nothing that was computed before
(`scheduler.prefix_reuse`), and what is gathered on the last stage begins anew when they do: after a
preemption, or the loss of a stage. A result that was in flight before a preemption counts; whichever comes
first does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.batch import StepResult
from penstock.scheduler.queues import RequestPhase, RequestState


def returned_vectors(
    ending: Iterable[RequestState], result: StepResult
) -> Iterator[tuple[RequestState, bytes]]:
    """Yield the requests whose last step has returned, with their vectors.

    The vector is b"" where the request is not pooled, or its vector is not finite. Requests that have ended
    since are left out.

    Args:
        ending: requests that yield no token; `result.pooled` runs over the pooled ones among them.
    """
    vectors = iter(result.pooled)
    for request in ending:
        vector = b"" if request.pooling is None else next(vectors)
        if request.phase is not RequestPhase.FINISHED:
            yield request, vector
