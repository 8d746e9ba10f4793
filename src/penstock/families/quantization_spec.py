"""The quantisation of a checkpoint's weights, as frozen values: which projections, bits and layout.

`families.quantization_fields` reads these values from `config.json`. `weights.quantized_formats` reads
tensors by them, and estimates of memory ask for bits. Torch-free. Knows no tensor and checks nothing:
patterns come here only after `quantization_fields` has found them harmless.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.kernels.block_formats import BLOCK_FORMATS
from penstock.kernels.quantized_groups import inputs_together

Layout = Literal["gptq", "awq", "packed", "int8"]

LINEAR = "Linear"  # a target that means every projection
PATTERN_PREFIX = "re:"


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """A text that names modules as in compressed-tensors: a name, `re:` with an expression, or `Linear`."""

    text: str

    def rank(self, name: str) -> int | None:
        """Return how closely the text names a module: 0 by name, 1 by expression, 2 by class; None: not."""
        if self.text == name:
            return 0
        if self.text.startswith(PATTERN_PREFIX):
            return 1 if re.match(self.text[len(PATTERN_PREFIX) :], name) else None
        return 2 if self.text == LINEAR else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """The storage of some projections' weights: w = scale x (q - zero) with q of `bits` bits, unsigned.

    Attributes:
        layout: `gptq`, `awq`; of compressed-tensors `packed` (in 32-bit words) or `int8` (one byte each).
        bits: 4 or 8.
        group_size: input columns that share a scale; None: one scale for a whole output row.
        symmetric: zero is 2^(bits-1) everywhere.
        zero_offset: what must be added to stored zeros: 1 in the first version of GPTQ's layout, else 0.
        targets: the projections that the scheme is for. If several schemes name a projection, the one whose
            pattern is closest counts.
    """

    layout: Layout
    bits: int
    group_size: int | None
    symmetric: bool
    zero_offset: int = 0
    targets: tuple[ModulePattern, ...] = (ModulePattern(LINEAR),)

    @property
    def middle(self) -> int:
        """The zero of a symmetric scheme: 8 or 128."""
        return 1 << (self.bits - 1)

    def num_groups(self, in_size: int) -> int:
        """Return the number of scales of one output row; the last group may be a short one."""
        return 1 if self.group_size is None else -(-in_size // self.group_size)

    def describe(self) -> str:
        """Return text such as "int4 in groups of 128"."""
        share = "per channel" if self.group_size is None else f"in groups of {self.group_size}"
        return f"int{self.bits} {share}{'' if self.symmetric else ', with zero points'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec:
    """The content of `quantization_config`.

    Attributes:
        method: "compressed-tensors", "gptq" or "awq".
        schemes: at least one.
        ignore: projections that are not quantised, whatever the schemes name.
    """

    method: str
    schemes: tuple[WeightScheme, ...]
    ignore: tuple[ModulePattern, ...] = ()

    @property
    def kind(self) -> Literal["int4", "int8", "mixed"]:
        """Return the number format of all quantised weights, or "mixed"."""
        bit_widths = {scheme.bits for scheme in self.schemes}
        if len(bit_widths) > 1:
            return "mixed"
        return "int4" if bit_widths == {4} else "int8"

    @property
    def mean_bits(self) -> float:
        """Return a lower bound of the mean bits of a quantised weight: the fewest that a scheme has."""
        return min(scheme.bits for scheme in self.schemes)

    def inputs_of_unit(self, projection: str, width: int) -> int | None:
        """Return at which multiples the inputs of a projection can be cut for ranks; None: at any.

        Args:
            projection: name of the projection. One that is not quantised can be cut anywhere.
            width: number of all its inputs.
        """
        scheme = self.scheme(projection)
        return None if scheme is None else inputs_together(scheme.group_size or width, width)

    def scheme(self, projection: str) -> WeightScheme | None:
        """Return the scheme of a projection such as `model.layers.0.mlp.up_proj`, or None if not quantised.

        As in compressed-tensors, a name counts more than an expression, and an expression more than a class.
        Of schemes that count equally, the first is taken.
        """
        if any(pattern.rank(projection) is not None for pattern in self.ignore):
            return None
        ranked = [
            (rank, index)
            for index, scheme in enumerate(self.schemes)
            for pattern in scheme.targets
            if (rank := pattern.rank(projection)) is not None
        ]
        return self.schemes[min(ranked)[1]] if ranked else None

    def describe(self) -> str:
        """Return text such as "gptq: int4 in groups of 128"."""
        return f"{self.method}: {'; '.join(dict.fromkeys(scheme.describe() for scheme in self.schemes))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockQuantization:
    """A quantisation in the block formats of a GGUF file.

    Attributes:
        formats: formats of the projections that are quantised, by names such as `model.layers.0.mlp.up_proj`.
        num_tensors: number of the file's tensors in each format, the most frequent first.
        mean_bits: mean bits of a weight of the file, with its share of scales and offsets.
    """

    formats: Mapping[str, str] = field(repr=False)
    num_tensors: tuple[tuple[str, int], ...]
    mean_bits: float
    method: str = "gguf"

    @property
    def kind(self) -> str:
        """Return a name that no value of `--quantization` has: none can be asked for with such a file."""
        return "gguf"

    def inputs_of_unit(self, projection: str, width: int) -> int | None:
        """Return at which multiples the inputs of a projection can be cut for ranks; None: at any."""
        name = self.formats.get(projection)
        return None if name is None else BLOCK_FORMATS[name].inputs

    def describe(self) -> str:
        """Return text such as "gguf: Q4_K (112 tensors), Q6_K (13), 4.8 bits a weight"."""
        (first, count), *others = self.num_tensors
        names = [f"{first} ({count} tensors)", *(f"{name} ({number})" for name, number in others)]
        return f"gguf: {', '.join(names)}, {self.mean_bits:.1f} bits a weight"
