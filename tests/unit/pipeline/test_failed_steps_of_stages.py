"""F9: a stage without memory for a step fails the step, and all stages go on; nothing here has a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hand_core import ArithmeticModel, Part, arithmetic_tokens, make_plan, new_row
from penstock.batch import RankFailed, StepResult, decode_to_core
from penstock.errors import PlanMemoryError
from penstock.families.registry import resolve_model_directory
from penstock.models.intermediate import IntermediateTensors
from penstock.pipeline.links.plan_channel import QueueChannel
from penstock.process.child import Abandoned
from penstock.rank import rank as rank_module
from penstock.rank.rank import Rank, RankConnections, run_rank
from rank_configs import make_rank_configs
from stage_pipe import Pipe

FIRST, SECOND = [5, 6, 7], [8, 9]


class Short(ArithmeticModel):
    """Has no memory at the first call of one of its parts: `embed`, `forward` or `head`."""

    def __init__(
        self, part: str = "", call: int = 1, error: type[Exception] = torch.OutOfMemoryError
    ) -> None:
        self._left = {part: call}
        self._error = error

    def _spend(self, part: str) -> None:
        self._left[part] = self._left.get(part, 0) - 1
        if self._left[part] == 0:
            raise self._error("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def embed(self, input_ids: Tensor) -> IntermediateTensors:
        self._spend("embed")
        return super().embed(input_ids)

    def forward(self, *inputs: Any) -> IntermediateTensors:
        self._spend("forward")
        return super().forward(*inputs)

    def compute_logits(self, tensors: IntermediateTensors, indices: Tensor) -> Tensor:
        self._spend("head")
        return super().compute_logits(tensors, indices)


def run(pipe: Pipe) -> list[StepResult]:
    """A step of one request, which fails, and two of another: its prompt and a decode."""
    plans = [
        make_plan(0, [Part(row=0, num_tokens=3, start=0, blocks=[0])], new_rows=[new_row(0, FIRST)]),
        make_plan(1, [Part(row=1, num_tokens=2, start=0, blocks=[1])], new_rows=[new_row(1, SECOND)]),
        make_plan(2, [Part(row=1, start=2, token_from=1)], freed_rows=[0]),
        make_plan(3, consume_through=2),  # all come to rest
    ]
    results = []
    for plan in plans:
        pipe.submit_plan(plan)
        results += pipe.poll_results(20.0)
    pipe.shutdown()
    return results


@pytest.mark.parametrize("carrier", ["memory", "shared memory"])
@pytest.mark.parametrize(
    ("stage", "part"), [(0, "embed"), (0, "forward"), (1, "forward"), (2, "forward"), (2, "head")]
)
def test_f9_a_failed_step_crosses_the_pipe_and_the_next_ones_are_exact(
    stage: int, part: str, carrier: str, caplog: pytest.LogCaptureFixture
) -> None:
    models = [Short(part) if index == stage else ArithmeticModel() for index in range(3)]
    pipe = Pipe(3, carrier=carrier, models=models)
    failed, *others, last = run(pipe)
    assert failed.error is not None
    assert (failed.error.kind, failed.error.stage) == ("PlanMemoryError", stage)
    assert failed.error.message == f"stage {stage} had no memory left for step 0."
    assert (failed.token_ids, failed.failed) == ([[-1]], [0])
    assert [result.error for result in (*others, last)] == [None, None, None]
    assert [result.token_ids[0][0] for result in others] == arithmetic_tokens(SECOND, 2, 3)
    assert all(runner.rows.total_len[1] == len(SECOND) + 2 for runner in pipe.runners)
    assert "Tried to allocate 2.00 GiB" in caplog.text, "the stage says what torch has said"


def test_f9_the_memory_of_the_host_counts_as_that_of_a_gpu() -> None:
    failed, *others, _ = run(Pipe(2, models=[ArithmeticModel(), Short("head", error=MemoryError)]))
    assert failed.error is not None
    assert failed.error.stage == 1
    assert [result.token_ids[0][0] for result in others] == arithmetic_tokens(SECOND, 2, 2)


def test_f9_any_other_error_ends_the_stage_as_before() -> None:
    pipe = Pipe(2, models=[ArithmeticModel(), Short("forward", error=RuntimeError)])
    pipe.submit_plan(
        make_plan(0, [Part(row=0, num_tokens=3, start=0, blocks=[0])], new_rows=[new_row(0, FIRST)])
    )
    errors = [str(error) for error in pipe.leave_broken()]  # the first stage may meet a closed link
    assert any("stage 1 failed in step 0: RuntimeError" in error for error in errors)


def test_f9_where_ranks_share_a_stage_the_error_is_raised() -> None:
    """The others wait in the midst of the step for what this rank does not bring."""
    pipe = Pipe(1, models=[Short("forward")])
    pipe.runners[0]._is_alone = False
    pipe.submit_plan(
        make_plan(0, [Part(row=0, num_tokens=3, start=0, blocks=[0])], new_rows=[new_row(0, FIRST)])
    )
    with pytest.raises(PlanMemoryError, match="stage 0 had no memory left for step 0"):
        pipe.crew.join()


def test_f9_a_rank_of_a_shared_stage_leaves_the_epoch_and_keeps_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = PlanMemoryError("stage 0 had no memory left for step 7.", stage=0)
    served: list[int] = []

    def serve(rank: Rank, connections: RankConnections) -> None:
        served.append(connections.epoch)
        if connections.epoch == 0:
            raise error

    monkeypatch.setattr(rank_module.Rank, "serve", serve)
    core_ends, rank_ends = QueueChannel.star(["stage 0", "stage 1"])
    epochs = [
        RankConnections(
            epoch=epoch, plans=rank_ends[epoch], results=rank_ends[epoch], tokens=(), incoming=None
        )
        for epoch in range(2)
    ]
    (config,) = make_rank_configs(resolve_model_directory("demo"), 1)
    events: list[object] = []
    assert run_rank(config, epochs, events.append) is None
    assert served == [0, 1], "the same rank, without loading again"
    assert events == [Abandoned(epoch=0, error=error.info())]
    frame = core_ends[0].recv(1.0)
    assert frame is not None
    assert decode_to_core(frame) == RankFailed(stage=0, error=error.info())
