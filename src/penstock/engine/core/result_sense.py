"""Checks that the result of a step is usable, since the last stage may run on a faulty or hostile host.

Whether it is the right one, and complete, is checked with its plan (`engine.core.steps_in_flight`). Here is
checked what holds for each result: ids of the vocabulary for rows that have not failed, and lists that fit
together. The scheduler and the clients then need no checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.batch import StepResult
from penstock.errors import ProtocolError
from penstock.request import TokenLogprobs

MAX_VOCAB_SIZE = 1 << 31  # beyond that of any model
_FLOAT_BYTES = 4


def require_sense(result: StepResult, vocab_size: int, stage: int) -> None:
    """Raise `ProtocolError` if the result has ids that no token has, or lists that do not fit together.

    Args:
        vocab_size: of the model.
        stage: stage that the result came from.
    """
    num_rows, failed = len(result.token_ids), result.failed
    for row, ids in enumerate(result.token_ids):
        drawn = ids[:-1] if row in failed else ids
        if not all(0 <= token_id < vocab_size for token_id in drawn):
            raise ProtocolError(f"row {row} of step {result.step_id} has invalid ids {ids[:8]}.", stage=stage)
    has_sense = (
        len(result.logprobs) in (0, num_rows)
        and all(0 <= row < num_rows for row in failed)
        and all(_fit(row, vocab_size) for row in result.logprobs if row)
        and all(_fit(scores, vocab_size) for scores in result.scores)
        and all(len(vector) % _FLOAT_BYTES == 0 for vector in result.pooled)
    )
    if not has_sense:
        raise ProtocolError(
            f"the lists in the result of step {result.step_id} differ in length.", stage=stage
        )


def _fit(positions: Sequence[TokenLogprobs], vocab_size: int) -> bool:
    return all(
        len(position.top_ids) == len(position.top_logprobs)
        and all(0 <= token_id < vocab_size for token_id in position.top_ids)
        for position in positions
    )
