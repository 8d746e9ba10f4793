"""The head kernel against candidates of whole logits, and its logits against torch."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depth import depth
from head_requests import request
from kernel_builds import built, targets
from penstock.kernels.candidates import HeadOutput, HeadRequest, head_output_of
from penstock.kernels.cpu.abi import (
    BFLOAT16,
    FLOAT32,
    QuantizedLinearArgs,
    QuantizedPackArgs,
    QuantizedSizes,
    Step,
)
from penstock.kernels.cpu.head import Head, dense_product

TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


def pack(library: ctypes.CDLL, weight: Tensor) -> Tensor:
    """Panels of [vocab, hidden]."""
    vocab, hidden = weight.shape
    panel = -(-hidden // 2) * 2 * 32
    packed = torch.zeros(-(-vocab // 32) * panel, dtype=weight.dtype)
    library.penstock_pack(weight.data_ptr(), packed.data_ptr(), 0, vocab, hidden, 0, TYPES[weight.dtype])
    return packed


def run(library: ctypes.CDLL, x: Tensor, weight: Tensor, wanted: HeadRequest) -> HeadOutput:
    packed = pack(library, weight)
    return Head(library).answer(x, dense_product(packed.data_ptr(), x.shape[1], len(weight), x.dtype), wanted)


def matrices(num_rows: int, vocab: int, hidden: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Small whole numbers: every product is exact in any order, and many are equal."""
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, (num_rows, hidden), generator=numbers).to(dtype)
    return x, torch.randint(-2, 3, (vocab, hidden), generator=numbers).to(dtype)


def assert_equal(found: HeadOutput, expected: HeadOutput) -> None:
    assert np.array_equal(found.candidates.is_finite, expected.candidates.is_finite)
    assert np.array_equal(found.candidates.ids, expected.candidates.ids)
    assert np.array_equal(found.candidates.values, expected.candidates.values)
    assert np.array_equal(found.logits_rows, expected.logits_rows)
    assert torch.equal(found.logits.nan_to_num(7.0), expected.logits.nan_to_num(7.0))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, HeadRequest]:
    num_rows, vocab = draw(st.integers(0, 14)), draw(st.sampled_from([1, 15, 32, 33, 64, 97, 512]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    x, weight = matrices(num_rows, vocab, draw(st.sampled_from([1, 5, 16])), dtype, draw(st.integers(0, 999)))
    for row in draw(st.sets(st.integers(0, 13), max_size=2)):
        x[row : row + 1, 0] = draw(st.sampled_from([math.nan, math.inf]))
    counts = draw(st.lists(st.sampled_from([0, 1, 2, 7, 50, 128, 600]), min_size=num_rows, max_size=num_rows))
    ids = st.dictionaries(st.integers(0, vocab - 1), st.sampled_from([-math.inf, -2.0, 5.0]), max_size=20)
    bias = draw(st.dictionaries(st.integers(0, 13), ids, max_size=3))
    factors = st.dictionaries(st.integers(0, vocab - 1), st.sampled_from([0.3, 1.1, 2.0]), max_size=20)
    scales = draw(st.none() | st.dictionaries(st.integers(0, 13), factors, max_size=3))
    sets = st.sets(st.integers(0, vocab - 1), max_size=60)
    allowed = draw(st.none() | st.lists(sets, min_size=num_rows, max_size=num_rows))
    wants = sorted(draw(st.sets(st.integers(0, 13))))
    found = request(counts, wants=wants, bias=bias, scales=scales, allowed=allowed, vocab=vocab)
    return x, weight, found


@pytest.fixture
def threads() -> object:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("flags", targets())
@pytest.mark.deep
@settings(max_examples=depth(40, 150))
@given(case=cases())
def test_the_kernel_answers_like_torch(flags: str, case: tuple[Tensor, Tensor, HeadRequest]) -> None:
    x, weight, wanted = case
    found = run(built(flags), x, weight, wanted)
    assert_equal(found, head_output_of(x.float() @ weight.float().T, wanted))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_neither_threads_nor_company_change_a_row(threads, dtype: torch.dtype, num_threads: int) -> None:
    numbers = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(size, 80, generator=numbers).to(dtype) for size in (25, 1000))
    counts = [1, 5, 50, 128, 0] * 5
    threads(num_threads)
    together = run(built(), x, weight, request(counts, wants=list(range(25))))
    threads(1)
    for row in range(25):
        alone = run(built(), x[row : row + 1], weight, request(counts[row : row + 1], wants=[0]))
        count = counts[row]
        assert together.candidates.ids[row, :count].tolist() == alone.candidates.ids[0, :count].tolist()
        assert np.array_equal(together.candidates.values[row, :count], alone.candidates.values[0, :count])
        assert torch.equal(together.logits[row], alone.logits[0])
    assert_equal(together, head_output_of(together.logits, request(counts, wants=list(range(25)))))


def test_logits_are_those_of_the_linear_kernel_unrounded() -> None:
    numbers = torch.Generator().manual_seed(4)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x, weight = (torch.randn(size, 81, generator=numbers).to(dtype) / 9 for size in (13, 97))
        found = run(built(), x, weight, request([0] * 13, wants=list(range(13)))).logits
        y = torch.empty(13, 97, dtype=dtype)
        packed = pack(built(), weight)
        args = dense_product(packed.data_ptr(), x.shape[1], 97, x.dtype)
        args.x, args.x_stride, args.y, args.y_stride = x.data_ptr(), 81, y.data_ptr(), 97
        built().penstock_linear(ctypes.byref(args), ctypes.byref(Step(num_tokens=13)))
        assert torch.equal(found.to(dtype), y)
        torch.testing.assert_close(found, x.float() @ weight.float().T, atol=tolerance, rtol=0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_quantised_weights_give_the_logits_of_their_linear_kernel(dtype: torch.dtype, bits: int) -> None:
    library, numbers = built(), torch.Generator().manual_seed(8)
    vocab, hidden, num_rows, group = 97, 72, 14, 24
    q = torch.randint(0, 1 << bits, (vocab, hidden), generator=numbers, dtype=torch.uint8)
    scales = torch.rand(vocab, hidden // group, generator=numbers)
    sizes = QuantizedSizes()
    library.penstock_quantized_sizes(vocab, hidden, group, bits, 0, FLOAT32, ctypes.byref(sizes))
    byte_counts = sizes.weight_bytes, sizes.scale_bytes, sizes.token_bytes * num_rows
    weight, packed_scales, scratch = (torch.zeros(count, dtype=torch.uint8) for count in byte_counts)
    packing = QuantizedPackArgs(
        q=q.data_ptr(), scales=scales.data_ptr(), weight=weight.data_ptr(),
        packed_scales=packed_scales.data_ptr(), num_rows=vocab, in_size=hidden, group_size=group, bits=bits,
        scale_dtype=FLOAT32,
    )  # fmt: skip
    library.penstock_pack_quantized(ctypes.byref(packing))
    x, y = (
        torch.randn(num_rows, hidden, generator=numbers).to(dtype),
        torch.empty(num_rows, vocab, dtype=dtype),
    )
    product = QuantizedLinearArgs(
        x=x.data_ptr(), x_stride=hidden, weight=weight.data_ptr(), scales=packed_scales.data_ptr(),
        y=y.data_ptr(), y_stride=vocab, in_size=hidden, out_size=vocab, group_size=group,
        scratch=scratch.data_ptr(), bits=bits, dtype=TYPES[dtype], scale_dtype=FLOAT32,
    )  # fmt: skip
    wanted = request([1, 5] * 7, wants=list(range(num_rows)))
    found = Head(library).answer(x, product, wanted)
    library.penstock_quantized_linear(ctypes.byref(product), ctypes.byref(Step(num_tokens=num_rows)))
    assert torch.equal(found.logits.to(dtype), y)
    assert_equal(found, head_output_of(found.logits, wanted))


def test_a_vocabulary_of_151936(threads) -> None:
    x, weight = matrices(3, 151936, 16, torch.bfloat16, seed=5)
    allowed = [set(range(151936)), set(range(150000, 151936)), {7, 151935}]
    bias = {0: {40000: 90.0, 151000: 90.0}}
    wanted = request([1, 50, 128], wants=[1], bias=bias, allowed=allowed, vocab=151936)
    threads(2)
    assert_equal(run(built(), x, weight, wanted), head_output_of(x.float() @ weight.float().T, wanted))


@pytest.mark.parametrize("flags", targets())
def test_scaled_logits_are_rounded_before_a_value_is_added(flags: str) -> None:
    """A fused multiply-add would give other bits. Many entries, in every panel, over two threads."""
    rng, vocab = np.random.default_rng(3), 3000
    numbers = torch.Generator().manual_seed(9)
    weight = torch.randn(vocab, 24, generator=numbers)
    x = torch.randn(4, 24, generator=numbers)
    bias = {
        row: dict(zip(range(0, vocab, 1 + row), rng.normal(size=vocab).tolist(), strict=False))
        for row in range(3)
    }
    scales = {row: {i: rng.uniform(0.3, 2.0) for i in ids} for row, ids in bias.items()}
    wanted = request([1, 128, 600, 50], wants=[0, 1, 2, 3], bias=bias, scales=scales)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        found = run(built(flags), x, weight, wanted)
        assert_equal(found, head_output_of(found.logits, wanted))


def test_rows_may_lie_apart() -> None:
    x, weight = matrices(8, 70, 24, torch.float32, seed=6)
    wanted = request([3, 3, 3, 3])
    found = run(built(), x[::2], weight, wanted)
    assert_equal(found, run(built(), x[::2].contiguous(), weight, wanted))


def test_later_calls_see_nothing_of_earlier_ones() -> None:
    x, weight = matrices(6, 500, 24, torch.float32, seed=7)
    small, large = request([2]), request([128] * 6)
    first = run(built(), x[:1], weight, small)
    run(built(), x, weight, large)
    assert_equal(run(built(), x[:1], weight, small), first)


def test_a_request_that_comes_again_is_answered_anew() -> None:
    numbers = torch.Generator().manual_seed(12)
    weight = torch.randn(200, 24, generator=numbers)
    packed = pack(built(), weight)
    head, product = Head(built()), dense_product(packed.data_ptr(), 24, 200, torch.float32)
    often, once = request([1, 3, 0], wants=[2]), request([2, 2])
    for wanted in (often, often, once, often):
        x = torch.randn(len(wanted), 24, generator=numbers)
        assert_equal(head.answer(x, product, wanted), run(built(), x, weight, wanted))
