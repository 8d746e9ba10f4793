"""Memory beside the weights of stages that ranks share."""

from __future__ import annotations

import msgspec

from penstock.families.registry import resolve_model_directory
from penstock.planner.memory import kv_tokens
from penstock.planner.stage_costs import StageCosts, StepCosts
from rank_configs import make_rank_configs

STEP = StepCosts(num_tokens=1, layer_s=1.0, fixed_s=0.0, embed_s=0.0, head_s=0.0, link_s=0.0)
COSTS = StageCosts(
    decode=[STEP],
    prefill=STEP,
    layer_bytes=1000,
    end_bytes=0,
    kv_block_bytes=100,
    block_size=16,
    available_bytes=40_000,
    num_sharers=3,
    has_kernels=True,
)


RANKS = [
    msgspec.structs.replace(rank, num_blocks=None)
    for rank in make_rank_configs(resolve_model_directory("demo"), 2)
]


def room(num_ranks: int) -> int:
    """Tokens beside one layer of a first stage of so many ranks, each with half of its layers."""
    first = msgspec.structs.replace(COSTS, num_ranks=num_ranks)
    return kv_tokens([first, COSTS], RANKS)[0][1]


def test_d13_all_ranks_of_a_stage_hold_weights_in_the_memory_of_the_host() -> None:
    """Two ranks of 1,000 bytes a layer leave as much less as they are more."""
    assert 0 < room(2) < room(1)


def test_weights_of_all_replicas_are_in_the_memory_of_the_host() -> None:
    (one,), (both,) = (
        [tokens[0][1] for tokens in [kv_tokens([own, own], RANKS)]]
        for own in (
            msgspec.structs.replace(COSTS, num_sharers=2),
            msgspec.structs.replace(COSTS, num_sharers=4, available_bytes=80_000),
        )
    )
    assert one == both > 0, "twice the memory for twice the weights, shared by twice the ranks"
