"""The recommended layout and the reasons: a decision tree, and predictions where the tree leaves a choice.

    the model fits one device         it is not cut; replicas, if there are requests for them
    else: devices differ              the layout that is predicted to be the fastest
    else: it fits one host
        with NVLink                   one stage with as many ranks (TP) as the devices of a host allow
        without                       the layout within a host that is predicted to be the fastest
    else: it fits several hosts
        with NVLink, or one device    TP within each host, and the fewest stages (PP) that fit and leave no
                                      device unused
        without                       the layout that is predicted to be the fastest
    a stage has several ranks         with NVLink, ranks have whole experts (EP), if the model has experts
    devices are left over             replicas (DP), as long as there are requests for them

Layouts that fit are ranked by the tokens a second that are predicted for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import NotEnoughMemoryError
from penstock.layouts.devices import GIB, DeviceSet
from penstock.layouts.estimate import Estimate, estimate
from penstock.layouts.layout import Wanted, layouts_on
from penstock.layouts.model_sizes import ModelSizes
from penstock.layouts.prediction import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The layout that is recommended, and why.

    Attributes:
        best: the recommended layout.
        reasons: sentences about each decision, in the order of the decisions.
        alternatives: all other layouts that fit, the fastest first.
    """

    best: Estimate
    reasons: tuple[str, ...]
    alternatives: tuple[Estimate, ...]


def estimates_on(devices: DeviceSet, sizes: ModelSizes, load: Load, load_bits: int | None) -> list[Estimate]:
    """Return the estimates of all layouts that fit, the fastest first.

    Args:
        load_bits: bits of weights that are quantised at load; None: they are not.
    """
    layouts = layouts_on(devices, sizes.spec, load.concurrency, load_bits)
    found = [estimate(layout, sizes, devices, load) for layout in layouts]
    return ranked([each for each in found if each is not None])


def ranked(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates, the fastest first; of equally fast ones, first those of fewer devices and stages.

    Speed is tokens a second, then time to the first token; both are rounded, so that small differences do not
    count.
    """
    return sorted(estimates, key=_merit)


def _merit(own: Estimate) -> tuple[float, ...]:
    predicted, layout = own.predicted, own.layout
    return (
        -float(f"{predicted.tokens_per_s:.3g}"),
        float(f"{predicted.ttft_s:.2g}"),
        layout.num_devices,
        layout.pp,
        layout.dp,
        layout.expert_parallel,
    )


def recommend(estimates: Sequence[Estimate], devices: DeviceSet, sizes: ModelSizes) -> Recommendation:
    """Return the layout that is recommended among those that fit.

    Args:
        estimates: layouts that fit, the fastest first.

    Raises:
        NotEnoughMemoryError: there are none.
    """
    if not estimates:
        raise _nothing_fits(devices, sizes)
    best, reasons = _choose(estimates, devices, sizes)
    return Recommendation(
        best=best,
        reasons=tuple(reasons),
        alternatives=tuple(each for each in ranked(estimates) if each is not best),
    )


def wanted_estimates(estimates: Sequence[Estimate], wanted: Wanted) -> list[Estimate]:
    """Return the estimates of layouts that agree with what the user has fixed."""
    return [each for each in estimates if wanted.allows(each.layout)]


def _choose(
    estimates: Sequence[Estimate], devices: DeviceSet, sizes: ModelSizes
) -> tuple[Estimate, list[str]]:
    weights = f"{sizes.weight_bytes / GIB:.1f} GiB of weights"
    on_one = [each for each in estimates if each.layout.pp == each.layout.tp == 1]
    if on_one:
        best = _most_replicas(on_one)
        kind, free = best.ranks[0].device, best.ranks[0].free_bytes
        reason = (
            f"The model fits one device: {weights} leave {free / GIB:.1f} GiB of a {kind}. It is not cut, "
            "because stages wait for links."
        )
        return best, [reason, *_of_replicas(best)]
    reasons = [f"No device holds the model, with {weights} and the KV cache of one request: it is cut."]
    if not devices.is_uniform:
        reasons.append(
            "The devices differ: each stage gets layers in proportion to the speed of its devices."
        )
        return estimates[0], [*reasons, *_by_prediction(estimates[0])]
    in_host = [each for each in estimates if _is_in_one_host(each)]
    best = _in_host(in_host, devices, sizes, reasons) if in_host else _over_hosts(estimates, devices, reasons)
    return best, [*reasons, *_of_experts(best, sizes), *_of_replicas(best)]


def _in_host(
    estimates: Sequence[Estimate], devices: DeviceSet, sizes: ModelSizes, reasons: list[str]
) -> Estimate:
    host = devices.hosts[0]
    of_one_stage = [each for each in estimates if each.layout.pp == 1]
    if host.link.is_nvlink and of_one_stage:
        best = _most_replicas(_with_experts_whole(_widest(of_one_stage), sizes))
        rank = best.ranks[0]
        sums_s = rank.all_reduce_s + rank.all_reduce_latency_s
        reasons.append(
            "It fits one host, whose devices are joined by NVLink: tensor parallelism alone, TP "
            f"{best.layout.tp}. Its sums take {1e3 * sums_s:.2f} ms of the "
            f"{1e3 * best.predicted.time_per_token_s:.1f} ms of a token, and no stage waits for another."
        )
        return best
    if host.link.is_nvlink:
        reasons.append(
            "It fits one host, whose devices are joined by NVLink, but no layout of one stage fits."
        )
    else:
        reasons.append(f"It fits one host, but its devices are joined by {host.link.kind}, not by NVLink.")
    best = ranked(estimates)[0]
    reasons.extend(_by_prediction(best))
    return best


def _over_hosts(estimates: Sequence[Estimate], devices: DeviceSet, reasons: list[str]) -> Estimate:
    host = devices.hosts[0]
    widest = _widest(estimates)
    if not host.link.is_nvlink and len(host.devices) > 1:
        reasons.append(f"No host holds it; the devices of a host are joined by {host.link.kind}.")
        best = ranked(estimates)[0]
        reasons.extend(_by_prediction(best))
        return best
    num_sites = devices.num_devices // widest[0].layout.tp
    shared_out = [each for each in widest if num_sites % each.layout.pp == 0] or widest
    fewest = min(each.layout.pp for each in shared_out)
    few = [each for each in shared_out if each.layout.pp == fewest]
    whole = [each for each in few if each.layout.expert_parallel] or few
    best = _most_replicas(whole)
    tp = best.layout.tp
    inner = f"TP {tp} within each host, over NVLink" if tp > 1 else "each host has one device"
    reasons.append(
        f"No host holds it: {inner}; PP {fewest} over the hosts, which send each other hidden states only "
        "from stage to stage. Fewer stages would wait less, but do not fit or leave hosts unused."
    )
    return best


def _widest(estimates: Sequence[Estimate]) -> list[Estimate]:
    most = max(each.layout.tp for each in estimates)
    return [each for each in estimates if each.layout.tp == most]


def _with_experts_whole(estimates: Sequence[Estimate], sizes: ModelSizes) -> list[Estimate]:
    """Return the layouts with expert parallelism if the model has experts and there are such; else all."""
    whole = [each for each in estimates if each.layout.expert_parallel]
    return whole if sizes.spec.experts is not None and whole else list(estimates)


def _most_replicas(estimates: Sequence[Estimate]) -> Estimate:
    return min(estimates, key=lambda each: (-each.layout.dp, _merit(each)))


def _is_in_one_host(own: Estimate) -> bool:
    return all(len({site.host for site in sites}) == 1 for sites in own.layout.replica_sites)


def _by_prediction(best: Estimate) -> list[str]:
    predicted = best.predicted
    return [
        f"Of the layouts that fit, {best.layout.name} is predicted to be the fastest: "
        f"{predicted.tokens_per_s:.4g} tokens/s."
    ]


def _of_experts(best: Estimate, sizes: ModelSizes) -> list[str]:
    if sizes.spec.experts is None or not best.layout.expert_parallel:
        return []
    return [
        f"It has {sizes.spec.experts.num_experts} experts a layer: {best.layout.ep} ranks hold them whole "
        "(EP), and read them in longer runs than slices of each."
    ]


def _of_replicas(best: Estimate) -> list[str]:
    if best.layout.dp == 1:
        return []
    return [f"The devices hold {best.layout.dp} replicas (DP), among which the requests are shared."]


def _nothing_fits(devices: DeviceSet, sizes: ModelSizes) -> NotEnoughMemoryError:
    all_devices = [device for host in devices.hosts for device in host.devices]
    memory = sum(device.memory_bytes for device in all_devices)
    fewer_bits = "--quantization int8 or int4, " if all(device.is_cpu for device in all_devices) else ""
    return NotEnoughMemoryError(
        f"the model does not fit: {sizes.weight_bytes / GIB:.1f} GiB of weights and the KV cache of one "
        f"request, on {devices.num_devices} devices with {memory / GIB:.1f} GiB together.",
        remedy=f"Use more devices, {fewer_bits}or lower --max-model-len.",
    )
