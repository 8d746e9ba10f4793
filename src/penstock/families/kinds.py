"""The names of the variants of layers, such as activations and norms.

Torch-free, because `families.spec` uses them too.
"""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu_tanh"]

# What a norm does with the normalised numbers: "plain" rounds them to the dtype and multiplies them by its
# weight; "wide" multiplies and then rounds; "one_plus" does as "wide", with 1 + weight.
NormKind = Literal["plain", "wide", "one_plus"]
