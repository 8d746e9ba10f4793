"""Topology files: what they say, and what is said of those that do not add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from penstock import LLM
from penstock.config.declared import configured_engine
from penstock.config.engine import ParallelConfig
from penstock.config.topology import with_topology
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.errors import PartitionError, UsageError
from penstock.executor.inprocess import InprocessExecutor
from penstock.process.config import RankConfig
from small_engines import run, small_engine

UNLIKE = """
[[stage]]
layers = 20
tp = 2
device = ["cuda:0", "cuda:1"]
threads = 1

[[stage]]
layers = 8
threads = [12]
"""


def read(tmp_path: Path, text: str, parallel: ParallelConfig | None = None) -> ParallelConfig:
    path = tmp_path / "topology.toml"
    path.write_text(text)
    return with_topology(parallel or ParallelConfig(), path)


def test_a_mark_of_utf8_at_the_beginning_is_no_part_of_a_file(tmp_path: Path) -> None:
    assert read(tmp_path, f"\ufeff{UNLIKE}").tp_sizes == [2, 1]


def test_d13_stages_that_are_unlike(tmp_path: Path) -> None:
    parallel = read(tmp_path, UNLIKE, ParallelConfig(async_depth=1))
    assert (parallel.pipeline_parallel_size, parallel.tp_sizes) == (2, [2, 1])
    assert parallel.rank_devices == ["cuda:0", "cuda:1", "cpu"]
    assert parallel.rank_threads == [1, 1, 12]
    assert (parallel.partition, parallel.async_depth) == ("20,8", 1)


def test_what_is_left_out_is_left_to_the_engine(tmp_path: Path) -> None:
    parallel = read(tmp_path, "[[stage]]\n[[stage]]\ntp = 2\n")
    assert (parallel.tp_sizes, parallel.partition, parallel.threads_per_rank) == ([1, 2], "even", None)
    assert parallel.rank_devices == ["cpu"] * 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Object missing required field `stage`"),
        ("stage = []", "it defines no stage"),
        ("[[stage]]\nlayer = 3", "unknown field `layer`"),
        ("[[stage]]\ntp = 'two'", "Expected `int`, got `str`"),
        ("[[stage]]\ntp = 0", "tp is 0"),
        ("[[stage]", "Expected"),
        ("[[stage]]\ntp = 2\ndevice = ['cpu']", "a stage of 2 ranks has 1 entries of device"),
        ("[[stage]]\nthreads = [1, 2]", "a stage of 1 ranks has 2 entries of threads"),
        ("[[stage]]\nlayers = 3\n[[stage]]", "1 of 2 stages have layers"),
        ("[[stage]]\nthreads = 3\n[[stage]]", "1 of 2 stages have threads"),
        ("[[stage]]\nthreads = 0\n[[stage]]", "1 of 2 stages have threads"),
    ],
)
def test_a_file_that_does_not_add_up_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=r"topology file .*topology\.toml: ") as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert caught.value.param == "topology"


def test_a_device_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'tpu' is not a device"):
        read(tmp_path, "[[stage]]\ndevice = 'tpu'")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.toml: it cannot be read: No such file"):
        with_topology(ParallelConfig(), tmp_path / "nowhere.toml")


def test_a_setting_that_the_file_stands_for_must_not_be_given_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pipeline_parallel_size and a topology file both define the stages"):
        read(tmp_path, UNLIKE, ParallelConfig(pipeline_parallel_size=2))


def test_layers_may_be_left_to_a_policy(tmp_path: Path) -> None:
    auto = ParallelConfig(partition="auto")
    assert read(tmp_path, "[[stage]]\n[[stage]]\ntp = 2\n", auto).partition == "auto"
    with pytest.raises(UsageError, match="partition and a topology file both define the stages"):
        read(tmp_path, UNLIKE, auto)
    with pytest.raises(UsageError, match="threads_per_rank is 0"):
        read(tmp_path, "[[stage]]\nthreads = 0")


RAGGED = """
[[stage]]
layers = 1
tp = 2
threads = 1

[[stage]]
layers = 2
threads = 1
"""
PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)] for i in range(3)]


def test_d13_an_llm_over_the_stages_of_a_file_gives_the_tokens_of_one_rank(tmp_path: Path) -> None:
    model, path = (
        make_checkpoint(tmp_path / "model", layers=3, vocab_size=150, seed=4),
        tmp_path / "unlike.toml",
    )
    path.write_text(RAGGED)
    with small_engine(model, dtype="float32") as alone:
        expected, _ = run(alone, PROMPTS)
    ranks: list[RankConfig] = []

    def make(plan: LaunchPlan) -> InprocessExecutor:
        ranks.extend(plan.ranks)
        return InprocessExecutor(plan.ranks)

    settings = {"dtype": "float32", "threads_per_rank": None, "topology": path}
    with small_engine(model, **settings, distributed_executor_backend=make) as unlike:
        assert run(unlike, PROMPTS)[0] == expected
    assert [(rank.stage, rank.tp_rank) for rank in ranks] == [(0, 0), (0, 1), (1, 0)]
    assert [(rank.start_layer, rank.end_layer) for rank in ranks] == [(0, 1), (0, 1), (1, 3)]


def test_d13_layers_that_are_not_those_of_the_model_are_refused(tmp_path: Path) -> None:
    """The sum of the file's is 3, and the model has 4: before anything is allocated."""
    model, path = make_checkpoint(tmp_path / "model", layers=4), tmp_path / "unlike.toml"
    (model / "model.safetensors").unlink()
    path.write_text(RAGGED)
    with pytest.raises(PartitionError, match=r'partition "1,2" sums to 3, the model has 4 layers'):
        LLM(str(model), distributed_executor_backend="inprocess", topology=path)


def test_d13_the_flag_is_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "unlike.toml"
    path.write_text(RAGGED)
    parallel = configured_engine({"topology": path}, "m").parallel
    assert parallel == with_topology(ParallelConfig(), path)
    assert parallel.tp_sizes == [2, 1]
    with pytest.raises(UsageError, match="pipeline_parallel_size and a topology file both define the stages"):
        configured_engine({"topology": path, "pipeline_parallel_size": 2}, "m")


def test_a_file_of_brackets_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("stage = " + 100_000 * "[")
    with pytest.raises(UsageError, match="topology file"):
        with_topology(ParallelConfig(), path)
