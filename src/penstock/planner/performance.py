"""The speed of a split: the time of a typical request on each stage, by measured times and KV memory.

A pipe completes as many requests a second as its slowest stage, or its slowest link between hosts
(`planner.hops`). If a step has m rows, a stage spends on a request

    prompt tokens x seconds of a prefill token  +  output tokens x seconds of a decode step / m

m is the number of requests that run at once, divided by the P micro-batches of a full pipe. At most
`max_num_seqs` requests run at once, and at most as many as find KV memory at their mean length on the stage
that has the least of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import NotEnoughMemoryError
from penstock.planner.hops import Hop
from penstock.planner.memory import kv_tokens
from penstock.planner.mix import Mix
from penstock.planner.partition_search import Split, StageTable, best_split, judge, second_best
from penstock.planner.stage_costs import StageCosts
from penstock.process.config import RankConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionChoice:
    """The best split, the splits with which it was compared, and the numbers by which they were compared.

    Attributes:
        mix: the typical request for which the split was chosen.
        runner_up: the best of all other splits; None if no other fits.
        even: the split with as equal numbers of layers as possible; None if it does not fit.
        costs: the measured costs of each stage.
        kv_tokens: for each stage, the tokens of KV cache by its number of layers (`memory.kv_tokens`).
        hops: links between hosts, which limit the speed of all splits alike.
    """

    mix: Mix
    best: Split
    runner_up: Split | None
    even: Split | None
    costs: Sequence[StageCosts]
    kv_tokens: Sequence[Sequence[int]]
    hops: Sequence[Hop] = ()

    def request_s(self, split: Split) -> float:
        """Return the seconds from one typical request to the next in a full pipe with this split."""
        return max(1e-9 * split.slowest_ns, *(hop.request_s(self.mix) for hop in self.hops), 0.0)


def choose(
    costs: Sequence[StageCosts],
    ranks: Sequence[RankConfig],
    mix: Mix,
    even: Sequence[int],
    hops: Sequence[Hop] = (),
) -> PartitionChoice:
    """Return the best split of the layers, by the measured costs of the stages.

    Args:
        ranks: the config of the first rank of each stage. Of their layers only the end of the last stage
            matters: it is the number of layers of the model.
        even: number of layers of each stage in the even split, with which the best is compared.
        hops: links between hosts, as measured.

    Raises:
        NotEnoughMemoryError: no split leaves every stage room for its weights and one request.
    """
    num_layers = ranks[-1].end_layer
    tokens = kv_tokens(costs, ranks)
    tables = [stage_table(own, rank, mix, room) for own, rank, room in zip(costs, ranks, tokens, strict=True)]
    best = best_split(tables, num_layers)
    if best is None:
        raise NotEnoughMemoryError(
            f"no split of {num_layers} layers over {len(ranks)} stages leaves every stage memory for its "
            f"weights and the KV cache of a request of {ranks[0].max_model_len} tokens.",
            remedy="Lower --max-model-len, use more stages or --quantization, or free memory.",
        )
    return PartitionChoice(
        mix=mix,
        best=best,
        runner_up=second_best(tables, num_layers, best),
        even=judge(tables, even),
        costs=costs,
        kv_tokens=tokens,
        hops=hops,
    )


def stage_table(costs: StageCosts, rank: RankConfig, mix: Mix, tokens: Sequence[int]) -> StageTable:
    """Return the table of one stage for the search.

    Args:
        tokens: [num_layers + 1] tokens of KV cache beside 0, 1, … layers (`memory.kv_tokens`).
    """
    return StageTable(
        max_rows=[rows_of_a_step(count, rank, mix) for count in tokens],
        cost_ns=lambda num_layers, num_rows: round(1e9 * request_s(costs, mix, num_layers, num_rows)),
    )


def rows_of_a_step(num_tokens: int, rank: RankConfig, mix: Mix) -> int:
    """Return the rows of each micro-batch, if a stage has so many tokens of KV cache; 0 if it has none."""
    if num_tokens == 0:
        return 0
    at_once = min(rank.max_num_seqs, num_tokens // mix.mean_length(rank.max_model_len))
    return max(1, at_once // rank.num_stages)


def request_s(costs: StageCosts, mix: Mix, num_layers: int, num_rows: int) -> float:
    """Return the seconds that a stage with so many layers spends on one typical request."""
    decode_s = costs.decode_step_s(num_layers, num_rows) / num_rows
    return mix.prompt * costs.prefill_token_s(num_layers) + mix.output * decode_s
