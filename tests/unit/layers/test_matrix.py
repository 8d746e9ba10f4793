"""Weights in every form: fed piece by piece, they multiply like the plain weight. And which is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from head_requests import request
from kernel_builds import built
from penstock.distributed.share import Share
from penstock.errors import NotEnoughMemoryError
from penstock.kernels.candidates import HeadOutput, head_output_of
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.kernels.quantized_rows import QuantizedRows, dequantize, quantize_rows, round_activations
from penstock.layers.compute import Compute, FormatOf, never_quantized
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.matrix import (
    GATE,
    PLAIN,
    UP,
    Matrix,
    OnednnMatrix,
    PackedMatrix,
    QuantizedFormat,
    QuantizedMatrix,
    RoundedMatrix,
)

CPU = torch.device("cpu")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# Parts of a fused weight, in rows; panels of 32 outputs, and of 16 gates and 16 ups, are cut across.
FUSED, GATED = (24, 5, 41), (20, 20)

EACH_DTYPE = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
EACH_GATE = pytest.mark.parametrize("gated", [False, True], ids=["fused", "gated"])
EACH_BITS = pytest.mark.parametrize("bits", [8, 4])
needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN takes no bfloat16 here",
)


def kernels(*switched_off: str) -> CpuKernels:
    return CpuKernels(built(), frozenset(KERNEL_NAMES) - set(switched_off))


def seeded(*shape: int, dtype: torch.dtype = FLOAT32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def sizes_of(gated: bool) -> tuple[int, ...]:
    return GATED if gated else FUSED


def fill(matrix: Matrix, rows: Tensor, put: Callable[[int, Tensor, int], None] | None = None) -> None:
    """As the loader does: part after part of the weight, each in pieces of its own odd size."""
    put = put or matrix.put
    for index, part in enumerate(rows.split(sizes_of(matrix.gated))):
        offset = 0 if matrix.gated else sum(FUSED[:index])
        for first in range(0, len(part), 7 + index):
            piece = part[first : first + 7 + index]
            put(offset + first, piece, (GATE, UP)[index] if matrix.gated else PLAIN)
    matrix.finish()


def plain_product(rows: Tensor, x: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """In float64."""
    y = F.linear(x.double(), rows.double(), None if bias is None else bias.double())
    if not gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def assert_near(found: Tensor, expected: Tensor, *, roundings: int = 1) -> None:
    """Within 1e-5, or so many roundings to bfloat16, of the largest value."""
    tolerance = 1e-5 if found.dtype == FLOAT32 else roundings / 256
    largest = float(expected.abs().max()) if len(expected) else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * largest)


def assert_same_head(found: HeadOutput, expected: HeadOutput) -> None:
    assert np.array_equal(found.candidates.ids, expected.candidates.ids)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-4)
    values = [torch.from_numpy(output.candidates.values) for output in (found, expected)]
    torch.testing.assert_close(*values, rtol=0, atol=1e-4)
    assert np.array_equal(found.candidates.is_finite, expected.candidates.is_finite)


WANTED = request([1, 5, 0, 70], wants=[1, 2], bias={3: {4: 50.0, 69: -50.0}})

# --- packed ---------------------------------------------------------------------------------------------


@EACH_GATE
@EACH_DTYPE
@pytest.mark.parametrize("in_size", [80, 81])
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_packed_multiplies_like_the_plain_weight(
    gated: bool, dtype: torch.dtype, in_size: int, num_tokens: int
) -> None:
    out_size = sum(sizes_of(gated))
    rows, bias = seeded(out_size, in_size, dtype=dtype), seeded(out_size, dtype=dtype)
    matrix = PackedMatrix(out_size, in_size, dtype, kernels(), gated=gated)
    fill(matrix, rows)
    x = seeded(num_tokens, in_size + 3, dtype=dtype)[:, 1:-2]
    for given in (None, bias):
        y = matrix.multiply(x, given)
        assert y.dtype == dtype
        assert_near(y, plain_product(rows, x, given, gated))


@EACH_DTYPE
@pytest.mark.parametrize("in_size", [80, 81])
def test_packed_rows_are_read_back(dtype: torch.dtype, in_size: int) -> None:
    rows = seeded(sum(FUSED), in_size, dtype=dtype)
    matrix = PackedMatrix(len(rows), in_size, dtype, kernels())
    fill(matrix, rows)
    ids = torch.tensor([69, 0, 24, 23, 28, 29, 0])
    assert torch.equal(matrix.gather(ids), rows[ids])
    assert matrix.gather(ids[:0]).shape == (0, in_size)


@EACH_DTYPE
@pytest.mark.parametrize("switched_off", [(), ("head",)])
def test_a_packed_vocabulary_answers_like_torch(dtype: torch.dtype, switched_off: tuple[str, ...]) -> None:
    """Small whole numbers, so that the order of sums does not matter, and bfloat16 holds every logit."""
    numbers = torch.Generator().manual_seed(0)
    rows, x = (
        torch.randint(-2, 3, (size, 40), generator=numbers).to(dtype) for size in (sum(FUSED), len(WANTED))
    )
    matrix = PackedMatrix(len(rows), 40, dtype, kernels(*switched_off))
    fill(matrix, rows)
    assert_same_head(matrix.head(x, WANTED), head_output_of(x.float() @ rows.float().T, WANTED))


@EACH_DTYPE
def test_rows_come_in_any_order_of_memory(dtype: torch.dtype) -> None:
    rows = seeded(81, sum(FUSED), dtype=dtype).T
    matrix = PackedMatrix(len(rows), 81, dtype, kernels())
    matrix.put(0, rows, PLAIN)
    assert torch.equal(matrix.gather(torch.arange(len(rows))), rows)


@EACH_DTYPE
def test_packed_memory_is_the_weight_filled_up_to_panels(dtype: torch.dtype) -> None:
    def nbytes(out_size: int, in_size: int, *, gated: bool = False) -> int:
        return PackedMatrix(out_size, in_size, dtype, kernels(), gated=gated).nbytes

    assert nbytes(64, 80) == 64 * 80 * dtype.itemsize
    assert nbytes(33, 80) == nbytes(64, 80)
    assert nbytes(64, 80, gated=True) == nbytes(64, 80)
    assert nbytes(40, 80, gated=True) == nbytes(64, 80)  # 20 gates and 20 ups
    assert nbytes(32, 7) == 32 * (7 if dtype == FLOAT32 else 8) * dtype.itemsize


# --- quantised ------------------------------------------------------------------------------------------


def form(
    bits: int, group_size: int, *, zeros: bool = False, scales: torch.dtype = BFLOAT16
) -> QuantizedFormat:
    return QuantizedFormat(bits=bits, group_size=group_size, scale_dtype=scales, has_zeros=zeros)


def quantized_matrix(
    kind: type[Matrix],
    size: tuple[int, int],
    dtype: torch.dtype,
    how: QuantizedFormat,
    *,
    gated: bool = False,
) -> QuantizedMatrix | RoundedMatrix:
    if kind is RoundedMatrix:
        return RoundedMatrix(*size, dtype, how, gated=gated)
    return QuantizedMatrix(*size, dtype, how, kernels(), gated=gated)


def quantized_product(rows: QuantizedRows, x: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    return plain_product(dequantize(rows, FLOAT32), round_activations(x, rows.group_size), bias, gated)


EACH_KIND = pytest.mark.parametrize("kind", [QuantizedMatrix, RoundedMatrix])


@EACH_KIND
@EACH_GATE
@EACH_DTYPE
@pytest.mark.parametrize(("bits", "group_size"), [(8, 264), (8, 24), (4, 64), (4, 264)])
def test_quantized_at_load_multiplies_like_the_dequantized_weight(
    kind: type[Matrix], gated: bool, dtype: torch.dtype, bits: int, group_size: int
) -> None:
    out_size = sum(sizes_of(gated))
    rows, bias = seeded(out_size, 264, dtype=dtype), seeded(out_size, dtype=dtype)
    matrix = quantized_matrix(kind, (out_size, 264), dtype, form(bits, group_size), gated=gated)
    fill(matrix, rows)
    whole = quantize_rows(rows, bits, group_size)
    for num_tokens in (0, 1, 13):
        x = seeded(num_tokens, 270, dtype=dtype)[:, 3:-3]
        for given in (None, bias):
            y = matrix.multiply(x, given)
            assert y.dtype == dtype
            assert_near(y, quantized_product(whole, x, given, gated))


def checkpoint_rows(out_size: int, bits: int, zeros: bool, scales: torch.dtype) -> QuantizedRows:
    numbers = torch.Generator().manual_seed(bits)
    return QuantizedRows(
        q=torch.randint(0, 1 << bits, (out_size, 80), generator=numbers, dtype=torch.uint8),
        scales=(torch.rand(out_size, 3, generator=numbers) + 0.1).to(scales),
        zeros=torch.randint(0, 1 << bits, (out_size, 3), generator=numbers).to(torch.uint8)
        if zeros
        else None,
        group_size=32,
        bits=bits,
    )


def pieces_of(
    matrix: QuantizedMatrix | RoundedMatrix, rows: QuantizedRows
) -> Callable[[int, Tensor, int], None]:
    """A `put` that takes row numbers and puts those rows of a quantised weight."""

    def put(first_row: int, numbers: Tensor, role: int) -> None:
        zeros = None if rows.zeros is None else rows.zeros[numbers]
        piece = QuantizedRows(rows.q[numbers], rows.scales[numbers], zeros, rows.group_size, rows.bits)
        matrix.put_quantized(first_row, piece, role)

    return put


@EACH_KIND
@EACH_GATE
@EACH_BITS
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("scales", [FLOAT32, BFLOAT16, torch.float16], ids=str)
def test_a_checkpoints_integers_are_multiplied_as_they_are(
    kind: type[Matrix], gated: bool, bits: int, zeros: bool, scales: torch.dtype
) -> None:
    out_size = sum(sizes_of(gated))
    rows = checkpoint_rows(out_size, bits, zeros, scales)
    how = form(bits, 32, zeros=zeros, scales=scales)
    matrix = quantized_matrix(kind, (out_size, 80), FLOAT32, how, gated=gated)
    fill(matrix, torch.arange(out_size), pieces_of(matrix, rows))
    x, bias = seeded(9, 80) / 40, seeded(out_size)
    assert_near(matrix.multiply(x, bias), quantized_product(rows, x, bias, gated))
    if not gated:
        ids = torch.tensor([69, 0, 24, 23, 0])
        assert torch.equal(matrix.gather(ids), dequantize(rows, FLOAT32)[ids])


@EACH_BITS
@pytest.mark.parametrize(
    ("kind", "dtype", "switched_off"),
    [
        (QuantizedMatrix, FLOAT32, ()),
        (QuantizedMatrix, BFLOAT16, ()),
        (QuantizedMatrix, FLOAT32, ("head",)),  # in bfloat16 the logits would be rounded first
        (RoundedMatrix, FLOAT32, ()),
        (RoundedMatrix, BFLOAT16, ()),
    ],
)
def test_a_quantized_vocabulary_answers_like_its_product(
    kind: type[Matrix], bits: int, dtype: torch.dtype, switched_off: tuple[str, ...]
) -> None:
    rows = checkpoint_rows(sum(FUSED), bits, False, FLOAT32)
    size, how = (len(rows.q), 80), form(bits, 32, scales=FLOAT32)
    matrix: QuantizedMatrix | RoundedMatrix = RoundedMatrix(*size, dtype, how)
    if kind is QuantizedMatrix:
        matrix = QuantizedMatrix(*size, dtype, how, kernels(*switched_off))
    fill(matrix, torch.arange(len(rows.q)), pieces_of(matrix, rows))
    x = seeded(len(WANTED), 80, dtype=dtype) / 40
    expected = quantized_product(rows, x, None, False).float()
    assert_same_head(matrix.head(x, WANTED), head_output_of(expected, WANTED))


@EACH_BITS
def test_with_kernels_and_without_them_the_weight_is_the_same(bits: int) -> None:
    rows, ids = seeded(sum(FUSED), 264, dtype=BFLOAT16), torch.arange(sum(FUSED))
    gathered = []
    for kind in (QuantizedMatrix, RoundedMatrix):
        matrix = quantized_matrix(kind, (len(rows), 264), BFLOAT16, form(bits, 64))
        fill(matrix, rows)
        gathered.append(matrix.gather(ids))
    assert torch.equal(*gathered)


@EACH_BITS
def test_zeros_are_there_for_all_rows_or_for_none(bits: int) -> None:
    for zeros in (False, True):
        matrix = QuantizedMatrix(4, 80, FLOAT32, form(bits, 32, zeros=not zeros), kernels())
        with pytest.raises(AssertionError, match="for all rows or for none"):
            matrix.put_quantized(0, checkpoint_rows(4, bits, zeros, BFLOAT16), PLAIN)


@pytest.mark.parametrize(("bits", "most"), [(8, 1.1), (4, 0.6)])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
def test_quantized_memory_is_little_more_than_the_integers(bits: int, most: float, zeros: bool) -> None:
    matrix = QuantizedMatrix(512, 1024, BFLOAT16, form(bits, 128, zeros=zeros), kernels())
    assert 512 * 1024 * bits // 8 < matrix.nbytes < most * 512 * 1024
    with_zeros = 512 * 8 if zeros else 0
    assert matrix.nbytes >= 512 * 1024 * bits // 8 + 512 * 8 * 2 + with_zeros


def test_rounded_memory_is_four_bytes_a_weight() -> None:
    assert RoundedMatrix(70, 80, BFLOAT16, form(8, 80)).nbytes == 70 * 80 * 4


# --- oneDNN ---------------------------------------------------------------------------------------------


@needs_onednn
@EACH_GATE
@pytest.mark.parametrize("in_size", [80, 81])
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_prepacked_multiplies_like_the_plain_weight(gated: bool, in_size: int, num_tokens: int) -> None:
    out_size = sum(sizes_of(gated))
    rows, bias = seeded(out_size, in_size, dtype=BFLOAT16), seeded(out_size, dtype=BFLOAT16)
    matrix = OnednnMatrix(out_size, in_size, BFLOAT16, gated=gated)
    fill(matrix, rows)
    x = seeded(num_tokens, in_size, dtype=BFLOAT16)
    for given in (None, bias):
        y = matrix.multiply(x, given)
        assert y.dtype == BFLOAT16
        assert_near(y, plain_product(rows, x, given, gated), roundings=3 if gated else 1)


@needs_onednn
def test_a_prepacked_vocabulary_answers_like_torch() -> None:
    numbers = torch.Generator().manual_seed(0)
    rows, x = (
        torch.randint(-2, 3, (size, 40), generator=numbers).to(BFLOAT16) for size in (sum(FUSED), len(WANTED))
    )
    matrix = OnednnMatrix(len(rows), 40, BFLOAT16)
    fill(matrix, rows)
    assert_same_head(matrix.head(x, WANTED), head_output_of(x.float() @ rows.float().T, WANTED))


@needs_onednn
def test_a_prepacked_weight_is_held_once_and_not_read_back() -> None:
    matrix = OnednnMatrix(70, 80, BFLOAT16)
    fill(matrix, seeded(70, 80, dtype=BFLOAT16))
    assert matrix.nbytes == 70 * 80 * 2
    assert matrix._rows is None
    with pytest.raises(AssertionError, match="finished"):
        matrix.put(0, seeded(1, 80, dtype=BFLOAT16), PLAIN)
    with pytest.raises(NotImplementedError, match="cannot be read"):
        matrix.gather(torch.tensor([0]))


# --- which form -----------------------------------------------------------------------------------------


def at_load(parts: Mapping[str, int], in_size: int) -> QuantizedFormat | None:
    """Quantises whatever is a projection of the checkpoint."""
    return form(8, in_size) if parts else None


def chosen(
    dtype: torch.dtype,
    own: CpuKernels | None,
    format_of: FormatOf = never_quantized,
    *,
    device: str = "cpu",
    gated: bool = False,
) -> nn.Parameter | Matrix:
    compute = Compute(dtype=dtype, device=torch.device(device), kernels=own, format_of=format_of)
    weight = compute.weight({"layers.0.up_proj": 64}, 64, 40, gated=gated)
    if isinstance(weight, Matrix):
        assert (weight.out_size, weight.in_size) == (64, 40)
        assert (weight.dtype, weight.gated) == (dtype, gated)
    return weight


@EACH_GATE
@EACH_DTYPE
def test_our_kernels_take_packed_panels(dtype: torch.dtype, gated: bool) -> None:
    assert type(chosen(dtype, kernels(), gated=gated)) is PackedMatrix


def test_no_kernels_take_a_plain_weight() -> None:
    for dtype in (FLOAT32, torch.float16):
        weight = chosen(dtype, None)
        assert isinstance(weight, nn.Parameter)
        assert (weight.shape, weight.dtype, weight.requires_grad) == ((64, 40), dtype, False)
    gpu_like = chosen(BFLOAT16, None, device="meta")
    assert isinstance(gpu_like, nn.Parameter)
    assert gpu_like.device.type == "meta"


@needs_onednn
@EACH_GATE
def test_no_kernels_take_a_prepacked_weight_for_bfloat16(gated: bool) -> None:
    assert type(chosen(BFLOAT16, None, gated=gated)) is OnednnMatrix


@needs_onednn
def test_linear_kernels_that_are_switched_off_are_as_if_not_there() -> None:
    off = kernels("linear")
    assert type(chosen(BFLOAT16, off)) is OnednnMatrix
    assert type(chosen(FLOAT32, off)) is nn.Parameter
    assert type(chosen(FLOAT32, off, at_load)) is RoundedMatrix
    assert type(chosen(FLOAT32, kernels("norm", "attention", "head"))) is PackedMatrix


def test_a_dtype_that_the_kernels_do_not_know_is_plain() -> None:
    assert type(chosen(torch.float16, kernels())) is nn.Parameter


@EACH_GATE
@EACH_DTYPE
def test_quantized_weights_are_integers_for_our_kernels(dtype: torch.dtype, gated: bool) -> None:
    assert type(chosen(dtype, kernels(), at_load, gated=gated)) is QuantizedMatrix


@EACH_GATE
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, torch.float16], ids=str)
def test_quantized_weights_are_rounded_floats_without_kernels(dtype: torch.dtype, gated: bool) -> None:
    assert type(chosen(dtype, None, at_load, gated=gated)) is RoundedMatrix


def test_the_format_is_asked_for_parts_and_inputs() -> None:
    asked: list[tuple[dict[str, int], int]] = []

    def note(parts: Mapping[str, int], in_size: int) -> None:
        asked.append((dict(parts), in_size))

    chosen(FLOAT32, None, note)
    assert asked == [({"layers.0.up_proj": 64}, 40)]


def table(own: CpuKernels | None, dtype: torch.dtype, *, multiplied: bool, quantized: bool = False) -> type:
    compute = Compute(dtype=dtype, device=CPU, kernels=own, format_of=at_load)
    parts = {"lm_head": 50} if quantized else {}
    return type(compute.table(parts, 50, 40, multiplied=multiplied))


def test_an_embedding_is_plain_unless_it_is_multiplied_by_our_kernels() -> None:
    for dtype in (FLOAT32, BFLOAT16, torch.float16):  # bfloat16 too: what is prepacked cannot be looked up
        assert table(None, dtype, multiplied=True) is nn.Parameter
    assert table(None, FLOAT32, multiplied=True, quantized=True) is RoundedMatrix


def test_an_embedding_that_is_the_head_is_packed() -> None:
    assert table(kernels(), BFLOAT16, multiplied=True) is PackedMatrix
    assert table(kernels(), BFLOAT16, multiplied=False) is nn.Parameter
    assert table(kernels(), torch.float16, multiplied=True) is nn.Parameter
    assert table(kernels("linear"), BFLOAT16, multiplied=True) is nn.Parameter
    assert table(kernels(), BFLOAT16, multiplied=True, quantized=True) is QuantizedMatrix


def test_a_packed_embedding_gives_zeros_for_ids_that_it_has_not() -> None:
    compute = Compute(dtype=FLOAT32, device=CPU, kernels=kernels())
    rows, embedding = seeded(10, 6), VocabEmbedding(Share.all(10), 6, compute=compute, is_head=True)
    embedding.weight.put(0, rows, PLAIN)
    found = embedding(torch.tensor([0, 3, 4, 9, 3, 2**40, -1]))
    assert torch.equal(found[:-2], rows[[0, 3, 4, 9, 3]])
    assert not found[-2:].any()


@pytest.mark.parametrize("format_of", [never_quantized, at_load])
@EACH_DTYPE
def test_a_weight_that_no_machine_holds_is_refused(dtype: torch.dtype, format_of: FormatOf) -> None:
    for own in (None, kernels()):
        compute = Compute(dtype=dtype, device=CPU, kernels=own, format_of=format_of)
        with pytest.raises(NotEnoughMemoryError):
            compute.weight({"x": 2**30}, 2**30, 2**28)
