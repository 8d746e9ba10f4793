"""Which part each rank has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.distributed.share import IDS, Share, even_share, head_share, vocab_share
from penstock.families.sharding import HeadShares


def test_b2_heads_of_a_70b_model_over_four_ranks() -> None:
    spec: Any = SimpleNamespace(num_heads=64, num_kv_heads=8, head_dim=128)
    for rank in range(4):
        heads = HeadShares.of(spec, SimpleNamespace(rank=rank, size=4))
        rows = [share.scaled(128).size for share in (heads.queries, heads.keys, heads.keys)]
        assert (rows, sum(rows)) == ([2048, 256, 256], 2560)
        assert heads.keys.scaled(128).start == rank * 256


def test_b3_of_fewer_kv_heads_than_ranks_each_is_held_by_several() -> None:
    assert [head_share(8, rank, 16).start for rank in range(16)] == [head for head in range(8) for _ in "ab"]
    assert all(head_share(8, rank, 16).size == 1 for rank in range(16))
    with pytest.raises(AssertionError):
        head_share(8, 0, 3)


def test_b4_a_merged_projection_is_shared_part_by_part() -> None:
    assert [even_share(28672, rank, 2).size for rank in range(2)] == [14336, 14336]
    with pytest.raises(AssertionError):
        even_share(7, 0, 2)


@pytest.mark.parametrize("num_ids", [128256, 151936, 32000, 150, 97])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_b6_shares_of_a_vocabulary_tile_it(num_ids: int, size: int) -> None:
    shares = [vocab_share(num_ids, rank, size) for rank in range(size)]
    assert [share.start for share in shares] == [0, *(share.end for share in shares[:-1])]
    assert shares[-1].end == num_ids
    assert all(share.start % IDS == 0 and share.size > 0 and share.whole == num_ids for share in shares)


def test_b6_four_ranks_have_32064_ids_of_llama_3_each() -> None:
    assert [vocab_share(128256, rank, 4).size for rank in range(4)] == [32064] * 4


def test_a_share_can_be_all() -> None:
    assert Share.all(5).is_whole
    assert not even_share(4, 1, 2).is_whole
