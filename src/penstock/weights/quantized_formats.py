"""Reads quantised projections of a checkpoint: GPTQ, AWQ and the integer layouts of compressed-tensors.

Called by `weights.loader` for projections that the checkpoint holds quantised; all other tensors, biases too,
are ordinary ones. Every layout ends as `QuantizedRows`: unsigned values, and a scale and a zero per output
row and group, w = scale x (q - zero). Shapes and dtypes are checked against `config.json` before data is
read.

What a projection of [out, in] is made of, with n = 32 / bits values in a 32-bit word, the first in the lowest
bits, and g groups of input columns:

    gptq    qweight I32 [in/n, out]    qzeros I32 [g, out/n]   scales [g, out]         g_idx I32 [in]
    awq     qweight I32 [in, out/n]    qzeros I32 [g, out/n]   scales [g, out]
    packed  weight_packed I32 [out, in/n]   weight_zero_point I32 [out/n, g] or I8 [out, g]
            weight_scale [out, g]      weight_g_idx I32 [in]   weight_shape I64 [2]
    int8    weight I8 [out, in]        weight_zero_point I8 [out, g]   weight_scale [out, g]

In `awq` a word holds the columns 0 2 4 6 1 3 5 7 of its eight. GPTQ's first version stores its zeros less
one. `packed` stores values and zeros plus 2^(bits-1); `int8` and an I8 zero are signed. g_idx is the group of
each column: a checkpoint quantised in the order of activations scatters the columns of a group, and such a
projection can only be held dequantised (`is_dense`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.families.quantization_spec import QuantizationSpec, WeightScheme
from penstock.kernels.quantized_rows import QuantizedRows
from penstock.weights.checkpoint import Checkpoint, TensorEntry
from penstock.weights.tensor_bytes import TORCH_DTYPES, read_rows, read_tensor

PIECE_VALUES = 4 << 20  # unpacked values of a piece, about
PIECE_ROWS = 32  # pieces begin at multiples of it, like the panels of the kernels
GROUP_MULTIPLE = 8  # columns; the kernels take no group of another size

_SUFFIXES = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "packed": ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx", "weight_shape"),
    "int8": ("weight", "weight_zero_point", "weight_scale"),
}
_MARKS = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed", "int8": "weight_scale"}
_FLOATS = ("F16", "BF16", "F32")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projection:
    """A quantised projection, its shapes checked."""

    name: str
    scheme: WeightScheme
    out_size: int
    in_size: int

    @property
    def num_groups(self) -> int:
        return self.scheme.num_groups(self.in_size)

    @property
    def group_size(self) -> int:
        """The number of columns that share a scale; no more than there are."""
        return min(self.scheme.group_size or self.in_size, self.in_size)

    @property
    def values_per_word(self) -> int:
        return 32 // self.scheme.bits

    def words(self, num_values: int) -> int:
        """Return how many 32-bit words so many values take."""
        return -(-num_values // self.values_per_word)


class QuantizedCheckpoint:
    """The quantised projections of a checkpoint, by names such as `model.layers.0.self_attn.q_proj`.

    A projection that `config.json` calls quantised, but that the checkpoint holds as ordinary numbers, counts
    as not quantised. All methods raise `CheckpointError`, which names file, tensor, expected and found.
    """

    def __init__(self, checkpoint: Checkpoint, spec: QuantizationSpec) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._names = checkpoint.names

    def holds(self, projection: str) -> bool:
        """Return whether the checkpoint holds this projection quantised."""
        scheme = self._spec.scheme(projection)
        if scheme is not None:
            return f"{projection}.{_MARKS[scheme.layout]}" in self._names
        for mark in dict.fromkeys(_MARKS[scheme.layout] for scheme in self._spec.schemes):
            if f"{projection}.{mark}" in self._names:
                entry = self._checkpoint.entry(f"{projection}.{mark}")
                description = f"{entry.dtype} of {list(entry.shape)}"
                raise self._surprise(entry.name, "no such tensor by quantization_config", description)
        return False

    def scheme(self, projection: str) -> WeightScheme:
        """Return the bits and groups of a projection that is held quantised."""
        scheme = self._spec.scheme(projection)
        assert scheme is not None, f"{projection} is not quantised"
        return scheme

    def scale_dtype(self, projection: str) -> torch.dtype:
        """Return the dtype of the projection's scales as the checkpoint has them."""
        by_column = self.scheme(projection).layout in ("gptq", "awq")
        entry = self._checkpoint.entry(f"{projection}.{'scales' if by_column else 'weight_scale'}")
        if entry.dtype not in _FLOATS:
            raise self._surprise(entry.name, f"a dtype of {', '.join(_FLOATS)}", entry.dtype)
        return TORCH_DTYPES[entry.dtype]

    def tensor_names(self, projection: str) -> list[str]:
        """Return the names of the projection's tensors; its bias only if it is all zeros.

        Writers of GPTQ give every projection a bias, also in models that have none.
        """
        suffixes = _SUFFIXES[self.scheme(projection).layout]
        names = [name for suffix in suffixes if (name := f"{projection}.{suffix}") in self._names]
        bias = f"{projection}.bias"
        if bias in self._names and self._is_zero(self._checkpoint.entry(bias)):
            names.append(bias)
        return names

    def num_bytes(self, projection: str) -> int:
        """Return the bytes of the projection's tensors in the checkpoint, its bias not counted."""
        suffixes = _SUFFIXES[self.scheme(projection).layout]
        entries = [self._optional(projection, suffix) for suffix in suffixes]
        return sum(entry.end - entry.begin for entry in entries if entry is not None)

    def is_dense(self, projection: str, out_size: int, in_size: int) -> bool:
        """Return whether it cannot be `QuantizedRows`: groups are scattered, or of an odd size."""
        part = self._checked(projection, out_size, in_size)
        if part.num_groups == 1:
            return False
        return part.group_size % GROUP_MULTIPLE != 0 or self._group_of_columns(part) is not None

    def rows(self, projection: str, out_size: int, in_size: int) -> Iterator[tuple[int, QuantizedRows]]:
        """Yield the projection in pieces of bounded size: (number of the first row, rows), from row 0 on.

        `zeros` is None for a symmetric scheme and never for another; a scheme per channel has one group of
        `in_size` columns. Not for projections that `is_dense` says must be dequantised.
        """
        assert not self.is_dense(projection, out_size, in_size), f"{projection} must be dequantised"
        part = self._checked(projection, out_size, in_size)
        scales, zeros = self._scales(part), self._zeros(part)
        for first, last, values in self._pieces(part):
            yield (
                first,
                QuantizedRows(
                    q=values,
                    scales=scales[first:last],
                    zeros=None if zeros is None else zeros[first:last],
                    group_size=part.group_size,
                    bits=part.scheme.bits,
                ),
            )

    def dense_rows(
        self, projection: str, out_size: int, in_size: int, dtype: torch.dtype
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield any projection dequantised: (number of the first row, [n, in] of `dtype`)."""
        part = self._checked(projection, out_size, in_size)
        scales, zeros, groups = self._scales(part), self._zeros(part), self._group_of_columns(part)
        if groups is None:
            groups = torch.arange(in_size) // part.group_size
        for first, last, values in self._pieces(part):
            shifted = values.to(torch.float32)
            if zeros is None:
                shifted -= part.scheme.middle
            else:
                shifted -= zeros[first:last].to(torch.float32)[:, groups]
            dense = shifted.mul_(scales[first:last].to(torch.float32)[:, groups]).to(dtype)
            self._check_representable(part, dense)
            yield first, dense

    # --- Shapes, before anything is read -------------------------------------------------------------

    def _checked(self, projection: str, out_size: int, in_size: int) -> _Projection:
        part = _Projection(
            name=projection, scheme=self.scheme(projection), out_size=out_size, in_size=in_size
        )
        if part.scheme.layout in ("gptq", "awq"):
            self._check_words_by_column(part)
        else:
            self._check_rows(part)
        return part

    def _check_words_by_column(self, part: _Projection) -> None:
        """Check the shapes of GPTQ and AWQ: output rows are columns."""
        words = (part.words(part.in_size), part.out_size)
        if part.scheme.layout == "awq":
            words = (part.in_size, part.words(part.out_size))
        self._expect(part, "qweight", ("I32",), words)
        self._expect(part, "scales", _FLOATS, (part.num_groups, part.out_size))
        shape = (part.num_groups, part.words(part.out_size))
        self._expect(part, "qzeros", ("I32",), shape, required=not part.scheme.symmetric)
        if part.scheme.layout == "gptq":
            self._expect(part, "g_idx", ("I32",), (part.in_size,), required=False)

    def _check_rows(self, part: _Projection) -> None:
        """Check the shapes of compressed-tensors: output rows are rows."""
        scales = (part.out_size, part.num_groups)
        self._expect(part, "weight_scale", _FLOATS, scales, (part.out_size,))
        if part.scheme.layout == "int8":
            self._expect(part, "weight", ("I8",), (part.out_size, part.in_size))
            self._expect(part, "weight_zero_point", ("I8",), scales, (part.out_size,), required=False)
            return
        self._expect(part, "weight_packed", ("I32",), (part.out_size, part.words(part.in_size)))
        self._expect(part, "weight_g_idx", ("I32",), (part.in_size,), required=False)
        self._check_weight_shape(part)
        zeros = self._optional(part.name, "weight_zero_point")
        if zeros is not None and zeros.dtype == "I32":
            packed = (part.words(part.out_size), part.num_groups)
            self._expect(part, "weight_zero_point", ("I32",), packed)
        else:
            self._expect(part, "weight_zero_point", ("I8", "I32"), scales, (part.out_size,), required=False)

    def _expect(
        self,
        part: _Projection,
        suffix: str,
        dtypes: Sequence[str],
        shape: tuple[int, ...],
        alternative: tuple[int, ...] | None = None,
        *,
        required: bool = True,
    ) -> None:
        """Raise unless the tensor is as it must be. `alternative` is allowed where there is one group."""
        entry = self._optional(part.name, suffix)
        if entry is None and not required:
            return
        if entry is None:
            entry = self._checkpoint.entry(f"{part.name}.{suffix}")  # says that it is missing
        if entry.dtype not in dtypes:
            raise self._surprise(entry.name, f"a dtype of {', '.join(dtypes)}", entry.dtype)
        if entry.shape != shape and not (entry.shape == alternative and part.num_groups == 1):
            raise self._surprise(
                entry.name,
                f"shape {list(shape)} by config.json ({part.scheme.describe()})",
                f"{list(entry.shape)}",
            )

    def _check_weight_shape(self, part: _Projection) -> None:
        self._expect(part, "weight_shape", ("I64", "I32"), (2,), required=False)
        entry = self._optional(part.name, "weight_shape")
        if entry is None:
            return
        stored_shape = self._read(entry).tolist()
        if stored_shape != [part.out_size, part.in_size]:
            raise self._surprise(
                entry.name, f"{[part.out_size, part.in_size]} by config.json", _shortened(str(stored_shape))
            )

    # --- Scales, zeros and the order of the columns, whole ----------------------------------------------

    def _scales(self, part: _Projection) -> Tensor:
        """Return the scales, [out, groups], in their stored dtype; raise unless finite and above zero."""
        by_column = part.scheme.layout in ("gptq", "awq")
        entry = self._checkpoint.entry(f"{part.name}.{'scales' if by_column else 'weight_scale'}")
        scales = self._read(entry)
        good = torch.isfinite(scales) & (scales > 0)
        if not bool(good.all()):
            bad = int(good.view(-1).logical_not().nonzero()[0])
            description = f"{scales.view(-1)[bad].item()} at element {bad}"
            raise self._surprise(entry.name, "finite scales above zero", description)
        return scales.t().contiguous() if by_column else scales.view(part.out_size, part.num_groups)

    def _zeros(self, part: _Projection) -> Tensor | None:
        """Return the zeros [out, groups] in uint8; None where the scheme is symmetric, which is checked."""
        by_column = part.scheme.layout in ("gptq", "awq")
        entry = self._optional(part.name, "qzeros" if by_column else "weight_zero_point")
        if entry is None and part.scheme.symmetric:
            return None
        if entry is None:  # left out by the writer where all of them are zero
            size = (part.out_size, part.num_groups)
            return torch.full(size, part.scheme.middle, dtype=torch.uint8)
        stored = self._read(entry)
        zeros = _zeros_by_column(part, stored) if by_column else _zeros_by_row(part, stored)
        if not part.scheme.symmetric:
            return zeros
        if not bool((zeros == part.scheme.middle).all()):
            expected = f"zero points of {part.scheme.middle}, because the scheme is symmetric"
            raise self._surprise(entry.name, expected, f"{zeros.min().item()} to {zeros.max().item()}")
        return None

    def _group_of_columns(self, part: _Projection) -> Tensor | None:
        """Return the group of each column, int64 [in]; None where groups are runs of columns."""
        entry = self._optional(part.name, "g_idx") or self._optional(part.name, "weight_g_idx")
        if entry is None or part.scheme.layout in ("awq", "int8") or part.num_groups == 1:
            return None
        groups = self._read(entry).to(torch.int64)
        low, high = int(groups.min()), int(groups.max())
        if low == high and low in (0, -1):  # written, but never set
            return None
        if low < 0 or high >= part.num_groups:
            raise self._surprise(entry.name, f"groups from 0 to {part.num_groups - 1}", f"{low} to {high}")
        in_order = torch.arange(part.in_size) // part.group_size
        return None if torch.equal(groups, in_order) else groups

    # --- Values, piece by piece -------------------------------------------------------------------------

    def _pieces(self, part: _Projection) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (first row, last row + 1, uint8 [n, in]) from row 0 on."""
        unpack = self._unpacker(part)
        step = max(PIECE_ROWS, PIECE_VALUES // part.in_size // PIECE_ROWS * PIECE_ROWS)
        for first in range(0, part.out_size, step):
            last = min(first + step, part.out_size)
            yield first, last, unpack(first, last)

    def _unpacker(self, part: _Projection) -> Callable[[int, int], Tensor]:
        """Return what gives values of rows `[first, last)`. Words by column are read once."""
        layout, bits = part.scheme.layout, part.scheme.bits
        mark = "weight" if layout == "int8" else _MARKS[layout]
        entry = self._checkpoint.entry(f"{part.name}.{mark}")
        digests = self._checkpoint.digests
        if layout == "int8":
            return lambda first, last: _shifted(read_rows(entry, first, last, digests))
        if layout == "packed":
            return lambda first, last: _unpacked(read_rows(entry, first, last, digests), bits, part.in_size)
        words = self._read(entry)
        if layout == "gptq":
            return lambda first, last: _unpacked(_transposed(words[:, first:last]), bits, part.in_size)
        return lambda first, last: _awq_columns(words, first, last)

    # --- Small things -----------------------------------------------------------------------------------

    def _read(self, entry: TensorEntry) -> Tensor:
        return read_tensor(entry, self._checkpoint.digests)

    def _optional(self, projection: str, suffix: str) -> TensorEntry | None:
        name = f"{projection}.{suffix}"
        return self._checkpoint.entry(name) if name in self._names else None

    def _is_zero(self, entry: TensorEntry) -> bool:
        return entry.dtype in _FLOATS and len(entry.shape) == 1 and not bool(self._read(entry).any())

    def _check_representable(self, part: _Projection, dense: Tensor) -> None:
        low, high = dense.aminmax()
        if not bool(torch.isfinite(low) and torch.isfinite(high)):
            dtype = str(dense.dtype).removeprefix("torch.")
            mark = f"{part.name}.{_MARKS[part.scheme.layout]}"
            raise self._surprise(mark, f"numbers within the range of {dtype}", "a larger one")

    def _surprise(self, tensor: str, expected: str, found: str) -> CheckpointError:
        entry = self._checkpoint.entry(tensor)
        return CheckpointError(
            file=entry.path.name,
            tensor=tensor,
            expected=expected,
            found=found,
            remedy="config.json and the weights belong to different models, or the file is damaged.",
        )


def _zeros_by_column(part: _Projection, words: Tensor) -> Tensor:
    """Turn the qzeros of GPTQ or AWQ, [groups, out/n], into uint8 [out, groups].

    A zero that is stored less one wraps: 0 was stored as 15.
    """
    if part.scheme.layout == "awq":
        return _awq_columns(words, 0, part.out_size)
    values = _unpacked(words, part.scheme.bits, part.out_size)
    return ((values + part.scheme.zero_offset) & ((1 << part.scheme.bits) - 1)).t().contiguous()


def _zeros_by_row(part: _Projection, stored: Tensor) -> Tensor:
    """Turn weight_zero_point, signed [out, groups] or packed [out/n, groups], into uint8 [out, groups]."""
    if stored.dtype == torch.int32:
        return _unpacked(stored.t(), part.scheme.bits, part.out_size).t().contiguous()
    shifted = (stored.to(torch.int16) + part.scheme.middle).to(torch.uint8)
    return shifted.view(part.out_size, part.num_groups)


def _unpacked(words: Tensor, bits: int, size: int) -> Tensor:
    """Turn int32 [rows, words] into uint8 [rows, size], lowest bits first; the rest of a word is dropped."""
    flat = words.contiguous().view(-1)  # flat, for one word a row may have any stride and still be contiguous
    in_bytes = flat.view(torch.uint8).view(len(words), -1)  # little-endian, as everything that we run on
    if bits == 4:
        values = in_bytes.new_empty(in_bytes.shape[0], in_bytes.shape[1], 2)
        torch.bitwise_and(in_bytes, 15, out=values[:, :, 0])
        torch.bitwise_right_shift(in_bytes, 4, out=values[:, :, 1])
        in_bytes = values.view(in_bytes.shape[0], -1)
    return in_bytes[:, :size].contiguous()


def _awq_columns(words: Tensor, first: int, last: int) -> Tensor:
    """Return columns of int32 [rows, words] as uint8 [last - first, rows]; `first` is a multiple of 8."""
    chosen = _transposed(words[:, first // 8 : -(-last // 8)])
    in_bytes = chosen.view(-1).view(torch.uint8).view(*chosen.shape, 4)
    columns = in_bytes.new_empty(chosen.shape[0], 8, chosen.shape[1])
    for nibble, column in enumerate(_AWQ_ORDER):
        if nibble % 2:
            torch.bitwise_right_shift(in_bytes[:, :, nibble // 2], 4, out=columns[:, column])
        else:
            torch.bitwise_and(in_bytes[:, :, nibble // 2], 15, out=columns[:, column])
    return columns.view(-1, chosen.shape[1])[: last - first]


def _transposed(words: Tensor) -> Tensor:
    """Return the transpose in its own memory. Two copies are faster than one: the second goes by blocks."""
    return words.contiguous().t().contiguous()


def _shifted(signed: Tensor) -> Tensor:
    """Turn int8 into uint8, 128 more: the sign bit is inverted."""
    return signed.view(torch.uint8) ^ 128


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
