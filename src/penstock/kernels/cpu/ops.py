"""The kernels as operations on tensors: run at once, or recorded on a tape, a list of calls to replay.

Layers call these methods in place of torch where a rank has kernels. Each fills an argument struct of
`abi.h`; tensors are rows of contiguous float32 or bfloat16 in host memory. The arithmetic is in `csrc`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.kernels.cpu import abi
from penstock.kernels.cpu.experts import ExpertTables
from penstock.kernels.cpu.tape import Tape

DTYPES = {torch.float32: abi.FLOAT32, torch.bfloat16: abi.BFLOAT16}
PANEL = 32  # outputs of a panel (csrc/panels.h)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The heads of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Turning:
    """The rotation of queries and keys by the angles of their positions.

    Attributes:
        interleaved: the dimensions of a pair are neighbours; else half of the rotated dimensions lie between
            them.
        grows: queries are multiplied by the number that follows the angles of their token.
    """

    interleaved: bool = False
    grows: bool = False


HALVES = Turning()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The way in which the queries of a layer see the keys.

    Attributes:
        scale: factor of the scores.
        soft_cap: a scaled score then becomes cap * tanh(score / cap); 0: there is no cap.
        window: a token sees itself and window - 1 tokens before it; 0: all before it.
        sinks: [num_heads] float32, one more score for each query head, not scaled or capped: it takes part in
            the softmax, and has no value. None: there are none.
    """

    scale: float
    soft_cap: float = 0.0
    window: int = 0
    sinks: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParts:
    """The unfinished results of consecutive segments of every row's context (`csrc/abi.h`), all float32.

    A segment is `abi.SEGMENT_TOKENS` positions, counted from position 0; fewer if the size of blocks is not
    a multiple of 16. Scores are in powers of 2: a score as the softmax takes it, times log2(e). Where a query
    sees nothing of a segment, `largest` is -1e29 and the rest is 0.

    Attributes:
        values: [num_segments, num_tokens, num_heads, value_dim], sums of 2^(score - largest) value.
        largest: [num_segments, num_tokens, num_heads], the largest scores.
        total: [num_segments, num_tokens, num_heads], sums of 2^(score - largest).
    """

    values: Tensor
    largest: Tensor
    total: Tensor

    @classmethod
    def empty(cls, num_segments: int, num_tokens: int, num_heads: int, value_dim: int) -> AttentionParts:
        """Return memory for results, not yet written."""
        sizes = (num_segments, num_tokens, num_heads)
        values = torch.empty(*sizes, value_dim)
        return cls(values=values, largest=torch.empty(sizes), total=torch.empty(sizes))

    @classmethod
    def join(cls, parts: Sequence[AttentionParts]) -> AttentionParts:
        """Return all parts as one; the segments of each follow those of the part before it."""
        return cls(
            values=torch.cat([part.values for part in parts]),
            largest=torch.cat([part.largest for part in parts]),
            total=torch.cat([part.total for part in parts]),
        )

    def struct(self, first_segment: int) -> abi.AttentionParts:
        assert self.values.is_contiguous()
        assert self.largest.is_contiguous()
        assert self.total.is_contiguous()
        return abi.AttentionParts(
            values=self.values.data_ptr(),
            largest=self.largest.data_ptr(),
            total=self.total.data_ptr(),
            first_segment=first_segment,
            end_segment=first_segment + len(self.values),
        )


class CpuKernels:
    """The kernels of one rank.

    Args:
        library: from `library.load`.
        enabled: names of the kernels that may be used (`library.KERNEL_NAMES`).
    """

    def __init__(self, library: ctypes.CDLL, enabled: frozenset[str]) -> None:
        self.library = library
        self.enabled = enabled
        self._tape: Tape | None = None

    def has(self, name: str) -> bool:
        return name in self.enabled

    @contextmanager
    def recording(self, tape: Tape) -> Iterator[None]:
        """Record calls within the context and do not run them; all results have `tape.num_tokens` rows."""
        self._tape = tape
        try:
            yield
        finally:
            self._tape = None

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, out_size: int, gated: int = 0
    ) -> Tensor:
        """Return x W^T + bias; if gated, silu(gate) * up of the two halves of this, or gelu(gate) * up.

        Args:
            x: [num_tokens, in_size].
            weight: packed (`csrc/panels.h`), of the dtype of `x`; `out_size` counts gate and up.
            bias: [out_size].
            gated: 0, `abi.SILU` or `abi.GELU_TANH`.

        Returns:
            [num_tokens, out_size], half as wide if gated.
        """
        assert _has_contiguous_rows(x)
        y = self._output(x, out_size // 2 if gated else out_size)
        args = abi.LinearArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            y=y.data_ptr(),
            y_stride=y.shape[1],
            in_size=x.shape[1],
            out_size=out_size,
            dtype=DTYPES[x.dtype],
            gated=gated,
        )
        self._call("penstock_linear", args, len(x))
        return y

    def head_linear(self, x: Tensor, weight: Tensor, *, out_size: int) -> Tensor:
        """Return x W^T of each head, with a matrix of its own.

        Args:
            x: [num_tokens, num_heads, in_size], the numbers of a head side by side.
            weight: the packed matrices of all heads (`layers.head_matrices`), of the dtype of `x`.

        Returns:
            [num_tokens, num_heads, out_size].
        """
        num_tokens, num_heads, in_size = x.shape
        assert x.stride(2) == 1
        y = self._output(x, num_heads * out_size)
        args = abi.HeadLinearArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_head_stride=x.stride(1),
            weight=weight.data_ptr(),
            y=y.data_ptr(),
            y_stride=y.shape[1],
            y_head_stride=out_size,
            num_heads=num_heads,
            in_size=in_size,
            out_size=out_size,
            dtype=DTYPES[x.dtype],
        )
        self._call("penstock_head_linear", args, num_tokens)
        return y.view(-1, num_heads, out_size)

    def quantized_linear(self, x: Tensor, product: abi.QuantizedLinearArgs, token_bytes: int) -> Tensor:
        """Return the result of `linear` with a quantised weight.

        Args:
            x: [num_tokens, in_size], each row contiguous.
            product: everything about weight and bias; x, y and scratch are filled in here.
            token_bytes: bytes of scratch (`penstock_quantized_sizes`, `penstock_block_token_bytes`).

        Returns:
            [num_tokens, out_size], half as wide if gated.
        """
        assert _has_contiguous_rows(x)
        y = self._output(x, product.out_size // 2 if product.gated else product.out_size)
        scratch = self._scratch(len(x), token_bytes)
        product.x, product.x_stride, product.dtype = x.data_ptr(), x.stride(0), DTYPES[x.dtype]
        product.y, product.y_stride, product.scratch = y.data_ptr(), y.shape[1], scratch.data_ptr()
        self._call("penstock_quantized_linear", product, len(x))
        return y

    def experts(
        self, x: Tensor, logits: Tensor, tables: ExpertTables, choice: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return the sum over each token's chosen experts that this rank has: [num_tokens, hidden_size].

        Args:
            x: [num_tokens, hidden_size].
            logits: [num_tokens, num_experts], and one column more if the shared expert has a gate.
            choice: weights (float32) and numbers of each token's experts, two [num_tokens, num_chosen]; None:
                the kernel chooses them by a softmax of the logits. With a choice the call cannot be recorded,
                and the shared expert must have no gate.
        """
        shape = tables.shape
        is_gated = shape.has_shared and shape.is_shared_gated
        assert x.is_contiguous()
        assert logits.is_contiguous()
        assert logits.shape[1] == shape.num_experts + is_gated
        y, args = self._output(x, x.shape[1]), tables.args()
        scratch = self._scratch(len(x), tables.token_bytes)
        args.x, args.logits = x.data_ptr(), logits.data_ptr()
        args.y, args.scratch = y.data_ptr(), scratch.data_ptr()
        if choice is None:
            assert logits.dtype == x.dtype
        else:
            assert self._tape is None
            assert not is_gated
            weights, chosen = choice[0].contiguous(), choice[1].to(torch.int32).contiguous()
            args.chosen_weights, args.chosen = weights.data_ptr(), chosen.data_ptr()
        self._call("penstock_experts", args, len(x))
        return y

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        selected: Tensor | None = None,
        kind: int = abi.PLAIN_NORM,
    ) -> Tensor:
        """Add x to the residual stream, in place, and return the normalised sum; all [num_tokens, size].

        Args:
            kind: `abi.PLAIN_NORM`, `WIDE_NORM` or `ONE_PLUS_NORM`.
            selected: [num_selected] int64, the tokens to do it for; the result has as many rows.
        """
        assert x.is_contiguous()
        assert residual.is_contiguous()
        y = self._output(x if selected is None else selected, x.shape[1], x.dtype)
        args = abi.NormArgs(
            x=x.data_ptr(),
            residual=residual.data_ptr(),
            weight=weight.data_ptr(),
            y=y.data_ptr(),
            size=x.shape[1],
            eps=eps,
            dtype=DTYPES[x.dtype],
            kind=kind,
        )
        step = abi.Step(num_tokens=len(y), selected=None if selected is None else selected.data_ptr())
        self._call("penstock_add_rms_norm", args, len(y), step)
        return y

    def group_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        kind: int,
        squares: Tensor | None = None,
        squared_size: int = 0,
    ) -> None:
        """Normalise x [num_tokens, n * size] in place, each `size` columns on their own.

        Args:
            weight: [size], the same for every group.
            kind: as for `add_rms_norm`.
            squares: [num_tokens] float32 of any stride: sums of the squares of `squared_size` numbers, to be
                used in place of the groups' own.
        """
        assert _has_contiguous_rows(x)
        args = abi.GroupNormArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=weight.data_ptr(),
            squares=None if squares is None else squares.data_ptr(),
            squares_stride=0 if squares is None else squares.stride(0),
            squared_size=squared_size,
            num_groups=x.shape[1] // len(weight),
            size=len(weight),
            eps=eps,
            dtype=DTYPES[x.dtype],
            kind=kind,
        )
        self._call("penstock_group_norm", args, len(x))

    def sums_of_squares(self, *parts: Tensor) -> Tensor:
        """Return the sum of the squares of each token in each part: [num_tokens, len(parts)] float32.

        Args:
            parts: [num_tokens, any size].
        """
        squares = self._output(parts[0], len(parts), torch.float32)
        for column, x in enumerate(parts):
            assert _has_contiguous_rows(x)
            args = abi.SquaresArgs(
                x=x.data_ptr(),
                x_stride=x.stride(0),
                squares=squares[:, column].data_ptr(),
                squares_stride=squares.stride(0),
                size=x.shape[1],
                dtype=DTYPES[x.dtype],
            )
            self._call("penstock_squares", args, len(x))
        return squares

    def add(self, x: Tensor, residual: Tensor) -> None:
        """Add x to the residual stream, in place; both [num_tokens, size]."""
        assert x.is_contiguous()
        assert residual.is_contiguous()
        args = abi.AddArgs(
            x=x.data_ptr(), residual=residual.data_ptr(), size=x.shape[1], dtype=DTYPES[x.dtype]
        )
        self._call("penstock_add", args, len(x))

    def scale(self, x: Tensor, factor: float) -> None:
        """Multiply x [num_tokens, size] in place."""
        assert x.is_contiguous()
        args = abi.ScaleArgs(x=x.data_ptr(), size=x.shape[1], factor=factor, dtype=DTYPES[x.dtype])
        self._call("penstock_scale", args, len(x))

    def zeros(self, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [num_tokens, width], as many as there are `rows`."""
        y = self._output(rows, width, dtype)
        args = abi.ZeroArgs(y=y.data_ptr(), row_bytes=width * dtype.itemsize)
        self._call("penstock_zero", args, len(rows))
        return y

    def rope_angles(
        self,
        positions: Tensor,
        frequencies: Tensor,
        factor: float,
        rotary_dim: int,
        dtype: torch.dtype,
        growth: tuple[float, int] = (0.0, 0),
    ) -> Tensor:
        """Return cosines, then sines, of positions times frequencies: [num_tokens, rotary_dim] float32.

        Args:
            growth: growth of queries, and the context beyond which they grow. If the growth is not 0, there
                is a column more, the factor of the token's queries.
        """
        angles = self._output(positions, rotary_dim + (growth[0] != 0), torch.float32)
        args = abi.RopeAnglesArgs(
            frequencies=frequencies.data_ptr(),
            angles=angles.data_ptr(),
            rotary_dim=rotary_dim,
            factor=factor,
            dtype=DTYPES[dtype],
            growth=growth[0],
            growth_start=growth[1],
        )
        step = abi.Step(num_tokens=len(positions), positions=positions.data_ptr())
        self._call("penstock_rope_angles", args, len(positions), step)
        return angles

    def rope_store(
        self,
        qkv: Tensor,
        angles: Tensor,
        kv: Tensor,
        shape: HeadShape,
        block_size: int,
        step: abi.Step,
        turning: Turning = HALVES,
    ) -> None:
        """Rotate the queries of `qkv` in place; store keys, rotated, and values in their slots of `kv`.

        Args:
            qkv: [num_tokens, (num_heads + 2 num_kv_heads) head_dim], not rotated.
            angles: as `rope_angles` returns them.
            kv: uint8 [num_blocks * block_bytes], the blocks of a layer.
        """
        args = abi.RopeStoreArgs(
            qkv=qkv.data_ptr(),
            angles=angles.data_ptr(),
            kv=kv.data_ptr(),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=block_size,
            dtype=DTYPES[qkv.dtype],
            rotary_dim=angles.shape[1] - turning.grows,
            interleaved=turning.interleaved,
            grows=turning.grows,
        )
        self._call("penstock_rope_store", args, len(qkv), step)

    def attention(
        self, qkv: Tensor, kv: Tensor, shape: HeadShape, sight: Sight, block_size: int, step: abi.Step
    ) -> Tensor:
        """Return the causal attention of the step's queries: [num_tokens, num_heads * head_dim].

        Args:
            qkv: [num_tokens, (num_heads + 2 num_kv_heads) head_dim] of which the queries are rotated.
            kv: uint8 [num_blocks * block_bytes], where `rope_store` has stored the step's keys and values.
        """
        y = self._output(qkv, shape.query_size)
        args = _attention_args(qkv, kv, shape, sight, block_size)
        args.y = y.data_ptr()
        self._call("penstock_attention", args, len(qkv), step)
        return y

    def attention_parts(
        self,
        qkv: Tensor,
        kv: Tensor,
        shape: HeadShape,
        sight: Sight,
        block_size: int,
        segments: range,
        step: abi.Step,
    ) -> AttentionParts:
        """Return `attention` over some segments of the rows' contexts, unfinished and without sinks.

        Blocks of other segments are not read: their entries in the block tables may be anything.

        Args:
            qkv, kv: as for `attention`, after `rope_store`.
            segments: numbers of segments, counted from position 0 on.

        Returns:
            Parts whose values are [len(segments), num_tokens, num_heads, head_dim].
        """
        assert self._tape is None
        assert segments.step == 1
        parts = AttentionParts.empty(len(segments), len(qkv), shape.num_heads, shape.head_dim)
        struct = parts.struct(segments.start)
        args = _attention_args(qkv, kv, shape, sight, block_size)
        args.parts = ctypes.addressof(struct)
        self._call("penstock_attention", args, len(qkv), step)
        return parts

    def merge_parts(self, parts: AttentionParts, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return [num_tokens, num_heads * value_dim]: bit for bit the result of one call of attention.

        Args:
            parts: all segments that a query sees, ascending. Segments that it does not see change nothing.
            sinks: as `Sight` has them.
            dtype: dtype of the result.
        """
        _, num_tokens, num_heads, value_dim = parts.values.shape
        y, struct = torch.empty(num_tokens, num_heads * value_dim, dtype=dtype), parts.struct(0)
        args = abi.MergePartsArgs(
            parts=ctypes.addressof(struct),
            sinks=None if sinks is None else _sinks_address(sinks, num_heads),
            y=y.data_ptr(),
            num_heads=num_heads,
            value_dim=value_dim,
            dtype=DTYPES[dtype],
        )
        self._call("penstock_merge_parts", args, num_tokens)
        return y

    def latent_attention(
        self,
        qk: Tensor,
        latent: Tensor,
        num_heads: int,
        sight: Sight,
        block_size: int,
        rank: int,
        step: abi.Step,
    ) -> Tensor:
        """Return the attention over latent vectors: [num_tokens, num_heads * rank].

        Args:
            qk: [num_tokens, (num_heads + 1) width], rotated: queries and one key, which is stored already.
            latent: [num_slots, width], of which the first `rank` numbers are the value.
        """
        y = self._output(qk, num_heads * rank)
        shape = HeadShape(num_heads=num_heads, num_kv_heads=1, head_dim=latent.shape[1])
        args = _attention_args(qk, latent, shape, sight, block_size)
        args.y, args.value_dim = y.data_ptr(), rank
        self._call("penstock_attention", args, len(qk), step)
        return y

    def gather(self, ids: Tensor, weight: Tensor, *, in_size: int, out_size: int) -> Tensor:
        """Return rows `ids` of a packed matrix: [num_tokens, in_size].

        An id that the matrix does not have gives zeros.
        """
        y = self._output(ids, in_size, weight.dtype)
        args = abi.GatherArgs(
            weight=weight.data_ptr(),
            y=y.data_ptr(),
            in_size=in_size,
            out_size=out_size,
            dtype=DTYPES[weight.dtype],
        )
        self._call("penstock_gather", args, len(ids), _looking_up(ids))
        return y

    def gather_quantized(self, ids: Tensor, args: abi.QuantizedGatherArgs, dtype: torch.dtype) -> Tensor:
        """Return rows `ids` of a quantised matrix, dequantised: [num_tokens, in_size] of `dtype`.

        Args:
            ids: [num_tokens] int64.
            args: everything but y and its dtype.
        """
        return self._gather_numbers("penstock_gather_quantized", ids, args, dtype)

    def gather_blocks(self, ids: Tensor, args: abi.QuantizedGatherArgs, dtype: torch.dtype) -> Tensor:
        """Return rows `ids` of a matrix in block formats, dequantised: [num_tokens, in_size] of `dtype`.

        Args:
            ids: [num_tokens] int64.
            args: everything but y and its dtype.
        """
        return self._gather_numbers("penstock_gather_blocks", ids, args, dtype)

    def _gather_numbers(
        self, kernel: str, ids: Tensor, args: abi.QuantizedGatherArgs, dtype: torch.dtype
    ) -> Tensor:
        y = self._output(ids, args.in_size, dtype)
        args.y, args.dtype = y.data_ptr(), DTYPES[dtype]
        self._call(kernel, args, len(ids), _looking_up(ids))
        return y

    def all_reduce(self, x: Tensor, group: abi.GroupState) -> None:
        """Replace x [num_tokens, width] by the sum of all ranks' x; errors are left in `group`."""
        assert x.is_contiguous()
        args = abi.AllReduceArgs(
            group=ctypes.addressof(group), x=x.data_ptr(), width=x.shape[1], dtype=DTYPES[x.dtype]
        )
        self._call("penstock_all_reduce", args, len(x))

    def _output(self, rows: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or rows.dtype
        if self._tape is not None:
            return self._tape.output(width, dtype)
        return torch.empty(len(rows), width, dtype=dtype)

    def _scratch(self, num_tokens: int, token_bytes: int) -> Tensor:
        if self._tape is not None:
            return self._tape.output(token_bytes, torch.uint8)
        return torch.empty(num_tokens, token_bytes, dtype=torch.uint8)

    def _call(self, name: str, args: ctypes.Structure, num_tokens: int, step: abi.Step | None = None) -> None:
        kernel = getattr(self.library, name)
        if self._tape is not None:
            address = ctypes.cast(kernel, ctypes.c_void_p).value
            assert address is not None
            self._tape.add(address, args)
            return
        step = step or abi.Step(num_tokens=num_tokens)
        kernel(ctypes.addressof(args), ctypes.addressof(step))


def _attention_args(
    qkv: Tensor, kv: Tensor, shape: HeadShape, sight: Sight, block_size: int
) -> abi.AttentionArgs:
    return abi.AttentionArgs(
        qkv=qkv.data_ptr(),
        kv=kv.data_ptr(),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
        window=sight.window,
        scale=sight.scale,
        soft_cap=sight.soft_cap,
        dtype=DTYPES[qkv.dtype],
        sinks=None if sight.sinks is None else _sinks_address(sight.sinks, shape.num_heads),
    )


def _sinks_address(sinks: Tensor, num_heads: int) -> int:
    assert sinks.dtype == torch.float32
    assert sinks.shape == (num_heads,)
    assert sinks.is_contiguous()
    return sinks.data_ptr()


def _looking_up(ids: Tensor) -> abi.Step:
    return abi.Step(num_tokens=len(ids), input_ids=ids.data_ptr())


def _has_contiguous_rows(x: Tensor) -> bool:
    return x.stride(1) == 1 or x.shape[1] == 1
