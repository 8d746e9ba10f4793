"""Attention over latent vectors in blocks, against attention written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.attention import latent_paged
from penstock.attention.latent_paged import LatentPagedAttention
from penstock.attention.metadata import AttentionMetadata
from penstock.families.latent_spec import LatentSpec
from penstock.families.rope_spec import RopeSpec
from penstock.kernels.cpu.ops import Sight
from penstock.layers.compute import Compute
from penstock.layers.rope import RotaryAngles, RotaryEmbedding

LATENT = LatentSpec(rank=10, query_rank=0, plain_dim=6, rotary_dim=4, value_dim=5)
NUM_HEADS, BLOCK = 3, 4
SIGHTS = [Sight(scale=0.4), Sight(scale=0.4, window=5), Sight(scale=0.4, soft_cap=1.5)]


def angles(positions: list[int]) -> RotaryAngles:
    compute = Compute(dtype=torch.float32, device=torch.device("cpu"))
    found = RotaryEmbedding(RopeSpec(interleaved=True), LATENT.rotary_dim, compute=compute).angles(
        torch.tensor(positions)
    )
    assert isinstance(found, RotaryAngles)
    return found


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """[n, ..., 4] with pairs of neighbours turned, as complex numbers; in the order of the input."""
    turns = positions[:, None].double() * torch.tensor([1.0, 10_000.0**-0.5], dtype=torch.float64)
    turns = turns.view(len(x), *[1] * (x.dim() - 2), 2)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (2, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)).flatten(-2)


def expected(qkv: Tensor, sight: Sight) -> Tensor:
    """Of one row from its start: [num_tokens, num_heads * rank]."""
    heads, positions = qkv.view(len(qkv), NUM_HEADS + 1, LATENT.width).double(), torch.arange(len(qkv))
    rank = LATENT.rank
    heads = torch.cat((heads[..., :rank], turned(heads[..., rank:], positions)), dim=-1)
    query, key = heads[:, :-1], heads[:, -1]
    scores = torch.einsum("qhd,kd->hqk", query, key) * sight.scale
    if sight.soft_cap:
        scores = sight.soft_cap * (scores / sight.soft_cap).tanh()
    behind = positions[:, None] - positions[None, :]
    hidden = (behind < 0) | (behind >= (sight.window or len(qkv)))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,kd->qhd", weights, key[:, :rank]).flatten(1)


def metadata(counts: list[int], lengths: list[int]) -> AttentionMetadata:
    """Rows with blocks that lie apart, backwards."""
    tables = torch.arange(len(counts) * 8).flip(0).view(8, len(counts)).T.contiguous()
    starts, slots = [0], []
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        position = torch.arange(length - count, length)
        slots.append(tables[row][position // BLOCK] * BLOCK + position % BLOCK)
        starts.append(starts[-1] + count)
    return AttentionMetadata(
        query_starts=starts,
        seq_lens=lengths,
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        num_decodes=next((row for row, count in enumerate(counts) if count != 1), len(counts)),
        block_size=BLOCK,
    )


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("max_scores", [1, 60, 1 << 24])
def test_rows_in_chunks_and_tokens_among_others(
    monkeypatch: pytest.MonkeyPatch, sight: Sight, max_scores: int
) -> None:
    """Queries are computed together as far as memory allows; what was never written is never read."""
    monkeypatch.setattr(latent_paged, "MAX_SCORES", max_scores)
    torch.manual_seed(0)
    lengths = [17, 23]
    rows = [torch.randn(length, (NUM_HEADS + 1) * LATENT.width) for length in lengths]
    wanted = [expected(row, sight) for row in rows]
    attention = LatentPagedAttention(NUM_HEADS, LATENT, torch.float32)
    memory = torch.full((16 * attention.block_bytes(BLOCK),), 0xFF, dtype=torch.uint8)
    kv, done = attention.layer_kv(memory), [0, 0]
    for counts in ((9, 12), (1, 1), (1, 4), (1, 1), (5, 5)):
        ends = [start + count for start, count in zip(done, counts, strict=True)]
        pieces = [slice(start, end) for start, end in zip(done, ends, strict=True)]
        qkv = torch.cat([row[piece] for row, piece in zip(rows, pieces, strict=True)])
        positions = [place for piece in pieces for place in range(piece.start, piece.stop)]
        found = attention.attend(qkv, angles(positions), kv, metadata(list(counts), ends), sight)
        right = torch.cat([each[piece] for each, piece in zip(wanted, pieces, strict=True)])
        torch.testing.assert_close(found, right.float(), atol=1e-5, rtol=1e-5)
        done = ends
    assert done == lengths


def test_a_block_holds_one_vector_for_each_token() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        attention = LatentPagedAttention(NUM_HEADS, LATENT, dtype)
        assert attention.block_bytes(16) == 16 * 14 * dtype.itemsize
        memory = torch.zeros(3 * attention.block_bytes(16), dtype=torch.uint8)
        assert attention.layer_kv(memory).latent.shape == (48, 14)
