"""Measured costs are found again, and measured again when anything they depend on has changed."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import msgspec
import pytest

from penstock.families.registry import load_spec, resolve_model_directory
from penstock.kernels.cpu.compiler import Machine, build_key
from penstock.planner import cost_cache
from penstock.planner.cost_cache import CostCache, are_to_keep, cost_key
from penstock.planner.stage_costs import StageCosts, StepCosts
from penstock.process.config import MeasureConfig
from rank_configs import make_rank_configs

DEMO = resolve_model_directory("demo")
STEP = StepCosts(num_tokens=1, layer_s=1e-3, fixed_s=0.0, embed_s=0.0, head_s=0.1, link_s=1e-6)
HARDWARE = [[2, "Xeon"], [4, "EPYC"]]
COSTS = StageCosts(
    decode=[STEP, STEP],
    prefill=STEP,
    layer_bytes=1,
    end_bytes=2,
    kv_block_bytes=3,
    block_size=16,
    available_bytes=4,
    num_sharers=2,
    has_kernels=True,
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PENSTOCK_CACHE_DIR": str(tmp_path / "cache")}


def configs(**changes: object) -> list[MeasureConfig]:
    return [
        MeasureConfig(rank=rank, num_rows=[1, 4], context=9, prefill_tokens=8, case_s=0.1)
        for rank in make_rank_configs(DEMO, 2, **changes)
    ]


def key(**changes: object) -> str:
    return cost_key(configs(**changes), HARDWARE, load_spec(DEMO), {})


def test_what_was_put_is_found(environ: dict[str, str], tmp_path: Path) -> None:
    CostCache.open(environ).put("abc", [COSTS, COSTS])
    assert CostCache.open(environ).find("abc", 2) == [COSTS, COSTS]
    assert [path.name for path in (tmp_path / "cache" / "partition").iterdir()] == ["abc.json"]
    assert CostCache.open(environ).find("xyz", 2) is None
    assert CostCache.open(environ).find("abc", 3) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'[{"decode": []}]', b"null", b"\xff"])
def test_a_damaged_file_is_measured_again(environ: dict[str, str], content: bytes) -> None:
    cache = CostCache.open(environ)
    cache.put("abc", [COSTS, COSTS])
    path = cache.path("abc")
    assert path is not None
    path.write_bytes(content)
    assert cache.find("abc", 2) is None
    cache.put("abc", [COSTS, COSTS])
    assert cache.find("abc", 2) == [COSTS, COSTS]


def test_without_a_folder_of_our_own_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    cache = CostCache.open({"PENSTOCK_CACHE_DIR": str(tmp_path / "cache")})
    cache.put("abc", [COSTS])
    assert cache.find("abc", 1) is None
    assert cache.path("abc") is None
    assert CostCache.open({}).path("abc") is None


def test_the_kernels_count_by_what_they_would_be_built_from() -> None:
    machine = Machine.detect()
    found = build_key(os.environ, machine)
    assert build_key(os.environ, machine) == found
    assert not found or build_key({**os.environ, "PENSTOCK_CXXFLAGS": "-O1"}, machine) not in ("", found)
    assert build_key({"PENSTOCK_CXX": "/nonexistent/g++"}, machine) == ""


@pytest.mark.parametrize(("library", "is_kept"), [("abc", False), ("", True)])
def test_what_was_measured_without_kernels_is_kept_only_where_there_are_none(
    library: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_cache, "build_key", lambda environ, machine: library)
    without = msgspec.structs.replace(COSTS, has_kernels=False)
    assert are_to_keep([COSTS, COSTS], {})
    assert are_to_keep([COSTS, without], {}) == is_kept


def test_a_disk_that_refuses_is_no_error(tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "gone")
    cache.put("abc", [COSTS])
    assert cache.find("abc", 1) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"threads": 2},
        {"cpus": (0,)},
        {"kernels": "off"},
        {"block_size": 32},
        {"max_num_batched_tokens": 128},
        {"device": "cuda"},
    ],
)
def test_the_key_follows_the_settings(changes: dict[str, object]) -> None:
    assert key() == key()
    assert key(**changes) != key()


def test_the_key_does_not_follow_what_costs_do_not_depend_on() -> None:
    assert key(model_path="/elsewhere", num_blocks=3, kv_cache_bytes=7, wait_timeout_s=1.0) == key()


def test_the_key_follows_model_machines_version_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    wider = dataclasses.replace(load_spec(DEMO), intermediate_size=1024)
    keys = {key(), cost_key(configs(), HARDWARE, wider, {})}
    keys.add(cost_key(configs(), HARDWARE[::-1], load_spec(DEMO), {}))
    for name, value in (
        ("_version", lambda distribution: "9"),
        ("build_key", lambda environ, machine: "another"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cost_cache, name, value)
            keys.add(key())
    assert len(keys) == 5
