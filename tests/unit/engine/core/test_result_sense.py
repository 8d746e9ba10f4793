"""A result is used only if it makes sense, whatever computes the last stage (row R15)."""

from __future__ import annotations

import msgspec
import pytest

from penstock.batch import StepResult
from penstock.engine.core.result_sense import require_sense
from penstock.errors import ProtocolError
from penstock.request import TokenLogprobs

VOCAB = 100
LIKELY = TokenLogprobs(logprob=-0.5, rank=1, top_ids=[7, 99], top_logprobs=[-0.5, -1.0])
RESULT = StepResult(
    step_id=4,
    token_ids=[[7], [-1], [99]],
    num_rejected=[0, 0, 0],
    failed=[1],
    logprobs=[[LIKELY], None, None],
    scores=[[LIKELY], []],
    pooled=[bytes(8), b""],
)


def test_a_result_of_each_kind_makes_sense() -> None:
    require_sense(RESULT, VOCAB, 2)
    require_sense(StepResult(step_id=0), VOCAB, 2)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"token_ids": [[7], [-1], [100]]}, r"row 2 of step 4 has invalid ids \[100\]"),
        ({"token_ids": [[-1], [-1], [99]]}, r"row 0 of step 4 has invalid ids \[-1\]"),
        ({"failed": [1, 3]}, r"step 4 has 3 rows, but names failed rows \[1, 3\]"),
        ({"failed": [1, -1]}, r"step 4 has 3 rows, but names failed rows \[1, -1\]"),
        ({"logprobs": [[LIKELY]]}, "step 4 has 3 rows, but log-probabilities of 1"),
        (
            {"logprobs": [[msgspec.structs.replace(LIKELY, top_ids=[7])], None, None]},
            "step 4 has lists .* that differ in length",
        ),
        (
            {"scores": [[msgspec.structs.replace(LIKELY, top_ids=[7, 100])]]},
            r"step 4 has invalid ids \[7, 100\] among the likeliest tokens",
        ),
        ({"pooled": [bytes(7)]}, "step 4 has a vector that ends within a number"),
    ],
)
def test_r15_a_result_without_sense_loses_its_stage(changed: dict[str, object], told: str) -> None:
    with pytest.raises(ProtocolError, match=told) as caught:
        require_sense(msgspec.structs.replace(RESULT, **changed), VOCAB, 2)
    assert caught.value.stage == 2
