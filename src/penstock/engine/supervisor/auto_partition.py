"""Implements `--partition auto`: ranks are measured, and the best split of the layers replaces `auto`.

The supervisor and `llm` call it before they call `launch`; the command `plan` calls it too. It starts one
measuring process for each rank (`planner.measure`), unless the costs are remembered from an earlier start.
All these processes have ended when it returns.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import msgspec

from penstock.config.engine import EngineConfig
from penstock.engine.supervisor.launch import LaunchPlan, resolve
from penstock.engine.supervisor.measuring import measure
from penstock.engine.supervisor.reports import Notice, PartitionChosen, Reporter
from penstock.families.spec import ITEM_SIZES, ModelSpec
from penstock.hosts.rank_host import Hosts
from penstock.hosts.resources import HostResources
from penstock.pipeline.partition import AUTO_POLICY, partition_layers
from penstock.planner.cost_cache import CostCache, are_to_keep, cost_key
from penstock.planner.hops import hops_between
from penstock.planner.mix import Mix
from penstock.planner.performance import PartitionChoice, choose
from penstock.planner.report import comma_separated, partition_lines
from penstock.planner.stage_costs import StageCosts
from penstock.process.config import MeasureConfig, RankConfig

MEASURE_S = 3.0  # for all cases together; a single step that takes longer is finished
_MAX_PREFILL_TOKENS = 256  # of the chunk that is timed; each token of a longer one costs about as much
_LAYERS_BYTES = 256 << 20  # of weights are timed, more than the CPU's caches hold
_QUANTIZED_ITEM_SIZES = {"int8": 1.0, "int4": 0.5}


def settle_partition(config: EngineConfig, hosts: Hosts, reporter: Reporter) -> EngineConfig:
    """Return the config with the number of layers of each stage in place of `--partition auto`.

    A config without `auto`, or with one stage, is returned as it is. Otherwise ranks are measured, unless
    their costs are known from an earlier start.

    Raises:
        UsageError: the mix cannot be read, or what `launch.resolve` raises.
        NotEnoughMemoryError: no split fits.
        PenstockError: a rank could not be measured; the error is the first cause.
    """
    parallel = config.parallel
    mix = Mix.parse(parallel.partition_mix)
    if parallel.partition != AUTO_POLICY or parallel.pipeline_parallel_size == 1:
        return config
    choice = choose_partition(config, mix, hosts, reporter)
    layers = choice.best.layers
    reporter.report(PartitionChosen(layers=list(layers), table=partition_lines(choice)))
    return config.with_partition(comma_separated(layers))


def choose_partition(config: EngineConfig, mix: Mix, hosts: Hosts, reporter: Reporter) -> PartitionChoice:
    """Choose how many layers each of several stages gets, from the costs of the ranks.

    The costs are measured now, or remembered from an earlier start.

    Args:
        mix: numbers of prompt and output tokens of a typical request, for which the split is optimised.
    """
    resources = hosts.resources()
    plan = _plan_of_any_split(config, resources)
    configs = measure_configs(plan, config.scheduler.prefill_chunk, mix, resources)
    hardware = [_hardware(rank, resources) for rank in plan.ranks]
    cache, key = CostCache.open(os.environ), cost_key(configs, hardware, plan.spec, os.environ)
    costs = cache.find(key, plan.num_stages)
    if costs is None:
        reporter.report(Notice(text=f"measuring {_stages(plan.num_stages)} to choose the partition."))
        of_ranks = measure(configs, hosts, config.parallel.load_timeout_s)
        firsts = [config.rank.tp_rank == 0 for config in configs]
        costs = list(itertools.compress(of_ranks, firsts))
        if are_to_keep(costs, os.environ):
            cache.put(key, costs)
    if (path := cache.path(key)) and path.exists():
        reporter.report(Notice(text=f"the stages' costs are kept in {path}; delete it to measure again."))
    even = partition_layers(plan.spec.num_layers, plan.num_stages, "even")
    stages = [rank for rank in plan.ranks if rank.tp_rank == 0]
    return choose(
        [_with_free_memory(own, rank, resources) for own, rank in zip(costs, stages, strict=True)],
        stages,
        mix,
        [end - start for start, end in even],
        hops_between(stages, hosts.routes.links(), plan.spec.hidden_size, ITEM_SIZES[stages[0].dtype]),
    )


def _stages(number: int) -> str:
    return "1 stage" if number == 1 else f"{number} stages"


def _plan_of_any_split(config: EngineConfig, hosts: Sequence[HostResources]) -> LaunchPlan:
    """Return a launch plan in which everything is right except the layers of the ranks."""
    return resolve(config.with_partition("last"), hosts)


def _with_free_memory(costs: StageCosts, rank: RankConfig, hosts: Sequence[HostResources]) -> StageCosts:
    """Return the costs with the memory that is free on the host now, which differs at every start."""
    if rank.device != "cpu":
        return costs
    return msgspec.structs.replace(costs, available_bytes=_free_bytes(rank, hosts))


def measure_configs(
    plan: LaunchPlan, prefill_chunk: int, mix: Mix, hosts: Sequence[HostResources]
) -> list[MeasureConfig]:
    """Return, for each rank, the config of its measuring process, which says what steps are timed."""
    first = plan.ranks[0]
    context = mix.mean_length(first.max_model_len)
    longest = min(prefill_chunk, first.max_num_batched_tokens, first.max_model_len, _MAX_PREFILL_TOKENS)
    prefill = max(1, min(mix.prompt, longest))
    num_rows = _numbers_of_rows(min(first.max_num_seqs // plan.num_stages, first.max_num_batched_tokens))
    num_layers = min(_num_timed_layers(plan, rank, hosts) for rank in plan.ranks)
    return [
        MeasureConfig(
            rank=_with_layers(rank, num_layers, plan.spec.num_layers),
            num_rows=num_rows,
            context=context,
            prefill_tokens=prefill,
            case_s=MEASURE_S / (len(num_rows) + 1),
        )
        for rank in plan.ranks
    ]


def _numbers_of_rows(most: int) -> list[int]:
    """Return 1, 4, 8, 16, ... and the largest number itself."""
    doubled = (1 << power for power in range(2, max(most, 1).bit_length()))
    return sorted({1, *doubled, max(most, 1)})


def _free_bytes(rank: RankConfig, hosts: Sequence[HostResources]) -> int:
    """Return the free bytes of the host that the rank runs on."""
    return _host_of(rank, hosts).free_bytes


def _hardware(rank: RankConfig, hosts: Sequence[HostResources]) -> list[object]:
    """Return a description of the hardware of the rank's host, by which costs are remembered.

    The host's name is added if another host has the same hardware.
    """
    own = _host_of(rank, hosts)
    has_twin = any(host.name != own.name and host.hardware == own.hardware for host in hosts)
    return [*own.hardware, own.name if has_twin else ""]


def _host_of(rank: RankConfig, hosts: Sequence[HostResources]) -> HostResources:
    return next(host for host in hosts if host.name == rank.host)


def _num_timed_layers(plan: LaunchPlan, rank: RankConfig, hosts: Sequence[HostResources]) -> int:
    """Return how many layers are timed: enough to exceed the CPU's caches, and at least two.

    They are fewer if no stage gets so many, or if they do not fit into the rank's share of half of the host's
    free memory.
    """
    spec = plan.spec
    num_neighbours = sum(other.host == rank.host for other in plan.ranks)
    layer_bytes = max(1, int(spec.layer_parameters() * _item_size(spec, rank)))
    most = spec.num_layers - plan.num_stages + 1
    fitting = _free_bytes(rank, hosts) // (2 * num_neighbours * layer_bytes)
    return max(1, min(max(2, -(-_LAYERS_BYTES // layer_bytes)), most, fitting))


def _item_size(spec: ModelSpec, rank: RankConfig) -> float:
    """Return the approximate number of bytes of a parameter."""
    if spec.quantization is not None:
        return spec.quantization.mean_bits / 8
    return _QUANTIZED_ITEM_SIZES.get(rank.quantization, ITEM_SIZES[rank.dtype])


def _with_layers(rank: RankConfig, count: int, num_layers: int) -> RankConfig:
    """Return the config of a rank with `count` layers, and with the embedding or output layer of its stage.

    The measured rank has no neighbours, so it reads an output layer that is tied to the embedding itself.
    """
    start = 0 if rank.is_first else num_layers - count if rank.is_last else 1
    return msgspec.structs.replace(
        rank, start_layer=start, end_layer=start + count, tied_head="load", depth=1, link_frames=1
    )
