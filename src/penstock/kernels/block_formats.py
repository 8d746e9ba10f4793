"""The block formats of GGUF files that our kernels multiply: how each of them stores a weight.

Torch-free. `kernels.block_rows` holds matrices in them, and `weights.gguf_blocks` decodes a file's bytes.
`csrc/blocks.h` has a table of the same formats for the kernels, which adds how panels hold them. Its codebook
has each entry plus 128, so `zero` is 128 there. The source of the formats is ggml's `ggml-common.h`.

A weight is scale x (q - zero) + offset. A record is a run of inputs of one output, as the file stores it. In
a record of 32 inputs scale is the number `d` and offset the number `m`. A record of 256 inputs is divided
into groups: there scale is d x (s - scale_zero) and offset is -m x o, with a whole s and o for each group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict, Unpack

BLOCK_INPUTS = 32
SUPER_BLOCK_INPUTS = 256

# What the 16 values of IQ4_NL and IQ4_XS stand for.
CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """A format of weights in blocks.

    Attributes:
        name: name of the format in GGUF files.
        number: number of the format in GGUF files.
        block_bytes: bytes of a record in the file.
        bits: bits of q.
        inputs: inputs of a record.
        group: inputs that share scale and offset.
        zero: the q that stands for zero.
        scale_zero: the number subtracted from a group's s.
        has_offsets: whether there are m and, in groups, o.
        has_codebook: q is the number of an entry of `CODEBOOK`; `zero` is then 0.
    """

    name: str
    number: int
    block_bytes: int
    bits: int
    inputs: int
    group: int
    zero: int = 0
    scale_zero: int = 0
    has_offsets: bool = False
    has_codebook: bool = False

    @property
    def groups(self) -> int:
        """The number of groups of a record."""
        return self.inputs // self.group

    def row_bytes(self, in_size: int) -> int:
        """Return the bytes of an output's `in_size` inputs in the file."""
        return in_size // self.inputs * self.block_bytes


class _Others(TypedDict, total=False):
    zero: int
    scale_zero: int
    has_offsets: bool
    has_codebook: bool


def _block(name: str, number: int, block_bytes: int, bits: int, **others: Unpack[_Others]) -> BlockFormat:
    return BlockFormat(
        name=name,
        number=number,
        block_bytes=block_bytes,
        bits=bits,
        inputs=BLOCK_INPUTS,
        group=BLOCK_INPUTS,
        **others,
    )


def _super_block(
    name: str, number: int, block_bytes: int, bits: int, group: int, **others: Unpack[_Others]
) -> BlockFormat:
    return BlockFormat(
        name=name,
        number=number,
        block_bytes=block_bytes,
        bits=bits,
        inputs=SUPER_BLOCK_INPUTS,
        group=group,
        **others,
    )


BLOCK_FORMATS = {
    block.name: block
    for block in (
        _block("Q4_0", 2, 18, 4, zero=8),
        _block("Q4_1", 3, 20, 4, has_offsets=True),
        _block("Q5_0", 6, 22, 5, zero=16),
        _block("Q5_1", 7, 24, 5, has_offsets=True),
        _block("Q8_0", 8, 34, 8, zero=128),
        _super_block("Q2_K", 10, 84, 2, 16, has_offsets=True),
        _super_block("Q3_K", 11, 110, 3, 16, zero=4, scale_zero=32),
        _super_block("Q4_K", 12, 144, 4, 32, has_offsets=True),
        _super_block("Q5_K", 13, 176, 5, 32, has_offsets=True),
        _super_block("Q6_K", 14, 210, 6, 16, zero=32, scale_zero=128),
        _block("IQ4_NL", 20, 18, 4, has_codebook=True),
        _super_block("IQ4_XS", 23, 136, 4, 32, scale_zero=32, has_codebook=True),
    )
}
