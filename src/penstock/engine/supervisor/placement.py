"""Decides the host of each rank, and the rank's device, threads and CPU cores there.

Called by `engine.supervisor.launch`. In all lists, ranks stand stage by stage, those of one stage side by
side.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.config.engine import ParallelConfig, Quantization
from penstock.errors import UsageError
from penstock.families.spec import ModelSpec
from penstock.hosts.resources import HostResources
from penstock.pipeline.rank_layout import RankLayout
from penstock.process.config import RankConfig

Decided = TypeVar("Decided")
Named = TypeVar("Named")  # a host, or its name


def hosts_of_ranks(layout: RankLayout, hosts: Sequence[HostResources]) -> list[HostResources]:
    """Return the host of each rank: stages go to their replica's hosts in order, about as many to each."""
    num_stages, num_replicas = len(layout.tp_sizes), layout.data_parallel_size
    own = [hosts_of_replica(replica, num_replicas, hosts) for replica in range(num_replicas)]
    return [
        own[place.replica][place.stage * len(own[place.replica]) // num_stages] for place in layout.places
    ]


def hosts_of_replica(replica: int, num_replicas: int, hosts: Sequence[Named]) -> Sequence[Named]:
    """Return the hosts that a replica runs on.

    Each replica has hosts of its own if there are as many hosts as replicas; else some share a host:

        4 hosts, 2 replicas    a b | c d        2 hosts, 4 replicas    a: 0 1    b: 2 3
    """
    group, num_groups = _group_of(replica, num_replicas, len(hosts))
    return hosts[group * len(hosts) // num_groups : (group + 1) * len(hosts) // num_groups]


def replicas_beside(replica: int, num_replicas: int, num_hosts: int) -> list[int]:
    """Return the numbers of the replicas that run on the same hosts as `replica`, with its own."""
    own = _group_of(replica, num_replicas, num_hosts)
    return [other for other in range(num_replicas) if _group_of(other, num_replicas, num_hosts) == own]


def _group_of(replica: int, num_replicas: int, num_hosts: int) -> tuple[int, int]:
    """Return the number of the group of hosts that a replica runs on, and the number of groups."""
    num_groups = min(num_replicas, num_hosts)
    return replica * num_groups // num_replicas, num_groups


def on_each_host(
    of_ranks: Sequence[HostResources], decide: Callable[[HostResources, list[int]], Sequence[Decided]]
) -> list[Decided]:
    """Call `decide` for each host, and return what it has decided for each rank, in the order of the ranks.

    Args:
        of_ranks: the host of each rank.
        decide: takes a host and the numbers of its ranks, and returns a value for each of them.
    """
    decided: dict[int, Decided] = {}
    for host in {host.name: host for host in of_ranks}.values():
        own = [rank for rank, of_rank in enumerate(of_ranks) if of_rank.name == host.name]
        decided |= zip(own, decide(host, own), strict=True)
    return [decided[rank] for rank in range(len(of_ranks))]


def devices_of_ranks(requested_devices: list[str], host: HostResources) -> list[str]:
    """Return `cpu` or `cuda:N` for each rank of a host: ranks that leave it open take the GPUs in turn.

    If a GPU is missing, the rank refuses it later: it knows why torch does not see the GPU.
    """
    in_turn = itertools.count()
    automatic = "cuda" if host.num_gpus else "cpu"
    wanted = [automatic if device == "auto" else device for device in requested_devices]
    return [
        f"cuda:{next(in_turn) % max(1, host.num_gpus)}" if device == "cuda" else device for device in wanted
    ]


def no_quantised_weights_on_cuda(device: str, quantization: Quantization, spec: ModelSpec) -> UsageError:
    """Return the error for quantised weights on a GPU, with the way to weights that are not quantised."""
    held, floats = "a quantised checkpoint", "the original checkpoint without --quantization"
    if spec.quantization is None:
        held = f"--quantization {quantization}"
    elif spec.quantization.method == "gguf":
        held, floats = "a quantised GGUF file", "--gguf-dequantize, which holds its weights as floats"
    return UsageError(
        f"--device is {device}, with {held}: quantised weights are supported on the CPU only, so far.",
        remedy=f"Use --device cpu, or {floats}.",
        param="device",
        code="unsupported",
    )


def shared_threads(devices: list[str], num_cpus: int) -> list[int]:
    """Return the number of threads of each rank of a host; the ranks share the CPU cores of the host.

    A rank on a GPU gets one thread, with a core of its own. Ranks on the CPU share the other cores evenly. If
    all ranks are on GPUs, they share all cores evenly.
    """
    num_on_cpu = devices.count("cpu")
    if not num_on_cpu:
        return [max(1, num_cpus // len(devices))] * len(devices)
    own = max(1, (num_cpus - (len(devices) - num_on_cpu)) // num_on_cpu)
    return [own if device == "cpu" else 1 for device in devices]


def cpus_of_ranks(
    parallel: ParallelConfig, threads: list[int], devices: list[str], host: HostResources
) -> list[tuple[int, ...]]:
    """Return the CPU cores to which the threads of each rank of a host are bound, rank by rank.

    If ranks are not pinned, all tuples are empty. A rank on a GPU is never bound, but no other rank is bound
    to the cores that its threads need.

    Raises:
        UsageError: ranks are to be pinned (`--pin-threads on`) and cannot be.
    """
    ends = list(itertools.accumulate(threads))
    reason = _why_not_pinned(parallel, ends[-1], devices, host)
    if parallel.pin_threads == "on" and reason:
        raise UsageError(
            f"--pin-threads is on, but {reason}.",
            remedy="Use fewer --threads-per-rank, or --pin-threads auto.",
            param="pin_threads",
        )
    # With `auto`, threads are bound only if they fill the machine. Otherwise they find free cores themselves,
    # and two engines on one machine do not wait for the same cores.
    fills_the_machine = ends[-1] == len(host.cpus)
    if parallel.pin_threads == "off" or reason or not (fills_the_machine or parallel.pin_threads == "on"):
        return [()] * len(threads)
    return [
        host.cpus[end - count : end] if device == "cpu" else ()
        for device, count, end in zip(devices, threads, ends, strict=True)
    ]


def cpus_of_core(ranks: list[RankConfig], head: HostResources) -> tuple[int, ...]:
    """Return the CPU cores for the engine core's process: any but those that output ranks are bound to.

    A result wakes the engine core's process on the CPU core where the result was sent. There it would push
    aside the output rank, which has the next micro-batch to run. The tuple is empty (any CPU core) if output
    ranks are not bound, or if the pipe has one stage.

    Args:
        ranks: ranks of all replicas.
        head: the host where the engine core runs.
    """
    outputs = [rank for rank in ranks if rank.is_output and rank.host == head.name]
    theirs = {cpu for rank in outputs for cpu in rank.cpus}
    return tuple(cpu for cpu in head.cpus if cpu not in theirs) if theirs and not outputs[0].is_first else ()


def _why_not_pinned(
    parallel: ParallelConfig, num_threads: int, devices: list[str], host: HostResources
) -> str:
    """Return why threads cannot be bound to cores of their own; "" if they can."""
    if "cpu" not in devices:
        return "the stages run on a GPU"
    if parallel.backend == "inprocess":
        return "the stages are threads of the caller's process, which share its compute threads"
    if num_threads > len(host.cpus):
        return f"all stages together have {num_threads} threads for {len(host.cpus)} usable cores"
    return ""
