"""The weights of a layer's experts as the grouped kernel takes them (`csrc/experts.cpp`).

`layers.experts` makes an `ExpertTables` for each layer; `CpuKernels.experts` runs it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.kernels.cpu.abi import ExpertsArgs, LinearArgs, QuantizedLinearArgs

Product = LinearArgs | QuantizedLinearArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """The experts of a layer, and which of them a rank has.

    Attributes:
        num_own: number of the rank's experts, from `first_own` on; at least one. The shared expert, if there
            is one, is not counted.
        normalized: the weights of the chosen experts are scaled so that their sum is 1.
        is_shared_gated: the weight of the shared expert is the sigmoid of the last logit; else it is 1.
    """

    hidden_size: int
    num_experts: int
    num_chosen: int
    first_own: int
    num_own: int
    has_shared: bool
    normalized: bool
    is_shared_gated: bool = True


class ExpertTables:
    """The addresses of the weights of a rank's experts. The maker keeps the weights alive.

    Args:
        gate_up, down: products with packed weights, all of one form: of the own experts in order, then of the
            shared one. Their x, y and bias are not used.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: ExpertsShape,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        dtype: int,
    ) -> None:
        assert len(gate_up) == len(down) == shape.num_own + shape.has_shared
        self.shape = shape
        self._kind: Any = type(gate_up[0])
        self._gate_up, self._down = self._table(gate_up), self._table(down)
        self._dtype = dtype
        args = self.args()
        self.token_bytes: int = library.penstock_expert_token_bytes(ctypes.addressof(args))

    def args(self) -> ExpertsArgs:
        """Return the arguments of a call without x, logits, y and scratch."""
        kind = "quantized_" if self._kind is QuantizedLinearArgs else ""
        shape = self.shape
        tables = {
            f"{kind}gate_up": ctypes.addressof(self._gate_up),
            f"{kind}down": ctypes.addressof(self._down),
        }
        return ExpertsArgs(
            hidden_size=shape.hidden_size,
            num_experts=shape.num_experts,
            num_chosen=shape.num_chosen,
            first_own=shape.first_own,
            num_own=shape.num_own,
            has_shared=shape.has_shared,
            normalized=shape.normalized,
            dtype=self._dtype,
            is_shared_gated=shape.is_shared_gated,
            **tables,
        )

    def _table(self, products: Sequence[Product]) -> Any:
        assert all(type(product) is self._kind for product in products)
        return (self._kind * len(products))(*products)


def have_one_form(gate_up: Sequence[Product], down: Sequence[Product], num_own: int) -> bool:
    """Return whether one call can take all experts.

    Their weights must be all plain, all of block formats, or all quantised to as many bits. Groups must be
    equal in `gate_up`, and in `down` of the `num_own` first, whose inner values lie in rows of one width.
    """
    is_one_kind = len({(type(product), _bits(product)) for product in (*gate_up, *down)}) == 1
    return is_one_kind and _have_equal_groups(gate_up) and _have_equal_groups(down[:num_own])


def _have_equal_groups(products: Sequence[Product]) -> bool:
    return len({_group_size(product) for product in products}) == 1


def _bits(product: Product) -> int:
    return 0 if isinstance(product, LinearArgs) else product.bits


def _group_size(product: Product) -> int:
    return 0 if isinstance(product, LinearArgs) else product.group_size
