"""The projections of latent vectors to keys and values, head by head, packed for our kernels.

Queries are multiplied by the projection to keys, and the results of attention by the one to values
(`models.latent_attention`). So two matrices are packed for each head: the projection to keys, transposed, and
the projection to values as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.kernels.cpu.ops import DTYPES, CpuKernels
from penstock.layers.matrix import PLAIN, padded_columns


class HeadMatrices(nn.Module):
    """The rows of all heads, [num_heads * (key_size + value_size), rank].

    Implements `weights.mapping.RowSink`.

    Args:
        key_size, value_size: rows of a head that make its key and its value.
    """

    def __init__(
        self,
        num_heads: int,
        key_size: int,
        value_size: int,
        rank: int,
        dtype: torch.dtype,
        kernels: CpuKernels,
    ) -> None:
        super().__init__()
        self._shape, self._rank, self._kernels = (num_heads, key_size, value_size), rank, kernels
        self.out_size, self.in_size, self.dtype = num_heads * (key_size + value_size), rank, dtype
        self._rows: Tensor | None = torch.empty(self.out_size, rank, dtype=dtype)
        self._to_latent = self._empty(rank, key_size)
        self._to_value = self._empty(value_size, rank)

    @property
    def nbytes(self) -> int:
        return self._to_latent.nbytes + self._to_value.nbytes

    def put(self, first_row: int, rows: Tensor, role: int) -> None:
        """Put rows [first_row, first_row + n) of the rows of all heads: [n, rank]; `role` is `PLAIN`."""
        assert role == PLAIN
        assert self._rows is not None, "the matrices are finished"
        self._rows[first_row : first_row + len(rows)] = rows

    def finish(self) -> None:
        """Pack all rows, and drop the plain ones, so that memory holds one copy."""
        assert self._rows is not None, "the matrices are finished"
        num_heads, key_size, value_size = self._shape
        heads = self._rows.view(num_heads, key_size + value_size, self._rank)
        for rows, to_latent, to_value in zip(heads, self._to_latent, self._to_value, strict=True):
            self._pack(rows[:key_size].T, to_latent)
            self._pack(rows[key_size:], to_value)
        self._rows = None

    def absorb(self, query: Tensor) -> Tensor:
        """Project queries: [num_tokens, num_heads, key_size] -> [num_tokens, num_heads, rank]."""
        return self._kernels.head_linear(query, self._to_latent, out_size=self._rank)

    def values(self, attended: Tensor) -> Tensor:
        """Project results: [num_tokens, num_heads, rank] -> [num_tokens, num_heads, value_size]."""
        return self._kernels.head_linear(attended, self._to_value, out_size=self._shape[2])

    def _empty(self, out_size: int, in_size: int) -> Tensor:
        """Return packed matrices of all heads, one behind the other, of zeros (csrc/panels.h)."""
        together = 2 if self.dtype == torch.bfloat16 else 1
        size = padded_columns(out_size, gated=False) * (-(-in_size // together) * together)
        return torch.zeros(self._shape[0], size, dtype=self.dtype)

    def _pack(self, rows: Tensor, packed: Tensor) -> None:
        rows = rows.contiguous()
        out_size, in_size = rows.shape
        self._kernels.library.penstock_pack(
            rows.data_ptr(), packed.data_ptr(), 0, out_size, in_size, PLAIN, DTYPES[self.dtype]
        )
