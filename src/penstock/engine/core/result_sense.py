"""Checks that the result of a step is usable, since the last stage may run on a faulty or hostile host.

`engine.core.steps_in_flight` compares a result with its plan. This module checks what must hold for every
result: that its ids are in the vocabulary, except the last one of a failed row, and that its lists fit
together. The scheduler and the clients then need no checks.
"""

from __future__ import annotations

from penstock.batch import StepResult
from penstock.errors import ProtocolError
from penstock.request import TokenLogprobs

MAX_VOCAB_SIZE = 1 << 31  # larger than the vocabulary of any model
_FLOAT_BYTES = 4


def require_sense(result: StepResult, vocab_size: int, stage: int) -> None:
    """Raise `ProtocolError` if the result has ids that no token has, or lists that do not fit together.

    Args:
        vocab_size: number of token ids of the model.
        stage: number of the stage that the result came from.
    """
    failed = result.failed
    for row, ids in enumerate(result.token_ids):
        drawn = ids[:-1] if row in failed else ids
        if not all(0 <= token_id < vocab_size for token_id in drawn):
            raise ProtocolError(f"row {row} of step {result.step_id} has invalid ids {ids[:8]}.", stage=stage)
    if wrong := _wrong_lists(result, vocab_size):
        raise ProtocolError(f"the result of step {result.step_id} has {wrong}.", stage=stage)


def _wrong_lists(result: StepResult, vocab_size: int) -> str:
    """Return what is wrong with the lists beside the sampled ids, as words for an error; "" if all fit."""
    num_rows = len(result.token_ids)
    if len(result.logprobs) not in (0, num_rows):
        return f"{num_rows} rows, but log-probabilities of {len(result.logprobs)}"
    if not all(0 <= row < num_rows for row in result.failed):
        return f"{num_rows} rows, but names failed rows {result.failed[:8]}"
    lists = (*result.logprobs, *result.scores)
    positions = [position for of_row in lists if of_row for position in of_row]
    if any(len(position.top_ids) != len(position.top_logprobs) for position in positions):
        return "lists of likeliest tokens and of their log-probabilities that differ in length"
    if wrong := next((position for position in positions if not _fits(position, vocab_size)), None):
        return f"invalid ids {wrong.top_ids[:8]} among the likeliest tokens"
    if any(len(vector) % _FLOAT_BYTES for vector in result.pooled):
        return "a vector that ends within a number"
    return ""


def _fits(position: TokenLogprobs, vocab_size: int) -> bool:
    return all(0 <= token_id < vocab_size for token_id in position.top_ids)
