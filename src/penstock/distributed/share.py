"""The part of rows, columns, heads or ids that each rank of a tensor group (all ranks of one stage) has.

`layers` cuts weights by shares, and `weights` reads the rows and columns of a share from the checkpoint. This
module computes with numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part `[start, end)` of `whole` rows, columns, heads or ids."""

    start: int
    end: int
    whole: int

    @classmethod
    def all(cls, whole: int) -> Share:
        return cls(start=0, end=whole, whole=whole)

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        return self.size == self.whole

    def scaled(self, factor: int) -> Share:
        """Return the same share of `factor` times as many things, such as the rows of a share of heads."""
        return Share(start=self.start * factor, end=self.end * factor, whole=self.whole * factor)


# Shares of a vocabulary begin at multiples of this: a word of a mask of ids, or a panel of the packed output
# head, is then on one rank.
IDS = 32


def even_share(whole: int, rank: int, size: int) -> Share:
    """Return the share of rank `rank` of `size` ranks, whose shares are equally long."""
    assert whole % size == 0, (whole, size)
    each = whole // size
    return Share(start=rank * each, end=rank * each + each, whole=whole)


def near_share(whole: int, rank: int, size: int) -> Share:
    """Return the share of rank `rank` of `size` ranks; the first ones may have one more than the others."""
    each, more = divmod(whole, size)
    start = rank * each + min(rank, more)
    return Share(start=start, end=start + each + (rank < more), whole=whole)


def vocab_share(num_ids: int, rank: int, size: int) -> Share:
    """Return the ids of rank `rank` of `size` ranks, in runs of `IDS`; the first ranks may have a run more.

    Nothing is padded, so an id that does not exist can never be sampled [B6] [B7].

    Args:
        num_ids: size of the vocabulary: at least `size` runs, of which the last may be short.
    """
    blocks = -(-num_ids // IDS)
    assert blocks >= size, (num_ids, size)
    own = near_share(blocks, rank, size)
    return Share(start=own.start * IDS, end=min(own.end * IDS, num_ids), whole=num_ids)


def head_share(num_heads: int, rank: int, size: int) -> Share:
    """Return the KV heads of rank `rank` of `size` ranks: an equal part of them.

    If there are fewer heads than ranks, each rank has one head, and several ranks have the same [B3].

    Args:
        num_heads: number of KV heads, a multiple or a divisor of `size`.
    """
    if num_heads >= size:
        assert num_heads % size == 0, (num_heads, size)
        return even_share(num_heads, rank, size)
    assert size % num_heads == 0, (num_heads, size)
    start = rank * num_heads // size
    return Share(start=start, end=start + 1, whole=num_heads)
