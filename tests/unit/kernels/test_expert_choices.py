"""Choosing experts by groups and corrected scores; our kernel with experts that were chosen beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernel_builds import built
from penstock.families.experts_spec import ExpertsSpec, RoutingSpec
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.compute import Compute, FormatOf, never_quantized
from penstock.layers.experts import RoutedExperts, choose
from penstock.layers.matrix import Matrix, QuantizedFormat

HIDDEN = 32
SIGMOID = RoutingSpec(scoring="sigmoid", num_groups=4, num_chosen_groups=2, factor=2.5, in_float32=True)
SPEC = ExpertsSpec(
    num_experts=8,
    num_chosen=3,
    inner_size=32,
    normalized=True,
    shared_size=64,
    is_shared_gated=False,
    routing=SIGMOID,
)


def by_hand(logits: list[float], correction: list[float] | None, spec: ExpertsSpec) -> dict[int, float]:
    """Weights of one token's experts, from the formulas of the reports."""
    routing, row = spec.routing, torch.tensor(logits, dtype=torch.float64)
    scores = (row.softmax(0) if correction is None else row.sigmoid()).tolist()
    ranks = [score + (0.0 if correction is None else correction[e]) for e, score in enumerate(scores)]
    size = spec.num_experts // routing.num_groups
    groups = [sorted(ranks[g * size : (g + 1) * size], reverse=True) for g in range(routing.num_groups)]
    values = [sum(group[:2]) if routing.is_corrected else group[0] for group in groups]
    best = sorted(range(routing.num_groups), key=lambda g: -values[g])[: routing.num_chosen_groups]
    allowed = [expert for expert in range(spec.num_experts) if expert // size in best]
    chosen = sorted(allowed, key=lambda e: -ranks[e])[: spec.num_chosen]
    total = sum(scores[e] for e in chosen) if spec.normalized else 1.0
    return {expert: routing.factor * scores[expert] / total for expert in chosen}


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("num_groups", "num_chosen_groups"), [(1, 1), (4, 2), (2, 1)])
def test_experts_are_chosen_by_groups_and_scores(
    scoring: str, num_groups: int, num_chosen_groups: int, normalized: bool
) -> None:
    torch.manual_seed(3)
    routing = RoutingSpec(
        scoring=scoring,  # type: ignore[arg-type]
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        factor=1.5,
    )
    spec = replace(SPEC, routing=routing, normalized=normalized)
    logits = torch.randn(64, spec.num_experts)
    correction = torch.randn(spec.num_experts) * 0.5 if routing.is_corrected else None
    weights, chosen = choose(logits, spec, correction)
    for row in range(len(logits)):
        expected = by_hand(logits[row].tolist(), None if correction is None else correction.tolist(), spec)
        assert chosen[row].tolist() == list(expected)
        assert weights[row].tolist() == pytest.approx(list(expected.values()), rel=1e-5)


def test_of_equal_experts_and_groups_the_first_are_chosen() -> None:
    """On all ranks, whatever the logits."""
    for correction in (None, torch.zeros(8)):
        routing = replace(SIGMOID, scoring="softmax" if correction is None else "sigmoid")
        _, chosen = choose(torch.zeros(2, 8), replace(SPEC, routing=routing), correction)
        assert chosen.tolist() == [[0, 1, 2]] * 2


def test_scores_that_are_all_zero_give_weights_of_zero() -> None:
    weights, _ = choose(torch.full((1, 8), -1000.0), SPEC, torch.zeros(8))
    assert weights.tolist() == [[0.0] * 3]


def block(spec: ExpertsSpec, dtype: torch.dtype, format_of: FormatOf) -> RoutedExperts:
    """A layer with random experts, by our kernels."""
    torch.manual_seed(1)
    kernels = CpuKernels(built(), frozenset(KERNEL_NAMES))
    compute = Compute(dtype=dtype, device=torch.device("cpu"), kernels=kernels, format_of=format_of)
    made = RoutedExperts(spec, HIDDEN, compute, "block")
    for module in made.modules():
        if isinstance(module, Matrix):
            roles = (1, 2) if module.gated else (0,)
            for role in roles:
                rows = torch.randn(module.out_size // len(roles), module.in_size) * module.in_size**-0.5
                module.put(0, rows.to(module.dtype), role)
    if spec.routing.is_corrected:
        made.gate.e_score_correction_bias.data = torch.randn(spec.num_experts) * 0.3
    return made


def quantized(bits: int) -> FormatOf:
    form = QuantizedFormat(bits=bits, group_size=16, scale_dtype=torch.bfloat16, has_zeros=False)
    return lambda parts, in_size: form if parts else None


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 5, 700])
def test_the_kernel_takes_experts_that_were_chosen(num_tokens: int, dtype: torch.dtype, bits: int) -> None:
    """More tokens than it takes at once; a shared expert without a gate."""
    layer = block(SPEC, dtype, quantized(bits) if bits else never_quantized)
    assert layer.is_grouped
    assert not layer.can_be_recorded
    x = torch.randn(num_tokens, HIDDEN).to(dtype)
    logits = layer.router(x.float())
    assert logits.dtype == torch.float32
    expected = layer.sum_one_by_one(x, logits)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(layer.sum(x, logits), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    layer = block(SPEC, dtype, never_quantized)
    x = torch.randn(600, HIDDEN).to(dtype)
    together: Tensor = layer(x)
    for row in (0, 511, 512, 599):
        assert torch.equal(layer(x[row : row + 1].contiguous())[0], together[row])


def test_the_kernel_alone_chooses_with_a_shared_expert_without_a_gate() -> None:
    layer = block(replace(SPEC, routing=RoutingSpec()), torch.float32, never_quantized)
    assert layer.can_be_recorded
    x = torch.randn(40, HIDDEN)
    logits = layer.router(x)
    torch.testing.assert_close(layer.sum(x, logits), layer.sum_one_by_one(x, logits), atol=1e-5, rtol=1e-5)
