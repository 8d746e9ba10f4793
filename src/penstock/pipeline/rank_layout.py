"""The numbering of ranks: replica by replica, and within a replica stage by stage.

Ranks are numbered replica by replica (`dp`); within a replica stage by stage (`pp`); within a stage context
part by context part (`cp`). Tensor ranks (`tp`), which share a stage's layers, are side by side:

    dp 1, pp 4, tp 2    stage 0   stage 1   stage 2   stage 3
    tensor rank 0          0         2         4         6
    tensor rank 1          1         3         5         7

Stages may be ragged: each has its own number of tensor ranks. The numbers [C2] [I1] [I5] are read by
`engine.supervisor.launch`; `engine.supervisor.wiring` connects the ranks. Context parts would share out the
context of a request. They have a place in the numbering, but the configuration refuses them until they are
built.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """The coordinates of a rank."""

    replica: int
    stage: int
    context_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The shape in which the ranks of an engine are numbered: how many there are along each dimension.

    Attributes:
        tp_sizes: tensor ranks of each stage.
        data_parallel_size: replicas.
        context_parallel_size: context parts of each stage.
    """

    tp_sizes: tuple[int, ...]
    data_parallel_size: int = 1
    context_parallel_size: int = 1

    @property
    def places(self) -> list[RankCoordinates]:
        """The coordinates of all ranks, in the order of their numbers."""
        return [
            RankCoordinates(replica=replica, stage=stage, context_rank=part, tp_rank=tp_rank)
            for replica in range(self.data_parallel_size)
            for stage, tp_size in enumerate(self.tp_sizes)
            for part in range(self.context_parallel_size)
            for tp_rank in range(tp_size)
        ]

    @property
    def tensor_groups(self) -> list[tuple[int, ...]]:
        """The ranks that share the same layers, group by group."""
        places, part_of = self.places, attrgetter("replica", "stage", "context_rank")
        groups = groupby(range(len(places)), lambda rank: part_of(places[rank]))
        return [tuple(ranks) for _, ranks in groups]
