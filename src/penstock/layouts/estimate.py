"""Computes a layout's need of memory on each device, and its speed, without these devices and the weights.

- Memory: by the rule that ranks use (`runner.kv_demand`).
- Layers of each stage: the default split. If stages differ, or the default split does not fit, it is the
  best split of the planner's search (`planner.partition_search`).
- Times of stages: from the figures of the devices (`layouts.stage_times`).
- Speed of the pipe: from these times, by `layouts.prediction`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.errors import NotEnoughMemoryError
from penstock.layouts.devices import DeviceSet, Link
from penstock.layouts.layout import Layout, StageSite
from penstock.layouts.model_sizes import ModelSizes, RankShard, RankSizes
from penstock.layouts.prediction import Load, Prediction, carried_bytes, predict
from penstock.layouts.stage_times import DeviceTimes, StageTimes
from penstock.pipeline.partition import partition_layers
from penstock.planner.partition_search import StageTable, best_split
from penstock.runner.kv_demand import KVDemand, margin_bytes, stranded_bytes
from penstock.scheduler.cost_model import StepShape

# The usable share of a device's memory. Driver, libraries, and gaps between allocations take the rest.
_USABLE = {"cpu": 1.0, "cuda": 0.9}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEstimate:
    """The estimate of one rank of the first replica.

    Attributes:
        tp_rank: its number in its stage.
        device: kind of its device.
        start_layer, layers: its first layer, and the number of its layers.
        kv_tokens: tokens of KV cache that its memory has room for.
        kv_block_bytes: bytes of one KV block, over all its layers.
        activation_bytes: estimated bytes of the tensors of the largest step; the measured peak, if the rank
            was measured.
        margin_bytes: bytes that are left free besides.
        all_reduce_bytes_per_step: bytes that it adds up with the other ranks of its stage in a step with one
            token of each request that the load gives its replica (`Load.of_replica`).
        all_reduce_s: seconds that these bytes take at the rate of the link.
        all_reduce_latency_s: seconds that the sums of a step take besides, however few bytes they have.
        stranded_bytes: bytes that it could use for KV blocks, but does not, because every rank has as many
            blocks as the rank with the least room.
        free_bytes: bytes of its device that are left once the weights are loaded.
    """

    stage: int
    tp_rank: int
    host: str
    device: str
    start_layer: int
    layers: int
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    kv_block_bytes: int
    activation_bytes: int
    margin_bytes: int
    all_reduce_bytes_per_step: int
    all_reduce_s: float
    all_reduce_latency_s: float
    stranded_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HopEstimate:
    """The estimate of a link from one stage to the next.

    A step here has one token of each request that the load gives the replica (`Load.of_replica`).

    Attributes:
        link: kind of the link.
        bytes_per_step: bytes that cross in a step: the sum of hidden states and residual.
        seconds: time for the hidden states of one micro-batch, including the latency.
        hidden_and_residual_bytes: bytes that would cross in a step if hidden states and residual were sent
            separately, as other engines do [I8].
        hidden_and_residual_s: seconds that these bytes would take at the rate of the link.
    """

    from_stage: int
    to_stage: int
    link: str
    bytes_per_step: int
    seconds: float
    hidden_and_residual_bytes: int
    hidden_and_residual_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A layout with its split of the layers, its memory, and its predicted speed.

    Attributes:
        layers: number of layers of each stage.
        is_default_split: `serve` splits the layers so without `--partition`.
        ranks: all ranks of the first replica, stage by stage.
        hops: the links between the stages of the first replica, in their order.
    """

    layout: Layout
    layers: tuple[int, ...]
    is_default_split: bool
    ranks: tuple[RankEstimate, ...]
    hops: tuple[HopEstimate, ...]
    predicted: Prediction

    @property
    def kv_tokens(self) -> int:
        """The number of tokens that the KV caches of all replicas together hold."""
        return self.layout.dp * min(rank.kv_tokens for rank in self.ranks)

    @property
    def stranded_bytes(self) -> int:
        """The stranded bytes of all ranks of a replica together."""
        return sum(rank.stranded_bytes for rank in self.ranks)

    @property
    def flags(self) -> str:
        return self.layout.flags(None if self.is_default_split else self.layers)


def estimate(
    layout: Layout,
    sizes: ModelSizes,
    devices: DeviceSet,
    load: Load,
    layers: Sequence[int] | None = None,
) -> Estimate | None:
    """Return the estimate of a layout; None: the model does not fit.

    Args:
        layers: number of layers of each stage. None: the default split; if stages differ, or the default
            split does not fit, the best split that fits.
    """
    even = [end - start for start, end in partition_layers(sizes.spec.num_layers, layout.pp)]
    wanted = even if layers is None else list(layers)
    fitted = wanted if _fits(layout, sizes, wanted, load) else None
    if layers is None and (not layout.is_uniform or fitted is None):
        fitted = _searched(layout, sizes, load)
    if fitted is None:
        return None
    made = [
        device_times(site, sizes, rank, layout)
        for site, rank in zip(layout.stages, largest_ranks(layout, sizes, fitted), strict=True)
    ]
    times: list[StageTimes] = list(map({each: each for each in made}.__getitem__, made))
    links = stage_links(layout, devices)
    ranks = rank_estimates(layout, sizes, fitted, load)
    capacity = min(rank.kv_tokens for rank in ranks)
    predicted = predict(times, links, capacity, load, sizes, layout.dp)
    return Estimate(
        layout=layout,
        layers=tuple(fitted),
        is_default_split=list(fitted) == even,
        ranks=tuple(ranks),
        hops=tuple(hop_estimates(links, sizes, load, layout, predicted)),
        predicted=predicted,
    )


def stage_links(layout: Layout, devices: DeviceSet) -> list[Link]:
    """Return the link from each stage to the next; the last entry is from the last stage to the first."""
    hosts = [site.host for site in layout.stages]
    return [
        devices.link_between(one, other) for one, other in zip(hosts, [*hosts[1:], hosts[0]], strict=True)
    ]


def device_times(site: StageSite, sizes: ModelSizes, rank: RankSizes, layout: Layout) -> DeviceTimes:
    """Return the times of a stage, by the figures of its devices.

    Args:
        rank: the sizes of the rank of this stage whose times count.
    """
    experts = sizes.spec.experts
    return DeviceTimes(
        sizes=rank,
        device=site.device,
        num_ranks=site.num_ranks,
        link=site.link,
        hidden_bytes=sizes.spec.hidden_size * sizes.item_bytes,
        chosen_share=1.0 if experts is None else experts.num_chosen / experts.num_experts,
    )


def largest_ranks(layout: Layout, sizes: ModelSizes, layers: Sequence[int]) -> list[RankSizes]:
    """Return the sizes of the first rank of each stage, which holds no less than the other ranks there."""
    ranks, start = [], 0
    for site, count in zip(layout.stages, layers, strict=True):
        shard = RankShard(0, site.num_ranks)
        ranks.append(sizes.of_rank(start, start + count, shard, expert_parallel=layout.expert_parallel))
        start += count
    return ranks


def _fits(layout: Layout, sizes: ModelSizes, layers: Sequence[int], load: Load) -> bool:
    ranks = largest_ranks(layout, sizes, layers)
    return all(
        kv_blocks(sizes, rank, site, load) > 0 for rank, site in zip(ranks, layout.stages, strict=True)
    )


def kv_blocks(sizes: ModelSizes, rank: RankSizes, site: StageSite, load: Load) -> int:
    """Return the KV blocks that a rank's device has room for.

    It is 0 if the weights do not fit, or if the KV cache of one request, or that of the settings, does not.
    """
    usable = int(site.device.memory_bytes * _USABLE[site.device.type])
    available = usable - rank.weight_bytes - activation_bytes(sizes, rank, site.num_ranks, load)
    if available <= 0:
        return 0
    demand = KVDemand(
        max_model_len=load.max_model_len,
        max_num_seqs=load.scheduler.max_num_seqs,
        num_blocks=load.cache.num_blocks,
        kv_cache_bytes=load.cache.kv_cache_bytes,
        num_sharers=1,
        reserved_bytes=margin_bytes(site.device.type, site.num_ranks),
    )
    try:
        return demand.max_blocks(
            block_bytes=rank.kv_bytes_per_token * load.cache.block_size,
            block_size=load.cache.block_size,
            available=available,
            device=site.device.type,
        )
    except NotEnoughMemoryError:
        return 0


def _searched(layout: Layout, sizes: ModelSizes, load: Load) -> list[int] | None:
    """Return, of the splits that fit, the one whose slowest stage is the fastest; None if no split fits."""
    if sum(_most_layers(layout, sizes, load, stage) for stage in range(layout.pp)) < sizes.spec.num_layers:
        return None
    rows = max(1, load.of_replica(layout.dp) // layout.pp)
    tables = [_table(layout, sizes, load, stage, rows) for stage in range(layout.pp)]
    split = best_split(tables, sizes.spec.num_layers)
    return None if split is None else list(split.layers)


def _most_layers(layout: Layout, sizes: ModelSizes, load: Load, stage: int) -> int:
    """Return the most layers that a stage's devices have room for, with the KV cache of one request."""
    site = layout.stages[stage]
    counts = range(1, sizes.spec.num_layers - layout.pp + 2)
    return bisect_left(
        counts,
        True,
        key=lambda count: not kv_blocks(sizes, _rank_with(layout, sizes, stage, count), site, load),
    )


def _rank_with(layout: Layout, sizes: ModelSizes, stage: int, count: int) -> RankSizes:
    """Return the sizes of the first rank of a stage with `count` layers.

    Which layers these are is not known before the split is. So the first stage gets the first layers of the
    model, the last stage its last layers, and any other stage the layers from layer 1 on.
    """
    num_layers = sizes.spec.num_layers
    start = 0 if stage == 0 else num_layers - count if stage == layout.pp - 1 else 1
    shard = RankShard(0, layout.stages[stage].num_ranks)
    return sizes.of_rank(start, start + count, shard, expert_parallel=layout.expert_parallel)


def _table(layout: Layout, sizes: ModelSizes, load: Load, stage: int, rows: int) -> StageTable:
    site, num_layers = layout.stages[stage], sizes.spec.num_layers
    shape = StepShape(rows, rows * load.context, rows)
    most = _most_layers(layout, sizes, load, stage)
    seconds = [
        device_times(site, sizes, _rank_with(layout, sizes, stage, count), layout).seconds(shape)
        for count in range(1, most + 1)
    ]
    return StageTable(
        max_rows=[0, *(rows * (count <= most) for count in range(1, num_layers + 1))],
        cost_ns=lambda count, _: round(1e9 * seconds[count - 1]),
    )


def rank_estimates(
    layout: Layout, sizes: ModelSizes, layers: Sequence[int], load: Load
) -> list[RankEstimate]:
    """Return the estimate of each rank of the first replica, stage by stage."""
    rows = load.of_replica(layout.dp)
    made: list[tuple[RankEstimate, int]] = []
    start = 0
    for stage, (site, count) in enumerate(zip(layout.stages, layers, strict=True)):
        for tp_rank in range(site.num_ranks):
            shard = RankShard(tp_rank, site.num_ranks)
            rank = sizes.of_rank(start, start + count, shard, expert_parallel=layout.expert_parallel)
            times = device_times(site, sizes, rank, layout)
            blocks = kv_blocks(sizes, rank, site, load)
            is_cut = site.num_ranks > 1
            own = RankEstimate(
                stage=stage,
                tp_rank=tp_rank,
                host=site.host,
                device=site.device.kind,
                start_layer=start,
                layers=count,
                parameters=rank.parameters,
                weight_bytes=rank.weight_bytes,
                kv_bytes_per_token=rank.kv_bytes_per_token,
                kv_tokens=blocks * load.cache.block_size,
                kv_block_bytes=rank.kv_bytes_per_token * load.cache.block_size,
                activation_bytes=activation_bytes(sizes, rank, site.num_ranks, load),
                margin_bytes=margin_bytes(site.device.type, site.num_ranks),
                all_reduce_bytes_per_step=is_cut * sizes.all_reduce_bytes(count, rows),
                all_reduce_s=times.all_reduce_s(rows),
                all_reduce_latency_s=times.all_reduce_latency_s,
                stranded_bytes=0,
                free_bytes=site.device.memory_bytes - rank.weight_bytes,
            )
            made.append((own, blocks))
        start += count
    fewest = min(blocks for _, blocks in made)
    return [
        replace(own, stranded_bytes=stranded_bytes(blocks, fewest, own.kv_block_bytes))
        for own, blocks in made
    ]


def activation_bytes(sizes: ModelSizes, rank: RankSizes, num_ranks: int, load: Load) -> int:
    """Return the estimated bytes of the tensors that the largest step holds at once.

    They are three tensors as wide as the hidden states, three as wide as the middle of an MLP, and the
    logits.
    """
    spec, tokens = sizes.spec, load.scheduler.max_num_batched_tokens
    experts = spec.experts
    inner = spec.intermediate_size
    if experts is not None:
        inner = max(experts.num_chosen * experts.inner_size + experts.shared_size, 1)
    width = 3 * spec.hidden_size + 3 * -(-inner // num_ranks)
    logits = 4 * load.scheduler.max_num_seqs * (rank.head_parameters // spec.hidden_size)
    return tokens * width * sizes.item_bytes + logits


def hop_estimates(
    links: Sequence[Link], sizes: ModelSizes, load: Load, layout: Layout, predicted: Prediction
) -> list[HopEstimate]:
    """Return the estimates of the links between the stages of the first replica.

    Args:
        links: from each stage to the next, and from the last to the first, which is left out.
    """
    rows = load.of_replica(layout.dp)
    both = sizes.hop_bytes(rows)
    of_micro_batch = carried_bytes(sizes, -(-rows // predicted.micro_batches))
    return [
        HopEstimate(
            from_stage=stage,
            to_stage=stage + 1,
            link=link.kind,
            bytes_per_step=carried_bytes(sizes, rows),
            seconds=link.seconds(of_micro_batch),
            hidden_and_residual_bytes=both,
            hidden_and_residual_s=both / link.bytes_per_s,
        )
        for stage, link in enumerate(links[:-1])
    ]
