"""The layers of which a store has the parts of a block: all, or those that the ranks of one host have.

Hosts with a store each keep the layers of their own ranks there. An entry of the catalogue says which these
are: the payload is empty for all layers, as one store for all ranks has them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_COUNT_BYTES = 2  # of the number of layers; `kvstore.names` allows no more


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
        """Return the payload of an entry for blocks of which these layers are there."""
        if self.is_whole:
            return b""
        bits = self.bits.to_bytes(-(-self.num_layers // 8), "little")
        return self.num_layers.to_bytes(_COUNT_BYTES, "little") + bits

    @classmethod
    def decoded(cls, payload: bytes) -> LayerShare:
        """Return the share that a payload says; no layers for one that a later version has made otherwise."""
        if not payload:
            return WHOLE
        num_layers = int.from_bytes(payload[:_COUNT_BYTES], "little")
        bits = int.from_bytes(payload[_COUNT_BYTES:], "little")
        is_known = num_layers and len(payload) == _COUNT_BYTES + -(-num_layers // 8)
        return cls(bits, num_layers)._settled() if is_known and not bits >> num_layers else NO_LAYERS

    def _settled(self) -> LayerShare:
        """Return the same share; all layers are one value, whichever model they are of."""
        return WHOLE if self.is_whole else self


WHOLE = LayerShare()
NO_LAYERS = LayerShare(0, 1)
