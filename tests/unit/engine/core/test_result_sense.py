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
    "changed",
    [
        {"token_ids": [[7], [-1], [100]]},
        {"token_ids": [[-1], [-1], [99]]},
        {"failed": [1, 3]},
        {"failed": [1, -1]},
        {"logprobs": [[LIKELY]]},
        {"logprobs": [[msgspec.structs.replace(LIKELY, top_ids=[7])], None, None]},
        {"scores": [[msgspec.structs.replace(LIKELY, top_ids=[7, 100])]]},
        {"pooled": [bytes(7)]},
    ],
)
def test_r15_a_result_without_sense_loses_its_stage(changed: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="step 4") as caught:
        require_sense(msgspec.structs.replace(RESULT, **changed), VOCAB, 2)
    assert caught.value.stage == 2
