"""Devices of hosts that are there, and layouts of this machine from measured costs."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from penstock.config.engine import CacheConfig, ModelConfig, SchedulerConfig
from penstock.errors import UsageError
from penstock.families.registry import resolve_model_directory
from penstock.hosts.resources import HostResources
from penstock.layouts.layout import Wanted
from penstock.layouts.machines import cpu_device, devices_of_hosts, known_name
from penstock.layouts.measured import devices_here, layouts_here, measured_estimate
from penstock.layouts.model_sizes import read_sizes
from penstock.layouts.prediction import Load
from penstock.planner.mix import Mix
from penstock.planner.performance import choose
from penstock.planner.stage_costs import StageCosts, StepCosts
from penstock.process.config import HostLink
from rank_configs import make_rank_configs

HEAD = HostResources(num_cpus=8, free_bytes=32 << 30, num_gpus=0, name="head")
LINK = HostLink(
    hosts=("head", "tower"),
    interfaces=("eth0", "eth0"),
    round_trip_s=0.004,
    bytes_per_s_out=2e6,
    bytes_per_s_in=1e6,
)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla T4", "t4"),
        ("Voodoo 2", None),
    ],
)
def test_i6_a_gpu_is_known_by_what_its_driver_calls_it(model: str, name: str | None) -> None:
    assert known_name(model) == name


def test_i6_hosts_that_have_joined_have_what_they_say_and_links_as_measured() -> None:
    tower = msgspec.structs.replace(
        HEAD, name="tower", num_gpus=2, gpu_models=("NVIDIA GeForce RTX 4090",) * 2
    )
    devices = devices_of_hosts([HEAD, tower], [LINK])
    assert [[device.kind for device in host.devices] for host in devices.hosts] == [
        ["cpu"],
        ["rtx4090", "rtx4090"],
    ]
    cpu = devices.hosts[0].devices[0]
    assert (cpu.cores, cpu.memory_bytes) == (8, 32 << 30)
    link = devices.link_between("tower", "head")
    assert link.bytes_per_s == 1e6  # the slower direction
    assert link.latency_s == pytest.approx(0.002)
    unknown = msgspec.structs.replace(tower, gpu_models=("Voodoo 2",))
    with pytest.raises(UsageError, match="'Voodoo 2' of tower is not a known device"):
        devices_of_hosts([unknown], [])


def costs(stage: int, num_stages: int) -> StageCosts:
    """A layer takes 2 ms, and a row 0.1 ms more; the last stage's head 4 ms."""
    head_s = 0.004 * (stage == num_stages - 1)

    def step(rows: int) -> StepCosts:
        return StepCosts(
            num_tokens=rows,
            layer_s=0.002 + 0.0001 * rows,
            fixed_s=0.0,
            embed_s=0.0,
            head_s=head_s,
            link_s=0.0,
        )

    return StageCosts(
        decode=[step(1), step(8)],
        prefill=step(32),
        layer_bytes=1000,
        end_bytes=500,
        kv_block_bytes=64,
        block_size=16,
        available_bytes=1 << 30,
        num_sharers=num_stages,
        has_kernels=True,
    )


def test_d7_measured_steps_become_a_prediction_with_the_planners_split() -> None:
    sizes = read_sizes(ModelConfig(model="demo"))
    ranks = make_rank_configs(resolve_model_directory("demo"), 2)
    mix = Mix(32, 16)
    choice = choose([costs(0, 2), costs(1, 2)], ranks, mix, [3, 3])
    load = Load(
        concurrency=1,
        mix=mix,
        max_model_len=256,
        scheduler=SchedulerConfig(),
        cache=CacheConfig(block_size=16),
    )
    device = cpu_device(HEAD)
    (layout,) = layouts_here(device, sizes.spec, Wanted(pp=2, tp=(1,)), None)
    estimate = measured_estimate(layout, choice, sizes, load, is_default_split=False)
    assert estimate.layers == choice.best.layers == (4, 2)
    # One request visits the stages in turn: six layers of 2.1 ms, and the head.
    assert estimate.predicted.time_per_token_s == pytest.approx(6 * 0.0021 + 0.004)
    assert estimate.predicted.bubble == pytest.approx(0.5)
    assert [rank.weight_bytes for rank in estimate.ranks] == [4500, 2500]
    two = measured_estimate(
        layout, choice, sizes, dataclasses.replace(load, concurrency=2), is_default_split=False
    )
    assert two.predicted.micro_batches == 2
    assert two.predicted.time_per_token_s == pytest.approx(2 * 4 * 0.0021, rel=0.02)


def test_i6_this_machine_has_a_layout_for_each_way_to_share_its_cores() -> None:
    spec = read_sizes(ModelConfig(model="demo")).spec
    device = cpu_device(msgspec.structs.replace(HEAD, num_cpus=4))
    shapes = [(layout.pp, layout.tp) for layout in layouts_here(device, spec, Wanted(), None)]
    assert shapes[:3] == [(1, 1), (1, 2), (2, 1)]
    assert all(pp * tp <= 4 for pp, tp in shapes)
    only = layouts_here(device, spec, Wanted(pp=3), None)
    assert {layout.pp for layout in only} == {3}
    assert layouts_here(device, spec, Wanted(pp=1, tp=(7,)), None) == []
    assert devices_here(device, "desk").num_devices == 1
