"""The part of rows, columns, heads or ids that each rank of a tensor group has. Pure numbers.

`layers` cut their weights by shares, `weights` read the rows and columns of a share from the checkpoint.
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
        """Return the share of `factor` times as many, such as the rows of heads."""
        return Share(start=self.start * factor, end=self.end * factor, whole=self.whole * factor)


IDS = 32  # shares of a vocabulary begin at multiples: a word of a mask of ids, a panel of a packed head


def even_share(whole: int, rank: int, size: int) -> Share:
    """Return the share of rank `rank` of `size`, as long as the others'."""
    assert whole % size == 0, (whole, size)
    each = whole // size
    return Share(start=rank * each, end=rank * each + each, whole=whole)


def near_share(whole: int, rank: int, size: int) -> Share:
    """Return the share of rank `rank` of `size`; the first ranks may have one more than the others."""
    each, more = divmod(whole, size)
    start = rank * each + min(rank, more)
    return Share(start=start, end=start + each + (rank < more), whole=whole)


def vocab_share(num_ids: int, rank: int, size: int) -> Share:
    """Return the ids of a rank, in blocks of `IDS`; the first ranks may have a block more.

    Nothing is padded, so an id that does not exist can never be sampled [B6] [B7].

    Args:
        num_ids: at least `size` blocks, the last of which may be cut short.
    """
    blocks = -(-num_ids // IDS)
    assert blocks >= size, (num_ids, size)
    own = near_share(blocks, rank, size)
    return Share(start=own.start * IDS, end=min(own.end * IDS, num_ids), whole=num_ids)


def head_share(num_heads: int, rank: int, size: int) -> Share:
    """Return the KV heads of a rank: an equal part, or a single one where there are fewer heads than ranks.

    Several ranks have the same head then [B3].

    Args:
        num_heads: a multiple of `size`, or a divisor.
    """
    if num_heads >= size:
        assert num_heads % size == 0, (num_heads, size)
        return even_share(num_heads, rank, size)
    assert size % num_heads == 0, (num_heads, size)
    start = rank * num_heads // size
    return Share(start=start, end=start + 1, whole=num_heads)
