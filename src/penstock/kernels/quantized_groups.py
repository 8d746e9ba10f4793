"""The groups of a quantised matrix's inputs that share a scale, for weights and for activations.

Torch-free: asked before anything starts (`families.sharding`) and by the kernels' reference
(`quantized_rows`).
"""

from __future__ import annotations

INT4_GROUP_SIZE = 64
ACTIVATION_GROUP = 128


def default_group_size(bits: int, in_size: int) -> int:
    """Return the size of the groups of weights that are quantised at load.

    With 8 bits a group is a whole row. With 4 bits it has the size that `benchmarks/quantized_perplexity.py`
    chose.
    """
    return in_size if bits == 8 else min(INT4_GROUP_SIZE, in_size)


def activation_group(group_size: int, in_size: int) -> int:
    """Return how many inputs have activations that are rounded together.

    They are a group of the weights. If that is the whole row, or a multiple of 128, they are 128.
    """
    is_wide = group_size >= in_size or group_size % ACTIVATION_GROUP == 0
    return ACTIVATION_GROUP if is_wide else group_size


def inputs_together(group_size: int, in_size: int) -> int:
    """Return at which multiples a row can be cut without changing a scale or a rounding of activations."""
    return group_size if group_size < in_size else activation_group(group_size, in_size)
