"""The estimate of a layout on this machine, from the planner's measurements of its stages.

The planner times the stages of one layout side by side (`planner.measure`). From these times it finds the
best split, and how many tokens of KV cache each stage has room for (`planner.performance`). Here this becomes
an `Estimate`, so that layouts can be compared. The links between stages of one host are part of the measured
steps, and are taken to cost no time besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.families.spec import ModelSpec
from penstock.layouts.devices import Device, DeviceHost, DeviceSet, Link
from penstock.layouts.estimate import Estimate, hop_estimates, rank_estimates
from penstock.layouts.known_devices import MEMORY, NETWORK
from penstock.layouts.layout import Layout, StageSite, Wanted, can_share
from penstock.layouts.model_sizes import ModelSizes
from penstock.layouts.prediction import Load, predict
from penstock.layouts.stage_times import MeasuredTimes
from penstock.planner.performance import PartitionChoice
from penstock.runner.kv_demand import stranded_bytes

_NO_TIME = Link(kind="memory", bytes_per_s=1e18, latency_s=0.0)
_MOST_LAYOUTS = 8  # layouts that are measured; each takes some seconds


def layouts_here(device: Device, spec: ModelSpec, wanted: Wanted, load_bits: int | None) -> list[Layout]:
    """Return the layouts of one host that are measured: at most `_MOST_LAYOUTS`, those of few ranks first.

    They have at most one rank for each core, unless the user has fixed more.

    Args:
        device: the CPU of the host.
        load_bits: bits of weights that are quantised at load; None: they are not.
    """
    found = [
        layout
        for pp, tp in _sizes(device.cores, spec, wanted)
        if can_share(spec, tp, load_bits) and wanted.allows(layout := layout_here(device, pp, tp))
    ]
    return sorted(found, key=lambda layout: (layout.num_devices, layout.pp))[:_MOST_LAYOUTS]


def devices_here(device: Device, name: str) -> DeviceSet:
    """Return the set of devices that has this host alone, with its CPU as the device."""
    host = DeviceHost(name=name, devices=(device,), link=MEMORY, network=NETWORK)
    return DeviceSet(hosts=(host,))


def _sizes(cores: int, spec: ModelSpec, wanted: Wanted) -> Iterator[tuple[int, int]]:
    """Yield pairs of a number of stages and a number of ranks of each stage.

    Their product is at most the number of cores, unless the user has fixed larger numbers.
    """
    for pp in [wanted.pp] if wanted.pp else range(1, min(cores, spec.num_layers) + 1):
        for tp in [max(wanted.tp)] if wanted.tp else range(1, cores + 1):
            if (wanted.pp and wanted.tp) or pp * tp <= max(cores, wanted.pp or 0, *(wanted.tp or (0,))):
                yield pp, tp


def layout_here(device: Device, pp: int, tp: int) -> Layout:
    """Return the layout of `pp` stages with `tp` ranks each, all on the CPU of one host."""
    site = StageSite(host="here", device=device, num_ranks=tp, link=MEMORY)
    return Layout(replica_sites=((site,) * pp,))


def measured_estimate(
    layout: Layout,
    choice: PartitionChoice,
    sizes: ModelSizes,
    load: Load,
    *,
    is_default_split: bool,
    layers: Sequence[int] | None = None,
) -> Estimate:
    """Return the estimate of a layout whose stages the planner has measured.

    Args:
        choice: the measurements, and the best split by them.
        is_default_split: `serve` splits the layers so without `--partition`.
        layers: number of layers of each stage; None: those of the planner's best split.
    """
    layers = choice.best.layers if layers is None else layers
    times = [
        MeasuredTimes(costs=costs, num_layers=count)
        for costs, count in zip(choice.costs, layers, strict=True)
    ]
    links = [_NO_TIME] * layout.pp
    room = [tokens[count] for tokens, count in zip(choice.kv_tokens, layers, strict=True)]
    predicted = predict(times, links, min(room), load, sizes)
    ranks = []
    for rank in rank_estimates(layout, sizes, layers, load):
        costs = choice.costs[rank.stage]
        blocks, fewest = room[rank.stage] // costs.block_size, min(room) // costs.block_size
        ranks.append(
            replace(
                rank,
                weight_bytes=costs.weight_bytes(rank.layers),
                kv_tokens=room[rank.stage],
                free_bytes=max(0, costs.available_bytes - costs.weight_bytes(rank.layers)),
                activation_bytes=rank.activation_bytes if costs.peak_bytes is None else costs.peak_bytes,
                stranded_bytes=stranded_bytes(blocks, fewest, rank.layers * costs.kv_block_bytes),
            )
        )
    return Estimate(
        layout=layout,
        layers=tuple(layers),
        is_default_split=is_default_split,
        ranks=tuple(ranks),
        hops=tuple(hop_estimates([MEMORY] * layout.pp, sizes, load, layout, predicted)),
        predicted=predicted,
    )
