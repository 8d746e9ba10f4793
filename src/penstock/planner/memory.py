"""The tokens of KV cache that each stage would have beside its weights, and whether both fit at all.

The rule is the ranks' own (`runner.kv_demand`); only the free memory is worked out instead of looked up.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import NotEnoughMemoryError
from penstock.planner.stage_costs import StageCosts
from penstock.process.config import RankConfig
from penstock.runner.kv_demand import KVDemand


def kv_tokens(costs: Sequence[StageCosts], ranks: Sequence[RankConfig]) -> list[list[int]]:
    """Return per stage [num_layers + 1] the tokens beside so many layers; 0 where these do not fit."""
    num_layers = ranks[-1].end_layer
    return [
        [0, *(_tokens(costs, rank, count, num_layers) for count in range(1, num_layers + 1))]
        for rank in ranks
    ]


def _tokens(costs: Sequence[StageCosts], rank: RankConfig, count: int, num_layers: int) -> int:
    own = costs[rank.stage]
    available = own.available_bytes - _weights_beside(costs, own, count, num_layers)
    if available < 0:
        return 0
    try:
        blocks = KVDemand.of_rank(rank, own.num_sharers, own.peak_bytes).max_blocks(
            block_bytes=(count + rank.has_mtp) * own.kv_block_bytes,
            block_size=rank.block_size,
            available=available,
            device=rank.device_type,
        )
    except NotEnoughMemoryError:
        return 0
    return blocks * rank.block_size


def _weights_beside(costs: Sequence[StageCosts], own: StageCosts, count: int, num_layers: int) -> int:
    """Return the bytes of weights in the memory of a stage with `count` layers.

    Where all stages share one memory, all layers are in it, however they are split; and those of other
    replicas, which have as many ranks. Where some do, as on several GPUs with several stages each, every one
    is taken to be as large as this one.
    """
    num_ranks = sum(stage.num_ranks for stage in costs)
    if own.num_sharers < num_ranks:
        return own.num_sharers * own.weight_bytes(count)
    layer_bytes = max(stage.num_ranks * stage.layer_bytes for stage in costs)
    replica_bytes = num_layers * layer_bytes + sum(stage.num_ranks * stage.end_bytes for stage in costs)
    return own.num_sharers // num_ranks * replica_bytes
