"""The layers for which a store keeps KV blocks: all of the model, or those of the ranks of one host.

Where each host has a store to itself, the store has the layers of that host's ranks. An entry of the
catalogue says which layers these are. Its payload is empty for all layers, as in a store of all ranks. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_COUNT_BYTES = 2  # of the number of layers; keys (`kvstore.names`) have as many for a layer


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A set of layers of a model.

    Attributes:
        bits: bit n stands for layer n.
        num_layers: layers of the model; 0: all layers are meant, however many there are.
    """

    bits: int = 0
    num_layers: int = 0

    @classmethod
    def of(cls, layers: Iterable[int], num_layers: int) -> LayerShare:
        """Return the share of these layers in a model of so many."""
        return cls(sum(1 << layer for layer in set(layers)), num_layers)._settled()

    @property
    def is_whole(self) -> bool:
        """Whether these are all layers of the model."""
        return self.bits == (1 << self.num_layers) - 1

    @property
    def is_empty(self) -> bool:
        """Whether there is no layer."""
        return not self.bits and not self.is_whole

    def includes(self, other: LayerShare) -> bool:
        """Return whether all layers of the other share are in this one."""
        return self.is_whole or (not other.is_whole and not other.bits & ~self.bits)

    def joined(self, other: LayerShare) -> LayerShare:
        """Return the layers of both."""
        if self.is_whole or other.is_whole:
            return WHOLE
        return LayerShare(self.bits | other.bits, max(self.num_layers, other.num_layers))._settled()

    def encoded(self) -> bytes:
        """Return the payload of an entry for blocks of which these layers are stored."""
        if self.is_whole:
            return b""
        bits = self.bits.to_bytes(-(-self.num_layers // 8), "little")
        return self.num_layers.to_bytes(_COUNT_BYTES, "little") + bits

    @classmethod
    def decoded(cls, payload: bytes) -> LayerShare:
        """Return the share that a payload holds; no layers if this version cannot read it."""
        if not payload:
            return WHOLE
        num_layers = int.from_bytes(payload[:_COUNT_BYTES], "little")
        bits = int.from_bytes(payload[_COUNT_BYTES:], "little")
        is_known = num_layers and len(payload) == _COUNT_BYTES + -(-num_layers // 8)
        return cls(bits, num_layers)._settled() if is_known and not bits >> num_layers else NO_LAYERS

    def _settled(self) -> LayerShare:
        """Return the same share, in one form: `WHOLE` for all layers, however many the model has."""
        return WHOLE if self.is_whole else self


WHOLE = LayerShare()
NO_LAYERS = LayerShare(0, 1)
