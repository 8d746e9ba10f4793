"""The numbering of ranks by replica, stage, context part and tensor part, and their groups.

Ranks are numbered replica by replica (`dp`), in it stage by stage (`pp`), in a stage context part by context
part (`cp`), and the tensor ranks (`tp`) of one part side by side:

    dp 1, pp 4, tp 2    stage 0   stage 1   stage 2   stage 3
    tensor rank 0          0         2         4         6      a pipeline group
    tensor rank 1          1         3         5         7      another

Stages may be ragged: each has its own number of tensor ranks. Pure numbers [C1] [C2] [D8] [I1] [I5]; context
parts have their place here, and are refused by the configuration until they are built.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """The coordinates of a rank: replica, stage, and in the stage its context part and its tensor rank."""

    replica: int
    stage: int
    context_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """A group of ranks, by their numbers in `ranks`, as seen by its member `rank`."""

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
        """The number of the rank after this one in the group; after the last comes the first."""
        return self.ranks[(self.rank_in_group + 1) % self.size]

    @property
    def prev_rank(self) -> int:
        """The number of the rank before this one in the group; before the first comes the last."""
        return self.ranks[(self.rank_in_group - 1) % self.size]


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

    @classmethod
    def regular(
        cls,
        num_stages: int,
        tensor_parallel_size: int = 1,
        *,
        data_parallel_size: int = 1,
        context_parallel_size: int = 1,
    ) -> RankLayout:
        """Return a layout in which all stages have the same number of tensor ranks."""
        return cls(
            tp_sizes=(tensor_parallel_size,) * num_stages,
            data_parallel_size=data_parallel_size,
            context_parallel_size=context_parallel_size,
        )

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
    def replica_size(self) -> int:
        """The number of ranks of one replica."""
        return sum(self.tp_sizes) * self.context_parallel_size

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.replica_size

    def output_rank(self, replica: int = 0) -> int:
        """Return the number of the rank that answers a replica's core: first of the last stage [D8]."""
        return (replica + 1) * self.replica_size - self.context_parallel_size * self.tp_sizes[-1]

    def tensor_group(self, rank: int) -> RankGroup:
        """Return the ranks that split the same layers between them: same stage and context part as `rank`."""
        return self._group(rank, "replica", "stage", "context_rank")

    def context_group(self, rank: int) -> RankGroup:
        """Return the ranks that split the same contexts: same replica, stage and tensor rank as `rank`."""
        return self._group(rank, "replica", "stage", "tp_rank")

    def pipeline_group(self, rank: int) -> RankGroup:
        """Return the ranks that have the place of `rank` in each stage of its replica, in order of stages.

        Ragged stages that lack the place are left out.
        """
        return self._group(rank, "replica", "context_rank", "tp_rank")

    def data_group(self, rank: int) -> RankGroup:
        """Return the ranks that have the same place as `rank` in each replica, and hold the same weights."""
        return self._group(rank, "stage", "context_rank", "tp_rank")

    def _group(self, rank: int, *alike: str) -> RankGroup:
        """Return the group of the ranks that agree with `rank` in these coordinates."""
        of_group = attrgetter(*alike)
        all_coordinates = self.places
        own = of_group(all_coordinates[rank])
        return RankGroup(
            rank=rank,
            ranks=tuple(i for i, coordinates in enumerate(all_coordinates) if of_group(coordinates) == own),
        )
