"""Which layers of a block a store has, as an entry of its catalogue says it."""

from __future__ import annotations

import itertools

import pytest

from penstock.kvstore.layer_share import NO_LAYERS, WHOLE, LayerShare

NUM_LAYERS = 3
SUBSETS = [
    layers for size in range(NUM_LAYERS + 1) for layers in itertools.combinations(range(NUM_LAYERS), size)
]


@pytest.mark.parametrize("layers", SUBSETS)
def test_d15_a_share_is_a_set_of_layers(layers: tuple[int, ...]) -> None:
    one = LayerShare.of(layers, NUM_LAYERS)
    assert LayerShare.decoded(one.encoded()) == one
    assert (one.is_whole, one.is_empty) == (len(layers) == NUM_LAYERS, not layers)
    for others in SUBSETS:
        other = LayerShare.of(others, NUM_LAYERS)
        assert one.includes(other) == set(others).issubset(layers)
        assert one.joined(other) == LayerShare.of({*layers, *others}, NUM_LAYERS)


def test_d15_all_layers_are_one_value_and_an_empty_payload() -> None:
    """As entries of one store for all ranks have always been."""
    assert LayerShare.of(range(130), 130) == WHOLE
    assert WHOLE.encoded() == b""
    assert LayerShare.decoded(b"") == WHOLE
    assert WHOLE.includes(LayerShare.of([129], 130))
    assert not LayerShare.of([129], 130).includes(WHOLE)
    assert LayerShare.of([129], 130).joined(WHOLE) == WHOLE


@pytest.mark.parametrize("payload", [b"\1", b"\3\0", b"\3\0\1\0", b"\3\0\x08", b"\0\0", b"\0\0\1"])
def test_r9_a_payload_that_is_no_share_is_of_no_layers(payload: bytes) -> None:
    assert LayerShare.decoded(payload) == NO_LAYERS
    assert not NO_LAYERS.includes(WHOLE)
    assert not NO_LAYERS.includes(LayerShare.of([0], 2))
