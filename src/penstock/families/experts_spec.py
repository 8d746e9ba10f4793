"""The experts of a model, in numbers. Read by `models`, used by `layers.experts`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.distributed.share import Share, even_share, near_share

MAX_EXPERTS = 1024  # of a layer; the kernel counts rows per expert in memory of this size


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The names of modules in a family's checkpoints.

    Attributes:
        block: the module in a layer that has router and experts.
        gate, up, down: the projections of an expert.
        shared: the expert that all tokens go through.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """The choice and weighting of a token's experts. The defaults are what our kernel does by itself.

    Attributes:
        scoring: an expert's score is the "softmax" or the "sigmoid" of its logit. With "sigmoid" the scores
            are corrected: each expert has a number that is added to its score for the choice, but not for
            its weight (arXiv 2412.19437, section 2.1.2).
        num_groups: number of groups, each of equally many neighbouring experts. The score of a group is that
            of its best expert; with "sigmoid" it is the sum of its best two.
        num_chosen_groups: number of the best groups, from which alone a token's experts are taken.
        factor: factor of the chosen experts' weights, after normalisation if they are normalised.
        in_float32: the router's weights and logits are float32 whatever the dtype of the computation.
            Estimates of memory count these weights like all others, since they are few.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_chosen_groups: int = 1
    factor: float = 1.0
    in_float32: bool = False

    @property
    def is_corrected(self) -> bool:
        """Whether each expert has a number that counts for the choice only."""
        return self.scoring == "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A set of MLPs, the experts, in place of one MLP; a router chooses some of them for each token.

    Attributes:
        num_experts: number of experts of a layer, at most `MAX_EXPERTS`.
        num_chosen: number of experts that are chosen for each token.
        inner_size: inner width of an expert, between its projections up and down.
        normalized: the weights of the chosen experts are scaled so that their sum is 1.
        shared_size: inner width of the shared expert, which all tokens go through; 0: there is none. Several
            shared experts count as one that is as wide as all of them together.
        is_shared_gated: the shared expert is weighted by the sigmoid of a logit of its own; else by 1.
        dense_layers: layers that have a plain MLP instead.
    """

    num_experts: int
    num_chosen: int
    inner_size: int
    normalized: bool
    shared_size: int = 0
    is_shared_gated: bool = True
    dense_layers: frozenset[int] = frozenset()
    names: ExpertNames = field(default_factory=ExpertNames)
    routing: RoutingSpec = field(default_factory=RoutingSpec)

    @property
    def has_shared(self) -> bool:
        return self.shared_size > 0

    @property
    def has_shared_gate(self) -> bool:
        return self.has_shared and self.is_shared_gated

    def parameters(self, hidden_size: int) -> int:
        """Return the parameters of one layer: experts, router, the shared expert and its gate."""
        experts = 3 * hidden_size * (self.num_experts * self.inner_size + self.shared_size)
        router = hidden_size * (self.num_experts + self.has_shared_gate)
        return experts + router + self.routing.is_corrected * self.num_experts

    def parameters_of_token(self, hidden_size: int) -> int:
        """Return the parameters of one layer that one token needs."""
        return self.parameters(hidden_size) - 3 * hidden_size * self.inner_size * (
            self.num_experts - self.num_chosen
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShares:
    """The share of a rank: a part of the width of every expert, or some experts whole.

    The shared expert is cut by width in any case, so that all ranks have equally much of it.
    """

    experts: Share
    inner: Share
    shared: Share

    @classmethod
    def of(cls, spec: ExpertsSpec, rank: int, size: int, *, whole_experts: bool) -> ExpertShares:
        """Return the share of rank `rank` of `size` ranks.

        Args:
            whole_experts: the rank has whole experts, and the first ranks may have one more than the others;
                else a part of the width of every expert.
        """
        experts, inner = Share.all(spec.num_experts), Share.all(spec.inner_size)
        if whole_experts:
            experts = near_share(spec.num_experts, rank, size)
        else:
            inner = even_share(spec.inner_size, rank, size)
        return cls(experts=experts, inner=inner, shared=even_share(spec.shared_size, rank, size))
