"""A layout of a model (its stages, ranks and replicas), and the list of layouts that given devices allow.

The ranks of a stage are on devices of one host, and these devices are alike. Stages follow the order of the
hosts, so that as few links as possible lie between hosts. `layouts.estimate` says how good a layout is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.errors import UsageError
from penstock.families.sharding import require_shardable, require_whole_groups
from penstock.families.spec import ModelSpec
from penstock.layouts.devices import Device, DeviceHost, DeviceSet, Link
from penstock.layouts.layout_name import layout_name

_MOST_STAGES = 64
_FEW_STAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSite:
    """The devices of one host on which a stage runs.

    Attributes:
        host: name of the host.
        device: the device of each rank; all are alike.
        link: the link between these devices.
    """

    host: str
    device: Device
    num_ranks: int
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The stages of one replica, and the number of replicas.

    Attributes:
        replica_sites: for each replica, the sites of its stages. Estimates are made for the first replica.
        expert_parallel: the ranks of a stage have whole experts, not slices of each.
    """

    replica_sites: tuple[tuple[StageSite, ...], ...]
    expert_parallel: bool = False

    @property
    def stages(self) -> tuple[StageSite, ...]:
        return self.replica_sites[0]

    @property
    def is_uniform(self) -> bool:
        """Whether all stages have equally many devices, which are alike and joined by the same link."""
        return are_alike(self.stages)

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        return tuple(site.num_ranks for site in self.stages)

    @property
    def tp(self) -> int:
        """The number of ranks of the stage that has most."""
        return max(self.tp_sizes)

    @property
    def dp(self) -> int:
        return len(self.replica_sites)

    @property
    def ep(self) -> int:
        """The number of ranks of a replica if these have whole experts; 1 if experts are cut into slices."""
        return sum(self.tp_sizes) if self.expert_parallel else 1

    @property
    def num_devices(self) -> int:
        return sum(site.num_ranks for sites in self.replica_sites for site in sites)

    @property
    def name(self) -> str:
        """The name, such as "PP 2 x TP 8 x DP 2 + EP"."""
        return layout_name(self.pp, self._tp_text, self.dp) + (" + EP" if self.expert_parallel else "")

    @property
    def _tp_text(self) -> str:
        return str(self.tp) if len(set(self.tp_sizes)) == 1 else ",".join(map(str, self.tp_sizes))

    def flags(self, layers: Sequence[int] | None = None) -> str:
        """Return the flags of `penstock serve` for this layout.

        Args:
            layers: number of layers of each stage, for `--partition`; None: the flag is left out.
        """
        parts = [f"--pp {self.pp}", f"--tp {self._tp_text}"]
        parts += [f"--dp {self.dp}"] if self.dp > 1 else []
        parts += ["--ep"] if self.expert_parallel else []
        types = self._device_types()
        if types != {"cpu"}:  # the default of `serve`
            parts.append(f"--device {','.join(self._devices()) if len(types) > 1 else 'cuda'}")
        parts += [f"--partition {','.join(map(str, layers))}"] if layers is not None else []
        return " ".join(parts)

    def _device_types(self) -> set[str]:
        return {site.device.type for site in self.stages}

    def _devices(self) -> Iterator[str]:
        """Yield the device of each rank, as `--device` takes it; a host's GPUs are numbered from 0."""
        used: Counter[str] = Counter()
        for site in self.stages:
            for _ in range(site.num_ranks):
                yield "cpu" if site.device.is_cpu else f"cuda:{used[site.host]}"
                used[site.host] += not site.device.is_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The parts of a layout that the user has fixed; None: the user leaves this part open."""

    pp: int | None = None
    tp: tuple[int, ...] | None = None
    dp: int | None = None
    ep: bool | None = None

    @property
    def is_open(self) -> bool:
        return self == Wanted()

    def allows(self, layout: Layout) -> bool:
        fixed_tp = self.tp is None or layout.tp_sizes in (self.tp, self.tp * layout.pp)
        return (
            fixed_tp
            and self.pp in (None, layout.pp)
            and self.dp in (None, layout.dp)
            and self.ep in (None, layout.expert_parallel)
        )


def are_alike(sites: Sequence[StageSite]) -> bool:
    """Return whether all sites have equally many devices, which are alike and joined by the same link."""
    return len({(site.device, site.num_ranks, site.link) for site in sites}) <= 1


def layouts_on(
    devices: DeviceSet, spec: ModelSpec, most_replicas: int, load_bits: int | None = None
) -> Iterator[Layout]:
    """Yield the layouts of a model on some devices, each once.

    Not all numbers of stages (`_numbers_of_stages`) and replicas are tried.

    Args:
        most_replicas: most replicas of a layout; more would have no request to run.
        load_bits: bits of weights that are quantised at load; None: they are not.
    """
    seen = set()
    for sites in _site_lists(devices, spec, load_bits):
        for layout in _layouts_of(sites, spec, most_replicas, load_bits):
            if layout not in seen:
                seen.add(layout)
                yield layout


def _layouts_of(
    sites: Sequence[StageSite], spec: ModelSpec, most_replicas: int, load_bits: int | None
) -> Iterator[Layout]:
    alike = are_alike(sites)
    num_hosts = len({site.host for site in sites})
    for pp in _numbers_of_stages(len(sites), num_hosts):
        if pp > spec.num_layers:
            continue
        for dp in _numbers_of_replicas(min(len(sites) // pp, most_replicas)):
            if not alike and dp > 1 and pp * dp < len(sites):
                continue  # sites that are unlike are either all used by the replicas, or there is one replica
            replicas = _replicas(sites, pp, dp)
            tp = max(site.num_ranks for site in replicas[0])
            if can_share(spec, tp, load_bits):
                yield Layout(replica_sites=replicas)
            if spec.experts is not None and tp > 1 and can_share(spec, tp, load_bits, expert_parallel=True):
                yield Layout(replica_sites=replicas, expert_parallel=True)


def _numbers_of_stages(num_sites: int, num_hosts: int) -> list[int]:
    """Return the numbers of stages to try.

    All up to `_FEW_STAGES` are tried. Of the larger ones, those are tried that divide the number of sites,
    are a multiple of the number of hosts, or are the largest.
    """
    most = min(num_sites, _MOST_STAGES)
    return [
        pp
        for pp in range(1, most + 1)
        if pp <= _FEW_STAGES or num_sites % pp == 0 or pp % num_hosts == 0 or pp == most
    ]


def _numbers_of_replicas(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most` itself."""
    return sorted({1 << power for power in range(most.bit_length())} | {most})


def _replicas(sites: Sequence[StageSite], pp: int, dp: int) -> tuple[tuple[StageSite, ...], ...]:
    """Return the sites of each of `dp` replicas with `pp` stages: the fastest ones, in the order given."""
    by_speed = sorted(
        range(len(sites)), key=lambda index: -sites[index].device.read_bytes_per_s * sites[index].num_ranks
    )
    chosen = [sites[index] for index in sorted(by_speed[: pp * dp])]
    return tuple(tuple(chosen[start : start + pp]) for start in range(0, pp * dp, pp))


def _site_lists(
    devices: DeviceSet, spec: ModelSpec, load_bits: int | None
) -> Iterator[tuple[StageSite, ...]]:
    """Yield lists of sites; the sites of a list have equally many devices.

    If devices differ, one more list follows. Its sites take as many alike devices of a host as can share a
    stage.
    """
    most = max(len(host.devices) for host in devices.hosts)
    sizes = [
        size
        for size in range(1, most + 1)
        if can_share(spec, size, load_bits)
        or (spec.experts is not None and can_share(spec, size, load_bits, expert_parallel=True))
    ]
    for size in sizes:
        sites = tuple(site for host in devices.hosts for site in _sites_of(host, size))
        if sites:
            yield sites
    if not devices.is_uniform:
        yield tuple(
            site
            for host in devices.hosts
            for run in _runs(host)
            for site in _sites_of_run(host, run, max(size for size in sizes if size <= len(run)))
        )


def can_share(spec: ModelSpec, size: int, load_bits: int | None, *, expert_parallel: bool = False) -> bool:
    """Return whether a stage of this model can be cut into parts for `size` ranks.

    Args:
        load_bits: bits of weights that are quantised at load; None: they are not.
        expert_parallel: the ranks have whole experts, not slices of each.
    """
    if spec.implementation != "penstock" and size > 1:  # `serve` refuses it, too
        return False
    try:
        require_shardable(spec, size, expert_parallel=expert_parallel)
        require_whole_groups(spec, size, load_bits, expert_parallel=expert_parallel)
    except UsageError:
        return False
    return True


def require_place_for_quantised(devices: DeviceSet, spec: ModelSpec, load_bits: int | None) -> None:
    """Raise `UsageError` if the weights are quantised and a device is a GPU, on which `serve` refuses them.

    Args:
        load_bits: bits of weights that are quantised at load; None: they are not.
    """
    gpus = [device.kind for host in devices.hosts for device in host.devices if not device.is_cpu]
    if gpus and (load_bits is not None or spec.quantization is not None):
        raise UsageError(
            f"the weights are quantised, but {gpus[0]} is a GPU: they run on the CPU only, so far.",
            remedy="Name CPUs in --devices. On GPUs, use the original checkpoint without --quantization, or "
            "a GGUF file with --gguf-dequantize.",
            param="devices",
        )


def _sites_of(host: DeviceHost, size: int) -> Iterator[StageSite]:
    for run in _runs(host):
        yield from _sites_of_run(host, run, size)


def _sites_of_run(host: DeviceHost, run: Sequence[Device], size: int) -> Iterator[StageSite]:
    for _ in range(len(run) // size):
        yield StageSite(host=host.name, device=run[0], num_ranks=size, link=host.link)


def _runs(host: DeviceHost) -> list[list[Device]]:
    """Return the devices of a host in groups of alike devices, GPUs before CPUs."""
    ordered = sorted(host.devices, key=lambda device: (device.is_cpu, device.kind, device.memory_bytes))
    return [list(run) for _, run in groupby(ordered)]
