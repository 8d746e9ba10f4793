"""Ranks as processes: tensor-parallel stages give the tokens of one rank, and go on when a rank is lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints import make_checkpoint
from depth import sampled
from disturbed import REQUESTS, Server, Stream, named
from penstock import LLM, SamplingParams
from served import wait_until

PROMPTS = [{"prompt_token_ids": [(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)]} for i in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, vocab_size=150, seed=3)


def tokens(model: Path, backend: str = "mp", **layout: Any) -> list[list[int]]:
    with LLM(
        str(model),
        dtype="float32",
        threads_per_rank=1,
        distributed_executor_backend=backend,  # type: ignore[arg-type]
        **layout,
    ) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.soak),
        pytest.param({"tensor_parallel_size": 2, "kernels": "off"}, marks=pytest.mark.soak),  # over gloo
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        pytest.param(
            {"pipeline_parallel_size": 2, "tensor_parallel_size": "4,1", "async_depth": 1},
            marks=pytest.mark.soak,
        ),
        pytest.param({"pipeline_parallel_size": 3}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a10_b1_d13_processes_give_the_tokens_of_one_rank(model: Path, layout: dict[str, Any]) -> None:
    assert tokens(model, **layout) == tokens(model, "inprocess", kernels="off")


@pytest.mark.soak
def test_d13_stages_that_ranks_share_are_measured_together(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("penstock.engine.supervisor.auto_partition.MEASURE_S", 0.2)
    layout = {"pipeline_parallel_size": 2, "tensor_parallel_size": "2,1", "partition": "auto"}
    assert tokens(model, "inprocess", **layout) == tokens(model, "inprocess")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(2, "--tp", "2,1") as served:
        yield served


@pytest.mark.soak
@pytest.mark.parametrize("name", sampled(["stage 0 tp 1", "stage 0 tp 0", "stage 1 tp 0"], 1))
def test_r4_streams_go_on_when_a_rank_is_killed(server: Server, name: str) -> None:
    family = {f"stage {stage} tp {rank}" for stage, rank in ((0, 0), (0, 1), (1, 0))}
    victim, before = named(server, f"penstock {name}"), server.num_recoveries
    others = {other: named(server, f"penstock {other}").pid for other in family - {name}}
    streams = [iter(Stream(server, request)) for request in REQUESTS]
    found = [[next(streams[0]) for _ in range(9)], [], []]
    victim.send_signal(signal.SIGKILL)
    for ids, stream in zip(found, streams, strict=True):
        ids.extend(stream)
    assert found == server.golden
    wait_until(lambda: server.num_recoveries == before + 1, 30)
    assert {other: named(server, f"penstock {other}").pid for other in others} == others
    assert named(server, f"penstock {name}").pid != victim.pid


@pytest.mark.soak
@pytest.mark.parametrize("name", ["stage 0 tp 1", "stage 1 tp 0"])
def test_r4_s2_a_head_that_ranks_share_is_sent_again_when_a_rank_is_lost(name: str) -> None:
    """Issue 25, point 14: by a rank that is new, or to one."""
    with Server(2, "--tp", "2,4", "--tied-head", "transfer") as server:
        victim, stream = named(server, f"penstock {name}"), iter(Stream(server, REQUESTS[0]))
        found = [next(stream) for _ in range(9)]
        victim.send_signal(signal.SIGKILL)
        assert [*found, *stream] == server.golden[0]
        wait_until(lambda: server.num_recoveries == 1, 30)


@pytest.mark.soak
def test_what_is_said_of_ranks(server: Server) -> None:
    assert "stages 2 x tp 2,1" in server.output
    assert "stage 0 tp 1  pid" in server.output
    assert "1/2 of embed, layers 0-" in server.output
    assert server.metric("penstock_stage_restarts_total") >= 0


def test_a_layout_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    from penstock.errors import UsageError

    directory = make_checkpoint(tmp_path)
    heads = json.loads((directory / "config.json").read_text())["num_attention_heads"]
    with pytest.raises(UsageError, match=f"{heads} attention heads, which 3 ranks cannot share"):
        LLM(str(directory), tensor_parallel_size=3)
