"""Names of the variants that layers know. Torch-free, because `families.spec` uses them too."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu_tanh"]

# What a norm does with its weight: rounds and multiplies; multiplies and rounds; the same with 1 + weight.
NormKind = Literal["plain", "wide", "one_plus"]
