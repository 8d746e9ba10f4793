"""Ends embedding requests, which want a vector of their prompt in place of tokens.

They are scheduled as any other. Their prompt runs in chunks. Their `max_len` is the length of the prompt, so
no token is sampled. In the step of the last chunk the last stage has pooled the whole prompt: the vector is
complete. The result of that step ends the request, as it ends other requests that want no token
(`PlanBuilder.ending`).

    chunk 0        chunk 1        chunk 2 (`ScheduledBatch.pooled`)
    [ . . . . ]    [ . . . . ]    [ . . ]  ──▶ result ──▶ the only update

The hidden states of all their tokens are wanted, so they never start behind a cached prefix
(`scheduler.prefix_reuse`). A request that starts again, after a preemption or the loss of a stage, is pooled
from its first token again. If it was preempted while its last chunk was in flight, the result of that chunk
still ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.batch import StepResult
from penstock.scheduler.queues import RequestPhase, RequestState


def returned_vectors(
    ending: Iterable[RequestState], result: StepResult
) -> Iterator[tuple[RequestState, bytes]]:
    """Yield each request that this step ends without a token, with its vector.

    The vector is float32 in bytes; b"" if the request wanted none, or if its numbers are not finite. Requests
    that have ended since the plan was made are left out.

    Args:
        ending: the requests of the plan that yield no token and end with it.
        result: the step's result; its `pooled` has the vectors of those among them that want one, in order.
    """
    vectors = iter(result.pooled)
    for request in ending:
        vector = b"" if request.pooling is None else next(vectors)
        if request.phase is not RequestPhase.FINISHED:
            yield request, vector
