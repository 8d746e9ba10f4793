"""The experts in place of an MLP: a router sends each token through a few of them (arXiv 2401.04088).

    y = sum over the chosen experts of weight * down(silu(gate(x)) * up(x))   (+ the shared expert)

Each rank of a stage has a part of every expert, or some experts whole (`Compute.expert_parallel`). All ranks
have the router, and one all-reduce sums their results, the shared expert's included. Torch computes one
expert after another. Our kernel computes all of them at once (`csrc/experts.cpp`); if experts are chosen by a
plain softmax, it chooses them too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from penstock.distributed.share import Share
from penstock.families.experts_spec import ExpertNames, ExpertShares, ExpertsSpec, RoutingSpec
from penstock.kernels.cpu.experts import ExpertsShape, ExpertTables, have_one_form
from penstock.kernels.cpu.ops import DTYPES
from penstock.layers.block_matrix import BlockMatrix
from penstock.layers.compute import Compute, never_quantized
from penstock.layers.elementwise import steady
from penstock.layers.linear import FusedLinear, GatedLinear, Linear
from penstock.layers.matrix import PackedMatrix, QuantizedMatrix
from penstock.layers.missing import MissingLayer


class Expert(nn.Module):
    """One expert, down(silu(gate(x)) * up(x)), with this rank's columns; not summed over the ranks.

    Its projections have the names that the checkpoint gives them.
    """

    def __init__(
        self, hidden_size: int, inner: Share, names: ExpertNames, compute: Compute, parent: str
    ) -> None:
        super().__init__()
        self.gate_up_proj = GatedLinear(
            hidden_size, inner, bias=False, compute=compute, parent=parent, names=(names.gate, names.up)
        )
        parts = {f"{parent}.{names.down}": hidden_size}
        down = Linear(inner, hidden_size, bias=False, compute=compute, parts=parts)
        self.add_module(names.down, down)
        self._down_name = names.down

    @property
    def down(self) -> Linear:
        linear = getattr(self, self._down_name)
        assert isinstance(linear, Linear)
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """Run the expert: [num_tokens, hidden_size] -> the same, of this rank's columns alone."""
        return self.down.product(self.gate_up_proj(x))


class Correction(nn.Module):
    """The float32 number that is added to each expert's score when experts are chosen.

    It does not count for the expert's weight in the sum. Checkpoints have it beside the router's weight.
    """

    def __init__(self, num_experts: int, compute: Compute) -> None:
        super().__init__()
        self.e_score_correction_bias = replace(compute, dtype=torch.float32).parameter(num_experts)


class RoutedExperts(nn.Module):
    """The router, this rank's share of the experts, and of the shared one if there is one.

    Attributes:
        experts: all experts of the layer, placeholders for those of other ranks.
        num_chosen: number of experts for each token.
        elsewhere: names, from this module on, of the checkpoint's projections that only other ranks have.
    """

    def __init__(self, spec: ExpertsSpec, hidden_size: int, compute: Compute, parent: str) -> None:
        super().__init__()
        group = compute.group
        own = ExpertShares.of(spec, group.rank, group.size, whole_experts=compute.expert_parallel)
        outputs = {"gate": Share.all(spec.num_experts)}
        if spec.has_shared_gate:
            outputs["shared_expert_gate"] = Share.all(1)
        # A router is not quantised: it is small, and rounding its weights could choose other experts.
        self._logits_dtype = torch.float32 if spec.routing.in_float32 else compute.dtype
        plain = replace(compute, format_of=never_quantized, dtype=self._logits_dtype)
        if spec.routing.is_corrected:
            self.gate = Correction(spec.num_experts, compute)
        self.router = FusedLinear(hidden_size, outputs, bias=False, compute=plain)
        self.experts = nn.ModuleList(
            Expert(hidden_size, own.inner, spec.names, compute, f"{parent}.experts.{index}")
            if own.experts.start <= index < own.experts.end
            else MissingLayer()
            for index in range(spec.num_experts)
        )
        if spec.has_shared:
            name = spec.names.shared
            expert = Expert(hidden_size, own.shared, spec.names, compute, f"{parent}.{name}")
            self.add_module(name, expert)
        self.elsewhere = _projections(spec, own.experts)
        self.num_chosen = spec.num_chosen
        self._own, self._spec, self._group = own.experts, spec, group
        self._kernels = compute.kernels_for("experts")
        self._tables = None if self._kernels is None else self._tabulated(hidden_size, compute)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Run the experts: [num_tokens, hidden] -> the same, summed over the ranks."""
        logits = self.router(hidden_states.to(self._logits_dtype))
        return self._group.all_reduce(self.sum(hidden_states, logits))

    @property
    def is_grouped(self) -> bool:
        """Whether our kernel takes all experts at once."""
        return self._tables is not None

    @property
    def can_be_recorded(self) -> bool:
        """Whether all is done by kernels, the choice included."""
        return self.is_grouped and self._spec.routing == RoutingSpec()

    @property
    def shared(self) -> Expert | MissingLayer:
        """The expert that all tokens go through."""
        expert = getattr(self, self._spec.names.shared) if self._spec.has_shared else MissingLayer()
        assert isinstance(expert, Expert | MissingLayer)
        return expert

    def _tabulated(self, hidden_size: int, compute: Compute) -> ExpertTables | None:
        """Return the own experts' weights for our kernel; None if they are not of one form that it takes."""
        held = (*self.experts, self.shared)  # those of other ranks are placeholders
        own = [expert for expert in held if isinstance(expert, Expert)]
        weights = [(expert.gate_up_proj.weight, expert.down.weight) for expert in own]
        if not all(
            isinstance(each, PackedMatrix | QuantizedMatrix | BlockMatrix)
            for pair in weights
            for each in pair
        ):
            return None
        gate_up, down = ([weight.product() for weight in part] for part in zip(*weights, strict=True))
        if not have_one_form(gate_up, down, self._own.size):
            return None
        assert compute.kernels is not None
        shape = ExpertsShape(
            hidden_size=hidden_size,
            num_experts=self._spec.num_experts,
            num_chosen=self._spec.num_chosen,
            first_own=self._own.start,
            num_own=self._own.size,
            has_shared=self._spec.has_shared,
            is_shared_gated=self._spec.is_shared_gated,
            normalized=self._spec.normalized,
        )
        return ExpertTables(compute.kernels.library, shape, gate_up, down, DTYPES[compute.dtype])

    def sum(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return the weighted sum over the own experts; arguments and result are as for `sum_one_by_one`."""
        if self._kernels is not None and self._tables is not None:
            choice = None if self.can_be_recorded else self._choice(logits)
            return self._kernels.experts(x, logits, self._tables, choice)
        return self.sum_one_by_one(x, logits)

    def sum_one_by_one(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return the same as `sum`, computed in torch expert by expert.

        Args:
            x: [num_tokens, hidden_size].
            logits: [num_tokens, num_experts], and one column more if the shared expert has a gate.

        Returns:
            [num_tokens, hidden_size], summed in float32 and rounded to the dtype of `x`.
        """
        weights, chosen = self._choice(logits)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in range(self._own.start, self._own.end):
            tokens, choices = torch.where(chosen == index)
            if len(tokens):
                weighted = self.experts[index](x[tokens]).float() * weights[tokens, choices, None]
                total.index_add_(0, tokens, weighted)
        if self._spec.has_shared:
            shared = self.shared(x).float()
            total += shared * logits[:, -1:].float().sigmoid() if self._spec.is_shared_gated else shared
        return total.to(x.dtype)

    def _choice(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of each token's experts, as `choose` does."""
        correction = self.gate.e_score_correction_bias if self._spec.routing.is_corrected else None
        return choose(logits[:, : self._spec.num_experts], self._spec, correction)


def choose(logits: Tensor, spec: ExpertsSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return weights (float32) and numbers of each token's experts, best first: two [num_tokens, num_chosen].

    Args:
        logits: [num_tokens, num_experts].
        correction: [num_experts] float32, where scores are corrected.
    """
    routing = spec.routing
    if correction is None:
        scores, preference = logits.float().softmax(-1), logits
    else:
        scores = steady(torch.sigmoid, logits.float())
        preference = scores + correction
    if routing.num_groups > 1:
        preference = preference.masked_fill(~_in_best_groups(preference, routing), float("-inf"))
    # Stable: of equal experts the first is chosen, as our kernel does, which another rank may use.
    chosen = preference.sort(dim=-1, descending=True, stable=True).indices[:, : spec.num_chosen]
    weights = scores.gather(-1, chosen)
    if spec.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return weights * routing.factor, chosen


def _in_best_groups(preference: Tensor, routing: RoutingSpec) -> Tensor:
    """Return whether each expert's group is among the token's best: bool, [num_tokens, num_experts]."""
    groups = preference.view(len(preference), routing.num_groups, preference.shape[1] // routing.num_groups)
    value = groups.topk(2).values.sum(-1) if routing.is_corrected else groups.amax(-1)
    best = value.sort(dim=-1, descending=True, stable=True).indices[:, : routing.num_chosen_groups]
    is_best = torch.zeros_like(value, dtype=torch.bool).scatter_(1, best, True)
    return is_best[..., None].expand_as(groups).flatten(-2)


def _projections(spec: ExpertsSpec, own: Share) -> list[str]:
    """Return the names of the projections of all experts but the own ones."""
    parts = (spec.names.gate, spec.names.up, spec.names.down)
    others = (index for index in range(spec.num_experts) if not own.start <= index < own.end)
    return [f"experts.{index}.{part}" for index in others for part in parts]
