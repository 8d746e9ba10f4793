"""Rotation, storing and attention against plain formulas, and bit for bit against themselves."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depth import depth
from kernel_builds import built, targets
from penstock.kernels.cpu.abi import (
    BFLOAT16,
    FLOAT32,
    SEGMENT_TOKENS,
    AttentionArgs,
    RopeAnglesArgs,
    RopeStoreArgs,
    Step,
)
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import AttentionParts, CpuKernels

TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
# Of the largest value. bfloat16: half a unit in the last place of the result and of each weight.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
TILES_PER_SEGMENT = SEGMENT_TOKENS // 16
NOWHERE = 1 << 40  # a block that must not be touched


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def sinks(self) -> Tensor | None:
        """One score for each query head: most as large as those of keys, one far above, one far below."""
        scores = torch.randn(self.num_heads, generator=torch.Generator().manual_seed(7)) * 3
        scores[1:3] = torch.tensor([60.0, -math.inf])[: self.num_heads - 1]
        return scores if self.has_sinks else None

    @property
    def token_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All tokens that a request will have: [length, token_size], queries, keys and values, not rotated."""

    qkv: Tensor
    blocks: list[int]

    def slots(self, start: int, end: int, block_size: int) -> list[int]:
        return [self.blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]


@dataclass(kw_only=True)
class Pool:
    """Blocks of one layer, full of NaN until something is stored, and the kernels that use them."""

    shape: Shape
    requests: list[Request]
    library: ctypes.CDLL
    storage: Tensor = field(init=False)
    frequencies: Tensor = field(init=False)  # radians per position

    def __post_init__(self) -> None:
        shape = self.shape
        size = self.library.penstock_kv_block_bytes(
            shape.num_kv_heads, shape.head_dim, shape.block_size, TYPES[shape.dtype]
        )
        num_blocks = 1 + max((max(request.blocks, default=0) for request in self.requests), default=0)
        self.storage = torch.full((num_blocks * size // 2,), math.nan, dtype=torch.bfloat16)
        self.frequencies = 100.0 ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)

    def forward(self, work: Sequence[tuple[int, int, int]], freed: int = 0) -> list[Tensor]:
        """One step. `work` names (request, first token, end token) of each row; the first `freed` blocks of
        each row are gone. Returns [num_tokens, num_heads * head_dim] of each row."""
        shape = self.shape
        parts = [self.requests[r].qkv[start:end] for r, start, end in work]
        qkv = torch.cat([torch.empty(0, shape.token_size, dtype=shape.dtype), *parts])
        arrays = self._arrays(work, freed)
        y = self._run(qkv, self._step(arrays, len(qkv), len(work)))
        return list(y.split([end - start for _, start, end in work]))

    def parts(self, work: Sequence[tuple[int, int, int]], segments: range) -> AttentionParts:
        """The unfinished results of the same step; the cache must have its keys and values already.

        Blocks that hold nothing of these segments are nowhere.
        """
        shape = self.shape
        qkv = torch.cat([self.requests[r].qkv[start:end] for r, start, end in work])
        arrays = self._arrays(work, 0)
        segment_blocks = TILES_PER_SEGMENT / -(-shape.block_size // 16)
        first, end = int(segments.start * segment_blocks), math.ceil(segments.stop * segment_blocks)
        arrays[2][:, :first] = arrays[2][:, end:] = NOWHERE
        self._run_rope(qkv, self._step(arrays, len(qkv), len(work)), torch.zeros_like(self.storage))
        parts = AttentionParts.empty(len(segments), len(qkv), shape.num_heads, shape.head_dim)
        struct = parts.struct(segments.start)
        args = self._attention_args(qkv, None)
        args.parts = ctypes.addressof(struct)
        step = self._step(arrays, len(qkv), len(work))
        self.library.penstock_attention(ctypes.byref(args), ctypes.byref(step))
        return parts

    def merged(self, parts: AttentionParts) -> Tensor:
        kernels = CpuKernels(self.library, frozenset(KERNEL_NAMES))
        return kernels.merge_parts(parts, self.shape.sinks, self.shape.dtype)

    def _arrays(self, work: Sequence[tuple[int, int, int]], freed: int) -> list[Tensor]:
        size = self.shape.block_size
        longest = max((len(self.requests[r].blocks) for r, _, _ in work), default=1)
        tables = torch.full((len(work), longest + 1), NOWHERE)
        for row, (r, _, _) in enumerate(work):
            blocks = self.requests[r].blocks
            tables[row, freed : len(blocks)] = torch.tensor(blocks[freed:], dtype=torch.int64)
        positions = [p for _, start, end in work for p in range(start, end)]
        slots = [slot for r, start, end in work for slot in self.requests[r].slots(start, end, size)]
        starts = torch.tensor([0, *(end - start for _, start, end in work)]).cumsum(0)
        ends = [end for _, _, end in work]
        return [torch.tensor(positions), torch.tensor(slots), tables, starts, torch.tensor(ends)]

    def _step(self, arrays: list[Tensor], num_tokens: int, num_rows: int) -> Step:
        positions, slots, tables, starts, lengths = arrays
        return Step(
            num_tokens=num_tokens, positions=positions.data_ptr(), slot_mapping=slots.data_ptr(),
            block_tables=tables.data_ptr(), block_table_stride=tables.shape[1],
            query_starts=starts.data_ptr(), seq_lens=lengths.data_ptr(), num_rows=num_rows,
        )  # fmt: skip

    def _run(self, qkv: Tensor, step: Step) -> Tensor:
        self._run_rope(qkv, step, self.storage)
        y = torch.full(
            (len(qkv), self.shape.num_heads * self.shape.head_dim), math.nan, dtype=self.shape.dtype
        )
        sinks = self.shape.sinks
        args = self._attention_args(qkv, sinks)
        args.y = y.data_ptr()
        self.library.penstock_attention(ctypes.byref(args), ctypes.byref(step))
        return y

    def _attention_args(self, qkv: Tensor, sinks: Tensor | None) -> AttentionArgs:
        shape = self.shape
        return AttentionArgs(
            qkv=qkv.data_ptr(), kv=self.storage.data_ptr(), num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, block_size=shape.block_size,
            window=shape.window, scale=shape.head_dim**-0.5, soft_cap=shape.soft_cap,
            dtype=TYPES[shape.dtype],
            sinks=None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip

    def _run_rope(self, qkv: Tensor, step: Step, storage: Tensor) -> None:
        shape, dtype = self.shape, TYPES[self.shape.dtype]
        angles = torch.full((len(qkv), 2, shape.head_dim // 2), math.nan)
        sizes = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
        turning = RopeAnglesArgs(
            frequencies=self.frequencies.data_ptr(), angles=angles.data_ptr(), rotary_dim=shape.head_dim,
            factor=1.0, dtype=dtype,
        )  # fmt: skip
        storing = RopeStoreArgs(
            qkv=qkv.data_ptr(), angles=angles.data_ptr(), kv=storage.data_ptr(),
            block_size=shape.block_size, dtype=dtype, **sizes,
        )  # fmt: skip
        self.library.penstock_rope_angles(ctypes.byref(turning), ctypes.byref(step))
        self.library.penstock_rope_store(ctypes.byref(storing), ctypes.byref(step))

    def expected(self, request: int, start: int, end: int) -> Tensor:
        """The same from formulas, in float64 but for the rounding of what is stored."""
        shape = self.shape
        sizes = [
            count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        ]
        query, key, value = self.requests[request].qkv[:end].split(sizes, dim=1)
        angles = angles_of(torch.arange(end), self.frequencies, shape.dtype)
        query, key = (rotated(heads.unflatten(1, (-1, shape.head_dim)), angles) for heads in (query, key))
        value = value.unflatten(1, (-1, shape.head_dim))
        return attended(shape, query[start:], key, value).flatten(1)


def angles_of(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """[num_tokens, 2, head_dim / 2] cosines and sines, rounded to `dtype`."""
    turns = positions[:, None].float() * frequencies
    return torch.stack((turns.cos(), turns.sin()), dim=1).to(dtype).float()


def rotated(heads: Tensor, angles: Tensor) -> Tensor:
    """[num_tokens, heads, head_dim], rounded once."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = angles[:, 0, None], angles[:, 1, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def attended(shape: Shape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The last queries of a row over its whole context, in float64."""
    group_size = shape.num_heads // shape.num_kv_heads
    key, value = (heads.double().repeat_interleave(group_size, dim=1) for heads in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * shape.head_dim**-0.5
    if shape.soft_cap:
        scores = shape.soft_cap * (scores / shape.soft_cap).tanh()
    distance = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
    hidden = (distance < 0) | (distance >= (shape.window or len(key)))
    scores = scores.masked_fill(hidden, -math.inf)
    if shape.sinks is not None:
        scores = torch.cat((scores, shape.sinks.double()[:, None, None].expand(-1, len(query), 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


def pool(shape: Shape, lengths: Sequence[int], *, seed: int = 0, flags: str = "-march=native") -> Pool:
    """Requests with these many tokens, their blocks strewn over the storage."""
    order, numbers = (torch.Generator().manual_seed(seed) for _ in range(2))
    counts = [-(-length // shape.block_size) for length in lengths]
    blocks = torch.randperm(sum(counts) + 2, generator=order).tolist()
    requests = []
    for length, count in zip(lengths, counts, strict=True):
        qkv = torch.randn(length, shape.token_size, generator=numbers) * 1.5
        requests.append(Request(qkv=qkv.to(shape.dtype), blocks=[blocks.pop() for _ in range(count)]))
    return Pool(shape=shape, requests=requests, library=built(flags))


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all()
    if len(found):
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error.item() <= TOLERANCES[found.dtype]


def pairs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip([0, *lengths], lengths, strict=False))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Where a test says nothing else: many small steps wait for their threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    group_size, num_kv_heads = draw(
        st.sampled_from([(1, 1), (7, 2), (1, 3), (4, 2), (14, 1), (1, 9), (25, 1)])
    )
    return Shape(
        num_heads=group_size * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([2, 8, 16, 20, 32, 64, 80, 128])),
        block_size=draw(st.sampled_from([1, 2, 5, 8, 16, 24, 32, 64, 300])),
        window=draw(st.sampled_from([0, 0, 1, 7, 40, 257])),
        soft_cap=draw(st.sampled_from([0.0, 0.0, 2.5])),
        has_sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from(list(TYPES))),
    )


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(length, tokens of the second step) of each request; the others come in a first step."""
    lengths = draw(st.lists(st.sampled_from([1, 2, 15, 16, 17, 33, 100, 256, 257, 300]), max_size=3))
    return [(length, draw(st.sampled_from([0, 1, 1, 2, 19, 270]))) for length in lengths]


@pytest.mark.deep
@pytest.mark.parametrize("flags", targets(emulated=True))
@settings(max_examples=depth(20, 100))
@given(shape=shapes(), batch=batches(), seed=st.integers(0, 999))
def test_attention_is_that_of_the_formulas(
    flags: str, shape: Shape, batch: list[tuple[int, int]], seed: int
) -> None:
    blocks = pool(shape, [length for length, _ in batch], seed=seed, flags=flags)
    splits = [(r, max(0, length - last), length) for r, (length, last) in enumerate(batch)]
    for work in ([(r, 0, middle) for r, middle, _ in splits], splits):
        for (r, start, end), found in zip(work, blocks.forward(work), strict=True):
            assert_close(found, blocks.expected(r, start, end))


@pytest.mark.deep
@pytest.mark.parametrize("flags", targets(emulated=True))
@settings(max_examples=depth(10, 40))
@given(
    shape=shapes(),
    cuts=st.sets(st.sampled_from([1, 2, 16, 31, 100, 241, 255, 256, 257, 299]), max_size=6),
    seed=st.integers(0, 999),
)
def test_a_prompt_gives_the_same_bits_however_it_is_cut(
    flags: str, shape: Shape, cuts: set[int], seed: int
) -> None:
    length = 300
    whole = pool(shape, [length], seed=seed, flags=flags).forward([(0, 0, length)])[0]
    blocks = pool(shape, [length], seed=seed, flags=flags)
    pieces = [blocks.forward([(0, start, end)])[0] for start, end in pairs([*sorted(cuts), length])]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("flags", targets(emulated=True))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [0, 30, 260])
def test_decoding_one_by_one_gives_the_bits_of_prefill(flags: str, dtype: torch.dtype, window: int) -> None:
    shape = Shape(num_heads=14, head_dim=64, dtype=dtype, window=window, has_sinks=window == 30)
    whole = pool(shape, [300], flags=flags).forward([(0, 0, 300)])[0]
    blocks = pool(shape, [300], flags=flags)
    blocks.forward([(0, 0, 3)])
    decoded = [blocks.forward([(0, at, at + 1)])[0] for at in range(3, 300)]
    assert torch.equal(torch.cat(decoded), whole[3:])


@pytest.mark.parametrize("flags", targets(emulated=True))
@pytest.mark.parametrize("dtype", TYPES)
def test_neither_company_nor_threads_change_a_bit(threads, flags: str, dtype: torch.dtype) -> None:
    shape = Shape(num_heads=14, head_dim=64, dtype=dtype)
    work = [(0, 1099, 1100), (1, 0, 200), (2, 40, 40), (3, 0, 1), (4, 300, 420), (5, 599, 600), (6, 3, 16)]
    blocks = pool(shape, [end for _, _, end in work], flags=flags)
    blocks.forward([(r, 0, start) for r, start, _ in work])
    threads(1)
    alone = [blocks.forward([row])[0] for row in work]
    for count in (1, 2, 3):
        threads(count)
        for order in (work, work[::-1], work[:1], work[4:]):
            for row, found in zip(order, blocks.forward(order), strict=True):
                assert torch.equal(found, alone[row[0]])


@pytest.mark.parametrize("num_kv_heads", [1, 5])
def test_long_contexts_are_shared_among_threads(threads, num_kv_heads: int) -> None:
    shape = Shape(num_heads=10, num_kv_heads=num_kv_heads, dtype=torch.bfloat16)
    blocks = pool(shape, [3000])
    blocks.forward([(0, 0, 2999)])
    found = []
    for count in (1, 2, 3, 7):
        threads(count)
        found.append(blocks.forward([(0, 2999, 3000)])[0])
    assert all(torch.equal(one, found[0]) for one in found)
    assert_close(found[0], blocks.expected(0, 2999, 3000))


# With blocks of one token a segment is 64 of them.
@pytest.mark.parametrize("flags", targets(emulated=True))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("shape", "length"),
    [
        (Shape(num_heads=14, head_dim=20, block_size=1), 340),
        (Shape(num_heads=6, head_dim=64, block_size=1, window=100, has_sinks=True), 340),
        (Shape(num_heads=4, head_dim=16, block_size=64, soft_cap=2.5, has_sinks=True), 2100),
    ],
    ids=["small", "window and sinks", "whole segments"],
)
def test_segments_merged_in_order_give_the_bits_of_one_call(
    threads, flags: str, dtype: torch.dtype, shape: Shape, length: int
) -> None:
    blocks = pool(replace(shape, dtype=dtype), [length, 50], flags=flags)
    work = [(0, length - 40, length), (1, 49, 50)]
    blocks.forward([(0, 0, length - 40), (1, 0, 49)])
    whole = torch.cat(blocks.forward(work))
    num_segments = -(-length // (shape.block_size * TILES_PER_SEGMENT // -(-shape.block_size // 16)))
    assert num_segments >= 3
    for cuts in ([], [1], [2], [1, 2], range(1, num_segments)):
        threads(1 + len(cuts) % 2)
        ranges = [range(start, end) for start, end in pairs([*cuts, num_segments])]
        parts = AttentionParts.join([blocks.parts(work, segments) for segments in ranges])
        assert torch.equal(blocks.merged(parts), whole)


@pytest.mark.parametrize("dtype", TYPES)
def test_parts_do_not_depend_on_company_or_threads(threads, dtype: torch.dtype) -> None:
    blocks = pool(Shape(num_heads=10, num_kv_heads=1, dtype=dtype), [3000, 1100])
    work = [(0, 2999, 3000), (1, 1090, 1100)]
    blocks.forward([(0, 0, 2999), (1, 0, 1090)])
    whole = torch.cat(blocks.forward(work))
    found = []
    for count in (1, 2, 7):
        threads(count)
        found.append(blocks.parts(work, range(3)))
        alone = blocks.parts(work[:1], range(1, 3))
        assert torch.equal(alone.values[:, 0], found[0].values[1:, 0])
        assert torch.equal(blocks.merged(found[-1]), whole)
    for parts in found:
        assert torch.equal(parts.values, found[0].values)
        assert torch.equal(parts.largest, found[0].largest)
        assert torch.equal(parts.total, found[0].total)


def test_a_part_is_the_largest_score_and_the_sums_of_a_segment() -> None:
    """Scores in powers of 2; nothing of a segment beyond the context or below the window."""
    shape = Shape(window=70, block_size=1)  # segments of 64 tokens
    blocks = pool(shape, [200])
    blocks.forward([(0, 0, 200)])
    parts = blocks.parts([(0, 199, 200)], range(5))
    query, key, value = (
        heads.unflatten(1, (-1, 16))
        for heads in blocks.requests[0].qkv.split([4 * 16, 2 * 16, 2 * 16], dim=1)
    )
    angles = angles_of(torch.arange(200), blocks.frequencies, shape.dtype)
    query, key = rotated(query, angles)[199].double(), rotated(key, angles).double()
    scores = torch.einsum("hd,khd->hk", query, key.repeat_interleave(2, 1)) / 4 * math.log2(math.e)
    for segment, tokens in ((2, slice(130, 192)), (3, slice(192, 200))):
        seen = scores[:, tokens]
        largest = seen.max(-1).values
        weights = (seen - largest[:, None]).exp2()
        values = torch.einsum("hk,khd->hd", weights, value[tokens].double().repeat_interleave(2, 1))
        torch.testing.assert_close(parts.largest[segment, 0].double(), largest, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(parts.total[segment, 0].double(), weights.sum(-1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(parts.values[segment, 0].double(), values, atol=1e-4, rtol=1e-5)
    for segment in (0, 1, 4):
        assert (parts.largest[segment] == torch.tensor(-1e29)).all()
        assert not parts.total[segment].any()
        assert not parts.values[segment].any()


@pytest.mark.parametrize("block_size", [1, 5, 16, 48])
def test_blocks_below_the_window_are_not_touched(block_size: int) -> None:
    shape = Shape(window=70, block_size=block_size)
    blocks = pool(shape, [600])
    blocks.forward([(0, 0, 580)])
    kept = blocks.forward([(0, 580, 600)])[0]
    freed = blocks.forward([(0, 580, 600)], freed=(580 - 70 + 1) // block_size)[0]
    assert torch.equal(freed, kept)


@pytest.mark.parametrize("dtype", TYPES)
def test_bits_do_not_depend_on_the_size_of_whole_blocks(dtype: torch.dtype) -> None:
    shape = Shape(head_dim=32, dtype=dtype)
    found = [
        pool(replace(shape, block_size=size), [400]).forward([(0, 0, 400)])[0]
        for size in (16, 32, 64, 256, 512)
    ]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    blocks = pool(Shape(dtype=dtype), [40, 40, 40])
    clean = blocks.forward([(0, 0, 40), (1, 0, 40), (2, 0, 40)])
    blocks.requests[1].qkv[30, :16] = math.nan  # a query
    found = blocks.forward([(0, 0, 40), (1, 0, 40), (2, 0, 40)])
    assert torch.equal(found[0], clean[0])
    assert torch.equal(found[2], clean[2])
    assert found[1][30, :16].isnan().all()
    assert torch.equal(found[1][30, 16:], clean[1][30, 16:])
    assert torch.equal(found[1][:30], clean[1][:30])
    assert torch.equal(found[1][31:], clean[1][31:])


@pytest.mark.parametrize("dtype", TYPES)
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    blocks = pool(Shape(dtype=dtype), [300])
    blocks.requests[0].qkv[:, :-32] *= 60
    found = blocks.forward([(0, 0, 300)])[0]
    assert found.isfinite().all()
    if dtype is torch.float32:
        torch.testing.assert_close(found.double(), blocks.expected(0, 0, 300), atol=5e-3, rtol=0)


@pytest.mark.parametrize("flags", targets(emulated=True))
def test_a_step_without_rows_or_tokens_does_nothing(flags: str) -> None:
    blocks = pool(Shape(), [20], flags=flags)
    assert blocks.forward([]) == []
    assert [len(row) for row in blocks.forward([(0, 0, 0), (0, 20, 20)])] == [0, 0]


@pytest.mark.parametrize("flags", targets(emulated=True))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", [2, 20, 64])
def test_angles_are_those_of_the_formula(flags: str, dtype: torch.dtype, head_dim: int) -> None:
    positions = torch.arange(0, 100_000, 1777)
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.full((len(positions), 2, head_dim // 2), math.nan)
    args = RopeAnglesArgs(
        frequencies=frequencies.data_ptr(), angles=angles.data_ptr(), rotary_dim=head_dim, factor=1.25,
        dtype=TYPES[dtype],
    )  # fmt: skip
    step = Step(num_tokens=len(positions), positions=positions.data_ptr())
    built(flags).penstock_rope_angles(ctypes.byref(args), ctypes.byref(step))
    turns = positions[:, None].float() * frequencies
    expected = (torch.stack((turns.cos(), turns.sin()), dim=1) * 1.25).to(dtype).float()
    one_unit = 2e-7 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(angles, expected, atol=one_unit, rtol=0)
    assert torch.equal(angles, angles.to(dtype).float())


@pytest.mark.parametrize("flags", targets(emulated=True))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_tokens", [1, 100])
def test_queries_are_rotated_in_place_and_keys_and_values_left(
    flags: str, dtype: torch.dtype, num_tokens: int
) -> None:
    numbers = torch.Generator().manual_seed(5)
    heads = torch.randn(num_tokens, 3 + 2 * 2, 20, generator=numbers).to(dtype)
    angles = torch.randn(num_tokens, 2, 10, generator=numbers)
    qkv, slots = heads.clone(), torch.arange(num_tokens)
    kv = torch.zeros(
        num_tokens * built(flags).penstock_kv_block_bytes(2, 20, 1, TYPES[dtype]), dtype=torch.uint8
    )
    args = RopeStoreArgs(
        qkv=qkv.data_ptr(), angles=angles.data_ptr(), kv=kv.data_ptr(), num_heads=3, num_kv_heads=2,
        head_dim=20, block_size=1, dtype=TYPES[dtype],
    )  # fmt: skip
    step = Step(num_tokens=num_tokens, slot_mapping=slots.data_ptr())
    built(flags).penstock_rope_store(ctypes.byref(args), ctypes.byref(step))
    torch.testing.assert_close(qkv[:, :3], rotated(heads[:, :3], angles))
    assert torch.equal(qkv[:, 3:], heads[:, 3:])


def test_a_block_takes_its_keys_and_values_and_no_more() -> None:
    block_bytes = built().penstock_kv_block_bytes
    assert block_bytes(2, 64, 16, BFLOAT16) == 2 * 16 * 2 * 64 * 2
    assert block_bytes(8, 128, 64, FLOAT32) == 8 * 64 * 2 * 128 * 4
    assert block_bytes(1, 64, 5, BFLOAT16) == block_bytes(1, 64, 16, BFLOAT16)
