"""The types that a tensor of a GGUF file can have, and the bytes that its values take.

A type stores values in blocks: `block_values` neighbours of a row share `block_bytes` bytes. The numbers and
sizes are those of ggml. Which of the types can be computed with is not decided here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufType:
    """One way to store values."""

    number: int  # as files say it
    name: str  # as ggml spells it, such as "Q4_K"
    block_values: int
    block_bytes: int

    def num_bytes(self, num_values: int) -> int:
        """Return the bytes of this many values, which are whole blocks."""
        return num_values // self.block_values * self.block_bytes


_TABLE = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)

TYPES = {
    number: GgufType(number=number, name=name, block_values=values, block_bytes=size)
    for number, name, values, size in _TABLE
}

# Types of blocks that the package `gguf` decodes, which has their tables; our kernels do not multiply them.
PACKAGE_TYPES = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
)

# Numbers of types that ggml has removed, with the words for the error: the type, and what to use instead.
WITHDRAWN = {
    4: "Q4_2, which ggml has removed",
    5: "Q4_3, which ggml has removed",
    31: "Q4_0_4_4, which ggml has removed: use Q4_0",
    32: "Q4_0_4_8, which ggml has removed: use Q4_0",
    33: "Q4_0_8_8, which ggml has removed: use Q4_0",
    36: "IQ4_NL_4_4, which ggml has removed: use IQ4_NL",
    37: "IQ4_NL_4_8, which ggml has removed: use IQ4_NL",
    38: "IQ4_NL_8_8, which ggml has removed: use IQ4_NL",
}
