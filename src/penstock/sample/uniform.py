"""The random numbers of the sampler: a pure function of (seed, index of the token in its output).

There is no generator with a state, so that every layout and every replay draws the same.

The i-th number of a seed is output i of a SplitMix64 stream (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014) whose start is the mixed seed, so that neighbouring seeds have
unrelated streams.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_11, _SHIFT_27, _SHIFT_30, _SHIFT_31 = (np.uint64(bits) for bits in (11, 27, 30, 31))


def uniform(seed: NDArray[np.uint64], index: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits for each (seed, index); both [n], 0 <= index."""
    steps = index.astype(np.uint64) + _ONE
    mixed = _mix(_mix(seed) + _GOLDEN_GAMMA * steps)
    return (mixed >> _SHIFT_11).astype(np.float64) * 2.0**-53


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's output function: a bijection of 64-bit words; products wrap around."""
    value = (value ^ (value >> _SHIFT_30)) * _FIRST_FACTOR
    value = (value ^ (value >> _SHIFT_27)) * _SECOND_FACTOR
    return value ^ (value >> _SHIFT_31)
