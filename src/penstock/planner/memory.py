"""The tokens of KV cache that each stage would have beside its weights, and whether both fit at all.

Ranks use the same rule (`runner.kv_demand`). But a rank asks its device how much memory is free once its
weights are loaded; here that is the free memory before loading, less the bytes of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import NotEnoughMemoryError
from penstock.planner.stage_costs import StageCosts
from penstock.process.config import RankConfig
from penstock.runner.kv_demand import KVDemand


def kv_tokens(costs: Sequence[StageCosts], ranks: Sequence[RankConfig]) -> list[list[int]]:
    """Return for each stage a list of `num_layers + 1` numbers: the tokens of KV cache beside 0, 1, … layers.

    A number is 0 if so many layers and the KV cache do not fit, and for no layers.

    Args:
        costs: the measured costs of each stage.
        ranks: the config of the first rank of each stage.
    """
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
    """Return the bytes of weights in the memory that a stage with `count` layers uses.

    If all stages share one memory, it holds all layers, however they are split. It also holds the layers of
    other replicas that share it, each of which has as many ranks. If only some stages share it, as on GPUs
    with several stages each, all ranks that share it are taken to hold as much as this stage's rank.
    """
    num_ranks = sum(stage.num_ranks for stage in costs)
    if own.num_sharers < num_ranks:
        return own.num_sharers * own.weight_bytes(count)
    layer_bytes = max(stage.num_ranks * stage.layer_bytes for stage in costs)
    replica_bytes = num_layers * layer_bytes + sum(stage.num_ranks * stage.end_bytes for stage in costs)
    return own.num_sharers // num_ranks * replica_bytes
