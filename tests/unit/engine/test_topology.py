"""Topology files: what they say, and what is said of those that do not add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import ParallelConfig
from penstock.engine.topology import with_topology
from penstock.errors import UsageError

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
        ("stage = []", "it has no stage"),
        ("[[stage]]\nlayer = 3", "unknown field `layer`"),
        ("[[stage]]\ntp = 'two'", "Expected `int`, got `str`"),
        ("[[stage]]\ntp = 0", "tp is 0"),
        ("[[stage]", "Expected"),
        ("[[stage]]\ntp = 2\ndevice = ['cpu']", "a stage of 2 ranks has 1 entries of device"),
        ("[[stage]]\nthreads = [1, 2]", "a stage of 1 ranks has 2 entries of threads"),
        ("[[stage]]\nlayers = 3\n[[stage]]", "1 of 2 stages have layers"),
        ("[[stage]]\nthreads = 3\n[[stage]]", "1 of 2 stages have threads"),
    ],
)
def test_a_file_that_does_not_add_up_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=r"topology file .*topology\.toml: ") as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert caught.value.param == "topology"


def test_a_device_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'tpu' is no device"):
        read(tmp_path, "[[stage]]\ndevice = 'tpu'")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.toml: it cannot be read: No such file"):
        with_topology(ParallelConfig(), tmp_path / "nowhere.toml")


def test_a_setting_that_the_file_stands_for_must_not_be_given_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="both pipeline_parallel_size and a topology file"):
        read(tmp_path, UNLIKE, ParallelConfig(pipeline_parallel_size=2))
