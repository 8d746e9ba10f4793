"""The changes of the devices that would help most: layouts are estimated again with each change.

Each change is one that can be bought: more memory, more memory bandwidth, a faster network, less latency
between hosts, NVLink, or one more host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.errors import NotEnoughMemoryError
from penstock.layouts.devices import GIB, Device, DeviceHost, DeviceSet, Link
from penstock.layouts.estimate import Estimate
from penstock.layouts.known_devices import nvlink

_MORE_BYTES = 8 * GIB
_FASTER = 10  # the factor by which a network gets faster
_NVLINK_BYTES_PER_S = 600e9
_LEAST_GAIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """A change of the devices, and what it brings.

    Attributes:
        change: the change in words.
        layout: flags of the layout that would be best with this change.
        tokens_per_s, time_per_token_s, kv_tokens: the numbers predicted for that layout.
        gain: share by which the tokens a second grow, against the best layout without the change.
        kv_gain: share by which the tokens of KV cache grow.
    """

    change: str
    layout: str
    tokens_per_s: float
    time_per_token_s: float
    kv_tokens: int
    gain: float
    kv_gain: float


def improvements(
    now: Estimate, devices: DeviceSet, best_on: Callable[[DeviceSet], Estimate]
) -> list[Improvement]:
    """Return the changes that bring at least `_LEAST_GAIN` of speed or KV cache, the best first.

    Args:
        now: the best layout on the devices as they are.
        best_on: returns the best layout on changed devices; raises `NotEnoughMemoryError` if none fits.
    """
    found = []
    for change, changed in changes(devices, now):
        try:
            then = best_on(changed)
        except NotEnoughMemoryError:
            continue
        found.append(
            Improvement(
                change=change,
                layout=then.flags,
                tokens_per_s=then.predicted.tokens_per_s,
                time_per_token_s=then.predicted.time_per_token_s,
                kv_tokens=then.kv_tokens,
                gain=then.predicted.tokens_per_s / now.predicted.tokens_per_s - 1.0,
                kv_gain=then.kv_tokens / now.kv_tokens - 1.0,
            )
        )
    good = [each for each in found if each.gain >= _LEAST_GAIN or each.kv_gain >= _LEAST_GAIN]
    return sorted(good, key=lambda each: (-round(each.gain, 3), -round(each.kv_gain, 3), each.change))


def changes(devices: DeviceSet, now: Estimate) -> Iterator[tuple[str, DeviceSet]]:
    """Yield changes of the devices: each in words, and the devices after it.

    Memory is added where the fewest KV tokens fit, and its bandwidth grows on the slowest stage.
    """
    tightest = min(now.ranks, key=lambda rank: rank.kv_tokens)
    yield (
        f"8 GiB more on each {_named(devices, tightest.device, tightest.host)}",
        _on_host(devices, tightest.host, tightest.device, _with_more_memory),
    )
    slowest = max(range(len(now.predicted.stage_s)), key=now.predicted.stage_s.__getitem__)
    site = now.layout.stages[slowest]
    yield (
        f"twice the memory bandwidth of each {_named(devices, site.device.kind, site.host)}",
        _on_host(devices, site.host, site.device.kind, _with_faster_memory),
    )
    if len(devices.hosts) > 1:
        yield f"a network {_FASTER} times as fast", _with_networks(devices, _faster)
        yield "half the latency between hosts", _with_networks(devices, _sooner)
    if any(_could_have_nvlink(host) for host in devices.hosts):
        yield "NVLink between the GPUs of each host", _with_nvlink(devices)
    last = devices.hosts[-1]
    yield (
        f"one more host like {last.name}",
        replace(devices, hosts=(*devices.hosts, replace(last, name=f"{last.name}+"))),
    )


def _named(devices: DeviceSet, kind: str, host: str) -> str:
    """Return a name for the devices that a change is about.

    These are the devices of one kind on one host; if all hosts are alike, the devices of all of them.
    """
    return kind if devices.is_uniform else f"{kind} of {host}"


def _on_host(devices: DeviceSet, name: str, kind: str, change: Callable[[Device], Device]) -> DeviceSet:
    def changed(host: DeviceHost) -> DeviceHost:
        if host.name != name and not devices.is_uniform:
            return host
        return replace(
            host, devices=tuple(change(each) if each.kind == kind else each for each in host.devices)
        )

    return replace(devices, hosts=tuple(map(changed, devices.hosts)))


def _with_more_memory(device: Device) -> Device:
    return replace(device, memory_bytes=device.memory_bytes + _MORE_BYTES)


def _with_faster_memory(device: Device) -> Device:
    return replace(device, read_bytes_per_s=2 * device.read_bytes_per_s)


def _with_networks(devices: DeviceSet, change: Callable[[Link], Link]) -> DeviceSet:
    return DeviceSet(
        hosts=tuple(replace(host, network=change(host.network)) for host in devices.hosts),
        links={hosts: change(link) for hosts, link in devices.links.items()},
    )


def _faster(link: Link) -> Link:
    return replace(link, bytes_per_s=_FASTER * link.bytes_per_s)


def _sooner(link: Link) -> Link:
    return replace(link, latency_s=link.latency_s / 2)


def _could_have_nvlink(host: DeviceHost) -> bool:
    gpus: Sequence[Device] = [device for device in host.devices if not device.is_cpu]
    return len(gpus) > 1 and not host.link.is_nvlink


def _with_nvlink(devices: DeviceSet) -> DeviceSet:
    hosts = tuple(
        replace(host, link=nvlink(_NVLINK_BYTES_PER_S)) if _could_have_nvlink(host) else host
        for host in devices.hosts
    )
    return replace(devices, hosts=hosts)
