"""Decodes the blocks of a GGUF file into values, scales and offsets (`kernels.block_rows`).

The layouts are ggml's (`ggml-common.h`); each function here takes the blocks of one format, uint8 [blocks,
block_bytes], and returns their parts. Called by the loader for pieces that fit a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.block_formats import BlockFormat
from penstock.kernels.block_rows import BlockRows


class _Parts(NamedTuple):
    """The parts of blocks; those that a format does not have are None. q is uint8 [blocks, inputs]."""

    q: Tensor
    d: Tensor  # uint8 [blocks, 2], a float16
    m: Tensor | None = None
    scales: Tensor | None = None  # uint8 [blocks, groups]
    offsets: Tensor | None = None


def decode_rows(block_format: BlockFormat, raw: Tensor, in_size: int) -> BlockRows:
    """Take the rows of a matrix apart.

    Args:
        raw: uint8 [n, bytes of a row], as the file has them.
        in_size: a multiple of the format's inputs.
    """
    assert in_size % block_format.inputs == 0, (in_size, block_format.name)
    n = len(raw)
    parts = _DECODERS[block_format.name](raw.reshape(-1, block_format.block_bytes))

    def by_row(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.reshape(n, -1)

    return BlockRows(
        format=block_format,
        q=parts.q.reshape(n, in_size),
        d=_float16(parts.d).reshape(n, -1),
        m=None if parts.m is None else _float16(parts.m).reshape(n, -1),
        scales=by_row(parts.scales),
        offsets=by_row(parts.offsets),
    )


def _float16(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.float16)


def _halves(packed: Tensor) -> Tensor:
    """Turn [..., n] bytes into [..., 2 n]: their low halves, then their high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor, count: int) -> Tensor:
    """Turn [..., n] bytes into [..., 8 / count, n]: their lowest bits, then the next."""
    shifts = torch.arange(0, 8, count, dtype=torch.uint8)
    return packed.unsqueeze(-2) >> shifts.unsqueeze(-1) & ((1 << count) - 1)


def _q4_0(blocks: Tensor) -> _Parts:
    return _Parts(_halves(blocks[:, 2:]), blocks[:, :2])


def _q4_1(blocks: Tensor) -> _Parts:
    return _Parts(_halves(blocks[:, 4:]), blocks[:, :2], blocks[:, 2:4])


# By byte: its bits from the lowest on, each where a fifth bit belongs.
_FIFTH_BITS = (torch.arange(256)[:, None] >> torch.arange(8) & 1).to(torch.uint8) << 4


def _fifth_bits(packed: Tensor) -> Tensor:
    """Turn [blocks, 4] into [blocks, 32]: bit i of the word, where it belongs in q."""
    return _FIFTH_BITS[packed.int()].reshape(len(packed), 32)


def _q5_0(blocks: Tensor) -> _Parts:
    return _Parts(_halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), blocks[:, :2])


def _q5_1(blocks: Tensor) -> _Parts:
    q = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _Parts(q, blocks[:, :2], blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> _Parts:
    return _Parts(blocks[:, 2:] ^ 128, blocks[:, :2])


def _two_bits(packed: Tensor) -> Tensor:
    """Turn [blocks, 64] into [blocks, 256]: in each half of a block 32 bytes hold four runs of 32 inputs."""
    return _bits(packed.view(-1, 2, 32), 2).reshape(len(packed), 256)


def _q2_k(blocks: Tensor) -> _Parts:
    both = blocks[:, :16]
    q = _two_bits(blocks[:, 16:80].contiguous())
    return _Parts(q, blocks[:, 80:82], blocks[:, 82:84], both & 15, both >> 4)


def _q3_k(blocks: Tensor) -> _Parts:
    third = _bits(blocks[:, :32], 1).reshape(len(blocks), 256)
    q = _two_bits(blocks[:, 32:96].contiguous()) | third << 2
    low, high = _halves(blocks[:, 96:104]), _bits(blocks[:, 104:108], 2).reshape(len(blocks), 16)
    return _Parts(q, blocks[:, 108:110], scales=low | high << 4)


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Turn [blocks, 12] into the scales and the offsets of eight groups, six bits each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    offsets = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return scales, offsets


def _runs_of_halves(packed: Tensor) -> Tensor:
    """Turn [blocks, 128] into [blocks, 256]: 32 bytes hold two runs of 32 inputs."""
    return _halves(packed.view(-1, 4, 32)).reshape(len(packed), 256)


def _q4_k(blocks: Tensor) -> _Parts:
    scales, offsets = _six_bit_pairs(blocks[:, 4:16])
    return _Parts(
        _runs_of_halves(blocks[:, 16:].contiguous()), blocks[:, :2], blocks[:, 2:4], scales, offsets
    )


def _q5_k(blocks: Tensor) -> _Parts:
    scales, offsets = _six_bit_pairs(blocks[:, 4:16])
    fifth = _bits(blocks[:, 16:48], 1).reshape(len(blocks), 256)
    q = _runs_of_halves(blocks[:, 48:].contiguous()) | fifth << 4
    return _Parts(q, blocks[:, :2], blocks[:, 2:4], scales, offsets)


def _q6_k(blocks: Tensor) -> _Parts:
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(len(blocks), 256)
    high = _two_bits(blocks[:, 128:192].contiguous())
    return _Parts(low | high << 4, blocks[:, 208:210], scales=blocks[:, 192:208] ^ 128)


def _iq4_xs(blocks: Tensor) -> _Parts:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).reshape(len(blocks), 8)
    high = _bits(blocks[:, 2:4], 2).transpose(-1, -2).reshape(len(blocks), 8)
    q = _halves(blocks[:, 8:].reshape(-1, 8, 16)).reshape(len(blocks), 256)
    return _Parts(q, blocks[:, :2], scales=low | high << 4)


_DECODERS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
}
