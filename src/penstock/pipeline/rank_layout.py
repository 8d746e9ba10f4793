"""Which rank is where: pipeline neighbours, tensor groups, and the rank that answers.

Ranks are numbered stage by stage, the ranks of one stage side by side (`tp` = tensor-parallel size):

    tp 2, 4 stages      stage 0   stage 1   stage 2   stage 3
    tensor rank 0          0         2         4         6      a pipeline group
    tensor rank 1          1         3         5         7      another

Pure numbers (rows C1, C2, D8). While a stage is one rank, rank and stage are the same number and nobody
needs to ask; tensor-parallel stages will. Opens nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks of one group as `rank` sees them."""

    rank: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank_in_group(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def is_first(self) -> bool:
        return self.rank == self.ranks[0]

    @property
    def is_last(self) -> bool:
        return self.rank == self.ranks[-1]

    @property
    def next_rank(self) -> int:
        """The rank after this one; after the last comes the first."""
        return self.ranks[(self.rank_in_group + 1) % self.size]

    @property
    def prev_rank(self) -> int:
        """The rank before this one; before the first comes the last."""
        return self.ranks[(self.rank_in_group - 1) % self.size]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Sizes of a pipeline replica."""

    num_stages: int
    tensor_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        return self.num_stages * self.tensor_parallel_size

    @property
    def output_rank(self) -> int:
        """The rank that answers the core: the first of the last stage (row D8)."""
        return self.world_size - self.tensor_parallel_size

    def stage(self, rank: int) -> int:
        return rank // self.tensor_parallel_size

    def pipeline_group(self, rank: int) -> RankGroup:
        """The ranks that pass hidden states to each other, first stage first."""
        first = rank % self.tensor_parallel_size
        return RankGroup(rank=rank, ranks=tuple(range(first, self.world_size, self.tensor_parallel_size)))

    def tensor_group(self, rank: int) -> RankGroup:
        """The ranks of one stage."""
        first = self.stage(rank) * self.tensor_parallel_size
        return RankGroup(rank=rank, ranks=tuple(range(first, first + self.tensor_parallel_size)))
