"""`--numeric-class`: who is refused before a process starts, and what could be used instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.config.engine import ParallelConfig
from penstock.engine.supervisor.class_choice import require_class
from penstock.errors import UsageError
from penstock.families.latent_spec import LatentSpec
from penstock.families.registry import load_spec, resolve_model_directory
from penstock.hosts.resources import HostResources


def host(name: str, *classes: str) -> HostResources:
    return HostResources(num_cpus=4, free_bytes=1 << 34, num_gpus=0, name=name, numeric_classes=classes)


TOWER = host("tower", "portable", "avx2", "avx512", "avx512-vnni")
DESK = host("desk", "portable", "avx2")
PHONE = host("phone", "neon")


def require(
    wanted: str, *hosts: HostResources, dtype: str = "float32", device: str = "cpu", **more: Any
) -> None:
    parallel = ParallelConfig(numeric_class=wanted, **more)
    require_class(parallel, load_spec(resolve_model_directory("demo")), dtype, ["cpu", device], hosts)


def test_g1_a_class_that_all_hosts_have_is_taken() -> None:
    require("avx2", TOWER, DESK)
    require("auto", TOWER, DESK, PHONE, device="cuda:0", kernels="off")


def test_g1_a_host_that_cannot_compute_in_it_is_named_with_what_it_has() -> None:
    said = "--numeric-class is avx512, but desk supports portable, avx2"
    with pytest.raises(UsageError, match=said) as caught:
        require("avx512", TOWER, DESK)
    assert caught.value.param == "numeric_class"
    assert "--numeric-class avx2, the best class available on all hosts" in caught.value.remedy
    with pytest.raises(UsageError, match="phone supports neon") as caught:
        require("avx2", TOWER, PHONE)
    assert "no class is available on all hosts" in caught.value.remedy
    with pytest.raises(UsageError, match="attic supports none"):
        require("avx2", host("attic"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"device": "cuda:0"}, "some ranks run on a GPU"),
        ({"kernels": "-head"}, "--kernels is -head"),
        ({"kernels": "off"}, "--kernels is off"),
        ({"dtype": "float16"}, "our kernels have no float16"),
    ],
)
def test_g1_where_torch_computes_no_class_of_our_kernels_can_be_chosen(
    settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=f"--numeric-class is avx2, but {why}"):
        require("avx2", TOWER, **settings)


def test_g1_where_torch_turns_keys_and_chooses_experts_no_class_can_be_chosen() -> None:
    latent = LatentSpec(rank=10, query_rank=0, plain_dim=6, rotary_dim=4, value_dim=5)
    spec = replace(load_spec(resolve_model_directory("demo")), latent=latent)
    with pytest.raises(UsageError, match="--numeric-class is avx2, but torch rotates the keys"):
        require_class(ParallelConfig(numeric_class="avx2"), spec, "float32", ["cpu"], [TOWER])
    require_class(ParallelConfig(), spec, "float32", ["cpu"], [TOWER])
