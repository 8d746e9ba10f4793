"""Makes the simulated pipe of a layout, with the times, links and KV blocks that `penstock plan` estimates.

devices, model, --pp, --tp, --dp ──layouts──▶ stages on devices, split of layers ──▶ `SimulatedPipe`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.errors import NotEnoughMemoryError, UsageError
from penstock.families.sharding import require_shardable
from penstock.families.spec import ModelSpec
from penstock.layouts.devices import DeviceSet, Link
from penstock.layouts.estimate import Estimate, device_times, estimate, largest_ranks, stage_links
from penstock.layouts.layout import Layout, StageSite
from penstock.layouts.model_sizes import ModelSizes
from penstock.layouts.prediction import Load, carried_bytes
from penstock.layouts.stage_times import StageTimes
from penstock.simulator.pipe import SimulatedPipe, Wire

_TOKEN_BYTES = 64  # of the message that brings samples back from the last stage


def fixed_layout(
    devices: DeviceSet, spec: ModelSpec, *, pp: int, tp: int, dp: int, expert_parallel: bool
) -> Layout:
    """Return the layout of `dp` replicas of `pp` stages with `tp` ranks each, on the devices in their order.

    Raises:
        UsageError: there are too few devices, or so many ranks cannot share the layers of this model.
    """
    require_shardable(spec, tp, expert_parallel=expert_parallel)
    sites = list(_sites(devices, tp))
    if len(sites) < pp * dp:
        raise UsageError(
            f"{dp} x {pp} stages of {tp} devices each do not fit the {devices.num_devices} devices given.",
            remedy="Name more devices in --devices, or use fewer stages, ranks or replicas.",
            param="devices",
        )
    replicas = tuple(tuple(sites[start : start + pp]) for start in range(0, pp * dp, pp))
    return Layout(replica_sites=replicas, expert_parallel=expert_parallel)


def planned_pipe(
    layout: Layout,
    sizes: ModelSizes,
    devices: DeviceSet,
    load: Load,
    *,
    jitter_s: float = 0.0,
    spread: float = 0.0,
    layers: Sequence[int] | None = None,
) -> SimulatedPipe:
    """Return the simulated pipe of one replica of a layout.

    Args:
        jitter_s: `Wire.jitter_s` of the links between hosts.
        spread: `SimulatedPipe.spread`.
        layers: number of layers of each stage; None: as `penstock plan` splits them.

    Raises:
        NotEnoughMemoryError: the model does not fit.
    """
    known = estimate(layout, sizes, devices, load, layers)
    if known is None:
        raise NotEnoughMemoryError(
            f"{layout.name} of this model does not fit these devices.",
            remedy="Use more devices, or a quantised model; `penstock plan` shows what each device holds.",
        )
    links = stage_links(layout, devices)
    wires = [_wire(link, sizes, jitter_s) for link in links[:-1]]
    back = links[-1] if layout.pp > 1 else None
    return SimulatedPipe(
        stages=_stage_times(layout, sizes, known),
        wires=wires,
        return_wire=Wire() if back is None else _return_wire(back, jitter_s),
        num_links=sum(link.kind == "network" for link in links[:-1]),
        num_blocks=min(rank.kv_tokens for rank in known.ranks) // load.cache.block_size,
        block_size=load.cache.block_size,
        max_model_len=load.max_model_len,
        has_known_costs=all(site.device.is_cpu for site in layout.stages),
        spread=spread,
    )


def _sites(devices: DeviceSet, tp: int) -> Iterator[StageSite]:
    """Yield sites of `tp` alike devices of one host, host by host; left-over devices are not used."""
    for host in devices.hosts:
        own = list(host.devices)
        while own:
            alike = [device for device in own if device == own[0]]
            own = [device for device in own if device != alike[0]]
            for _ in range(len(alike) // tp):
                yield StageSite(host=host.name, device=alike[0], num_ranks=tp, link=host.link)


def _stage_times(layout: Layout, sizes: ModelSizes, known: Estimate) -> list[StageTimes]:
    ranks = largest_ranks(layout, sizes, known.layers)
    return [device_times(site, sizes, rank, layout) for site, rank in zip(layout.stages, ranks, strict=True)]


def _wire(link: Link, sizes: ModelSizes, jitter_s: float) -> Wire:
    is_far = link.kind == "network"
    return Wire(
        latency_s=link.latency_s,
        per_token_s=carried_bytes(sizes, 1) / link.bytes_per_s,
        jitter_s=jitter_s if is_far else 0.0,
    )


def _return_wire(link: Link, jitter_s: float) -> Wire:
    return Wire(latency_s=link.seconds(_TOKEN_BYTES), jitter_s=jitter_s if link.kind == "network" else 0.0)
