"""Attention over latent vectors in blocks, against attention written out in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from kernel_builds import built, targets
from penstock.attention import latent_paged
from penstock.attention.cpu_latent import CpuLatentAttention
from penstock.attention.latent_paged import LatentPagedAttention
from penstock.attention.metadata import AttentionMetadata
from penstock.families.latent_spec import LatentSpec
from penstock.families.rope_spec import RopeSpec
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels, Sight
from penstock.layers.compute import Compute
from penstock.layers.rope import RotaryAngles, RotaryEmbedding

LATENT = LatentSpec(rank=10, query_rank=0, plain_dim=6, rotary_dim=4, value_dim=5)
NUM_HEADS, BLOCK, NUM_BLOCKS = 3, 4, 80
SIGHTS = {
    "plain": Sight(scale=0.4),
    "window": Sight(scale=0.4, window=5),
    "cap": Sight(scale=0.4, soft_cap=1.5),
    "sinks": Sight(scale=0.4, window=200, sinks=torch.tensor([0.3, 3.0, -2.0])),
}
EACH_SIGHT = pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
    scores = scores.masked_fill(hidden, float("-inf"))
    if sight.sinks is not None:
        sinks = sight.sinks.double()[:, None, None].expand(-1, len(qkv), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : len(qkv)]
    return torch.einsum("hqk,kd->qhd", weights, key[:, :rank]).flatten(1)


def metadata(counts: list[int], lengths: list[int]) -> AttentionMetadata:
    """Rows with blocks that lie apart, backwards."""
    tables = torch.arange(len(counts) * NUM_BLOCKS).flip(0).view(NUM_BLOCKS, len(counts)).T.contiguous()
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


def in_steps(
    attention: LatentPagedAttention, rows: list[Tensor], steps: Sequence[Sequence[int]], sight: Sight
) -> list[Tensor]:
    """The results of each row, whose tokens come as `steps` say; what was never written is not finite."""
    memory = torch.full((len(rows) * NUM_BLOCKS * attention.block_bytes(BLOCK),), 0xFF, dtype=torch.uint8)
    kv, done, found = attention.layer_kv(memory), [0] * len(rows), [list[Tensor]() for _ in rows]
    for counts in steps:
        ends = [start + count for start, count in zip(done, counts, strict=True)]
        pieces = [slice(start, end) for start, end in zip(done, ends, strict=True)]
        qkv = torch.cat([row[piece] for row, piece in zip(rows, pieces, strict=True)])
        positions = [place for piece in pieces for place in range(piece.start, piece.stop)]
        y = attention.attend(qkv, angles(positions), kv, metadata(list(counts), ends), sight)
        for own, piece in zip(found, torch.split(y, list(counts)), strict=True):
            own.append(piece)
        done = ends
    assert done == [len(row) for row in rows]
    return [torch.cat(own) for own in found]


def random_rows(*lengths: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(length, (NUM_HEADS + 1) * LATENT.width) for length in lengths]


def by_kernels(flags: str, dtype: torch.dtype) -> CpuLatentAttention:
    return CpuLatentAttention(NUM_HEADS, LATENT, dtype, CpuKernels(built(flags), frozenset(KERNEL_NAMES)))


STEPS = [(9, 12), (1, 1), (1, 4), (1, 1), (5, 5)]


@EACH_SIGHT
@pytest.mark.parametrize("max_scores", [1, 60, 1 << 24])
def test_rows_in_chunks_and_tokens_among_others(
    monkeypatch: pytest.MonkeyPatch, sight: Sight, max_scores: int
) -> None:
    """Queries are computed together as far as memory allows; what was never written is never read."""
    monkeypatch.setattr(latent_paged, "MAX_SCORES", max_scores)
    rows = random_rows(17, 23)
    attention = LatentPagedAttention(NUM_HEADS, LATENT, torch.float32)
    for row, found in zip(rows, in_steps(attention, rows, STEPS, sight), strict=True):
        torch.testing.assert_close(found, expected(row, sight).float(), atol=1e-5, rtol=1e-5)


@EACH_SIGHT
@pytest.mark.parametrize("flags", targets(emulated=True))
def test_by_our_kernels_it_is_the_same_in_each_dtype(flags: str, sight: Sight) -> None:
    rows = random_rows(17, 23, 300)
    steps = [(*counts, counts[0]) for counts in STEPS] + [(0, 0, 283)]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        rounded = [row.to(dtype) for row in rows]
        results = in_steps(by_kernels(flags, dtype), rounded, steps, sight)
        for row, found in zip(rounded, results, strict=True):
            right = expected(row, sight).float()
            torch.testing.assert_close(found.float(), right, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("flags", targets(emulated=True))
def test_by_our_kernels_neither_company_nor_chunks_nor_threads_change_a_bit(flags: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows = [row.to(dtype) for row in random_rows(17, 290)]
        attention = by_kernels(flags, dtype)
        torch.set_num_threads(1)
        alone = [in_steps(attention, [row], [(len(row),)], SIGHTS["plain"])[0] for row in rows]
        chunks = [(1, 7), (5, 60), (11, 1), (0, 222)]
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            found = in_steps(attention, rows, chunks, SIGHTS["plain"])
            assert all(torch.equal(*pair) for pair in zip(found, alone, strict=True))


def test_a_block_holds_one_vector_for_each_token() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        attention = LatentPagedAttention(NUM_HEADS, LATENT, dtype)
        assert attention.block_bytes(16) == 16 * 14 * dtype.itemsize
        memory = torch.zeros(3 * attention.block_bytes(16), dtype=torch.uint8)
        assert attention.layer_kv(memory).latent.shape == (48, 14)
