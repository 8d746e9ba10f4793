"""What the experts of a model are, in numbers. Read by `models`, used by `layers.experts`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.distributed.share import Share, even_share, near_share

MAX_EXPERTS = 1024  # of a layer; the kernel counts rows per expert in memory of this size


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a family's checkpoints call the block of a layer, and the projections of an expert."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Several MLPs in place of one, of which a router chooses some for each token.

    Attributes:
        num_experts: of a layer, at most `MAX_EXPERTS`.
        num_chosen: for each token.
        inner_size: width of the middle of an expert.
        normalized: the weights of the chosen experts are scaled so that their sum is 1.
        shared_size: width of the middle of an expert that all tokens go through, weighted by a sigmoid; 0:
            there is none.
        dense_layers: those that have a plain MLP instead.
    """

    num_experts: int
    num_chosen: int
    inner_size: int
    normalized: bool
    shared_size: int = 0
    dense_layers: frozenset[int] = frozenset()
    names: ExpertNames = field(default_factory=ExpertNames)

    @property
    def has_shared(self) -> bool:
        return self.shared_size > 0

    def parameters(self, hidden_size: int) -> int:
        """Of one layer: experts, router, the shared expert and its gate."""
        experts = 3 * hidden_size * (self.num_experts * self.inner_size + self.shared_size)
        return experts + hidden_size * (self.num_experts + self.has_shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShares:
    """What a rank has: a part of the width of every expert, or some experts whole.

    The shared expert is cut by width in any case, so that all ranks have equally much of it.
    """

    experts: Share
    inner: Share
    shared: Share

    @classmethod
    def of(cls, spec: ExpertsSpec, rank: int, size: int, *, whole_experts: bool) -> ExpertShares:
        """The share of rank `rank` of `size`; the first ranks may have an expert more than the others."""
        experts, inner = Share.all(spec.num_experts), Share.all(spec.inner_size)
        if whole_experts:
            experts = near_share(spec.num_experts, rank, size)
        else:
            inner = even_share(spec.inner_size, rank, size)
        return cls(experts=experts, inner=inner, shared=even_share(spec.shared_size, rank, size))
