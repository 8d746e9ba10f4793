"""Requests that end with a vector of their prompt, in place of tokens.

They are scheduled as any other: their prompt runs in chunks, and `max_len`, which is its length, leaves no
room for a sample. With the last chunk the last stage has pooled the prompt, and that step's result ends them,
as it ends those that want no token of any kind (`PlanDraft.ending`).

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
from penstock.errors import InvalidRequestError
from penstock.scheduler.queues import Phase, RequestState


def check_pooled_length(prompt_len: int, max_model_len: int, capacity_tokens: int) -> None:
    """Raise `InvalidRequestError` for a prompt that can never be computed whole: nothing follows it, but its
    last token attends as well and needs its place in the KV cache."""
    if prompt_len == 0:
        raise InvalidRequestError("the prompt has no tokens.", param="prompt", code="empty_prompt")
    if prompt_len > max_model_len:
        raise InvalidRequestError(
            f"the prompt has {prompt_len} tokens; the model takes {max_model_len}.",
            remedy=f"Shorten the prompt to {max_model_len} tokens.",
            param="prompt",
            code="context_length_exceeded",
        )
    if prompt_len > capacity_tokens:
        raise InvalidRequestError(
            f"the prompt has {prompt_len} tokens; the KV cache holds {capacity_tokens}.",
            remedy="Shorten the prompt or start the engine with more KV blocks.",
            param="prompt",
            code="kv_capacity_exceeded",
        )


def returned_vectors(
    ending: Iterable[RequestState], result: StepResult
) -> Iterator[tuple[RequestState, bytes]]:
    """The requests whose last step has returned, and their vectors; b"" of one that is not pooled, or whose
    vector is not finite. Requests that have ended since are left out.

    Args:
        ending: those that yield no token; `result.pooled` runs over the pooled ones among them.
    """
    vectors = iter(result.pooled)
    for request in ending:
        vector = b"" if request.pooling is None else next(vectors)
        if request.phase is not Phase.FINISHED:
            yield request, vector
