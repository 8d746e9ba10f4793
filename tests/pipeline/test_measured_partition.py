"""`--partition auto` from end to end: measured, chosen, served, with the tokens of `even`. Rows d5, I13."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from disturbed import started_processes
from penstock import LLM, SamplingParams
from penstock.engine.supervisor import auto_partition
from penstock.kernels.cpu.build_cache import cache_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": list(range(first, first + 40))} for first in (3, 50, 200)]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of costs, one of our own; of kernels, the one that is there."""
    kernels = cache_folder(os.environ)
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "kernels").symlink_to(kernels)
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(auto_partition, "MEASURE_S", 0.05)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ranks were measured, each time that any were."""
    counts: list[int] = []
    measure: Callable[..., Any] = auto_partition.measure

    def counted(configs: Sequence[Any], *given: Any) -> Any:
        counts.append(len(configs))
        return measure(configs, *given)

    monkeypatch.setattr(auto_partition, "measure", counted)
    return counts


def tokens(partition: str, backend: str, **options: Any) -> list[list[int]]:
    with LLM(
        "demo",
        pipeline_parallel_size=2,
        partition=partition,
        distributed_executor_backend=backend,
        num_blocks=64,
        threads_per_rank=options.pop("threads_per_rank", 1),
        **options,
    ) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_d5_i13_auto_gives_the_tokens_of_even(measured: list[int], tmp_path: Path) -> None:
    expected = tokens("even", "inprocess")
    assert measured == []
    assert tokens("auto", "inprocess") == expected
    assert tokens("auto", "mp", pin_threads="off") == expected
    assert measured == [2], "once, and the second engine has found it"
    assert len(list((tmp_path / "partition").glob("*.json"))) == 1
    assert started_processes() == []


@pytest.mark.soak
def test_i13_stages_may_differ_in_threads(measured: list[int]) -> None:
    assert tokens("auto", "mp", threads_per_rank=[1, 2]) == tokens("even", "inprocess")
    assert measured == [2]


@pytest.mark.soak
def test_d16_plan_prints_the_table_and_serves_nothing() -> None:
    program = (
        "import sys; from penstock.engine.supervisor import auto_partition; auto_partition.MEASURE_S = 0.05\n"
        "from penstock.cli.program import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "plan", "demo", "--pp", "2", "--threads-per-rank", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[0] == "note: measuring 2 stages to choose the partition."
    assert lines[2].startswith("partition ")
    assert lines[3].split()[:2] == ["stage", "layers"]
    assert lines[3].endswith("stranded MiB")
    layers = lines[2].split()[1].rstrip(":")
    assert lines[-1] == f"Serve it with --partition {layers}, or with --partition auto."
    again = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert again.stdout.splitlines()[:2] == lines[1:3], "not measured again, and chosen again"
