"""Counter-based random numbers: pure, even, and unrelated between seeds and indices."""

from __future__ import annotations

import numpy as np

from penstock.sample.uniform import uniform

MASK = 2**64 - 1


def reference(seed: int, index: int) -> float:
    """SplitMix64 in plain integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    return (mix((mix(seed) + 0x9E3779B97F4A7C15 * (index + 1)) & MASK) >> 11) / 2**53


def test_equals_the_definition_in_plain_integers() -> None:
    seeds = [0, 1, 2, 2**63, MASK, 123456789]
    indices = [0, 1, 511, 2**31, 5, 7]
    drawn = uniform(np.array(seeds, dtype=np.uint64), np.array(indices))
    assert drawn.tolist() == [reference(s, i) for s, i in zip(seeds, indices, strict=True)]


def test_numbers_are_even_and_unrelated() -> None:
    index = np.arange(20_000)
    for seed in (0, 1, 2):
        drawn = uniform(np.full(20_000, seed, dtype=np.uint64), index)
        assert drawn.min() >= 0.0 and drawn.max() < 1.0  # noqa: PT018
        counts, _ = np.histogram(drawn, bins=20, range=(0.0, 1.0))
        assert abs(counts - 1000).max() < 150
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
    first, second = (uniform(np.full(20_000, s, dtype=np.uint64), index) for s in (7, 8))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
