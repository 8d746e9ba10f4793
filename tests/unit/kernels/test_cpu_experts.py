"""The grouped kernel over experts: as float64 computes it, and the same bits in any company."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_builds import built, targets
from penstock.families.experts_spec import ExpertsSpec
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.compute import Compute, FormatOf, never_quantized
from penstock.layers.experts import Expert, RoutedExperts
from penstock.layers.matrix import GATE, PLAIN, UP, Matrix, QuantizedFormat

EACH_TARGET = pytest.mark.parametrize("library", targets(), indirect=True)
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SPEC = ExpertsSpec(num_experts=7, num_chosen=3, inner_size=36, normalized=True, shared_size=20)
HIDDEN = 49


@dataclass(frozen=True)
class Place:
    """A rank whose sum is looked at before it is added to the others'."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


ALONE = Place(0, 1)


@dataclass(frozen=True)
class Weights:
    """Gate, up and down of each expert, the shared one last, in the dtype of the block."""

    gate: list[Tensor]
    up: list[Tensor]
    down: list[Tensor]

    @classmethod
    def random(cls, spec: ExpertsSpec, hidden: int, dtype: torch.dtype) -> Weights:
        inner = [spec.inner_size] * spec.num_experts + [spec.shared_size] * spec.has_shared

        def rows(out_size: int, in_size: int) -> Tensor:
            return (torch.randn(out_size, in_size) * in_size**-0.5).to(dtype)

        return cls(
            gate=[rows(size, hidden) for size in inner],
            up=[rows(size, hidden) for size in inner],
            down=[rows(hidden, size) for size in inner],
        )


def block(
    library: ctypes.CDLL,
    weights: Weights,
    *,
    spec: ExpertsSpec = SPEC,
    format_of: FormatOf = never_quantized,
    place: Place = ALONE,
) -> RoutedExperts:
    """A layer with these experts; a rank of several has some whole, and all of the shared one."""
    hidden, dtype = weights.down[0].shape[0], weights.down[0].dtype
    compute = Compute(
        dtype=dtype,
        device=torch.device("cpu"),
        kernels=CpuKernels(library, frozenset(KERNEL_NAMES)),
        format_of=format_of,
        group=place,  # type: ignore[arg-type]
        expert_parallel=True,
    )
    found = RoutedExperts(spec, hidden, compute, "block")
    assert found.is_grouped
    own = [*found.experts, *([found.shared_expert] if spec.has_shared else [])]
    for expert, gate, up, down in zip(own, weights.gate, weights.up, weights.down, strict=True):
        if isinstance(expert, Expert):
            for matrix, rows, role in (
                (expert.gate_up_proj.weight, gate, GATE),
                (expert.gate_up_proj.weight, up, UP),
                (expert.down.weight, down, PLAIN),
            ):
                assert isinstance(matrix, Matrix)
                matrix.put(0, rows, role)
    return found


def inputs(
    spec: ExpertsSpec, num_tokens: int, dtype: torch.dtype, hidden: int = HIDDEN
) -> tuple[Tensor, Tensor]:
    """x, and logits without ties."""
    width = spec.num_experts + spec.has_shared
    logits = torch.rand(num_tokens, width).argsort(-1) * 0.375 - 1.0
    return torch.randn(num_tokens, hidden).to(dtype), logits.to(dtype)


def expected_sum(weights: Weights, x: Tensor, logits: Tensor, spec: ExpertsSpec) -> Tensor:
    """In float64, from the kernel's inputs; what is between the projections is rounded as there."""
    probabilities, chosen = logits[:, : spec.num_experts].double().softmax(-1).topk(spec.num_chosen)
    if spec.normalized:
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    share = torch.zeros(len(x), len(weights.gate), dtype=torch.float64)
    share[:, : spec.num_experts].scatter_(1, chosen, probabilities)
    if spec.has_shared:
        share[:, -1] = logits[:, -1].double().sigmoid()
    wide = x.double()
    total = torch.zeros(wide.shape, dtype=torch.float64)
    for index in range(len(weights.gate)):
        inner = F.silu(wide @ weights.gate[index].double().T) * (wide @ weights.up[index].double().T)
        total += share[:, index, None] * (inner.to(x.dtype).double() @ weights.down[index].double().T)
    return total


SHAPES = [
    (ExpertsSpec(num_experts=1, num_chosen=1, inner_size=1, normalized=True), 1),
    (ExpertsSpec(num_experts=8, num_chosen=2, inner_size=48, normalized=True), 64),
    (ExpertsSpec(num_experts=8, num_chosen=8, inner_size=17, normalized=False), 33),
    (ExpertsSpec(num_experts=40, num_chosen=6, inner_size=15, normalized=False, shared_size=31), 30),
    (SPEC, HIDDEN),
]


@EACH_TARGET
@EACH_DTYPE
@pytest.mark.parametrize(("spec", "hidden"), SHAPES)
def test_the_grouped_sum_is_that_of_float64(
    library: ctypes.CDLL, dtype: torch.dtype, spec: ExpertsSpec, hidden: int
) -> None:
    torch.manual_seed(0)
    weights = Weights.random(spec, hidden, dtype)
    layer = block(library, weights, spec=spec)
    for num_tokens in (0, 1, 2, 13, 40):
        x, logits = inputs(spec, num_tokens, dtype, hidden)
        found, expected = layer.sum(x, logits), expected_sum(weights, x, logits, spec)
        bound = 2e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found.double(), expected, atol=bound, rtol=bound)


@EACH_TARGET
@EACH_DTYPE
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_a_token_does_not_depend_on_its_company_nor_on_threads(
    library: ctypes.CDLL, dtype: torch.dtype, bits: int
) -> None:
    torch.manual_seed(1)
    layer = block(library, Weights.random(SPEC, HIDDEN, dtype), format_of=rounded_to(bits))
    x, logits = inputs(SPEC, 600, dtype)  # more than the kernel takes at a time
    torch.set_num_threads(1)
    alone = torch.cat([layer.sum(x[t : t + 1], logits[t : t + 1]) for t in range(600)])
    for threads, num_tokens in itertools.product((1, 2, 3), (2, 7, 32, 40, 513, 600)):
        torch.set_num_threads(threads)
        assert torch.equal(layer.sum(x[:num_tokens], logits[:num_tokens]), alone[:num_tokens])
        assert torch.equal(layer.sum(x[-num_tokens:], logits[-num_tokens:]), alone[-num_tokens:])


def rounded_to(bits: int) -> FormatOf:
    if not bits:
        return never_quantized
    form = QuantizedFormat(bits=bits, group_size=16, scale_dtype=torch.bfloat16, has_zeros=False)
    return lambda parts, in_size: form if parts else None


@EACH_TARGET
@EACH_DTYPE
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_experts_give_the_sum_of_their_products(
    library: ctypes.CDLL, dtype: torch.dtype, bits: int
) -> None:
    """Those of the quantised kernel, of which it is known what they are."""
    torch.manual_seed(2)
    layer = block(library, Weights.random(SPEC, HIDDEN, dtype), format_of=rounded_to(bits))
    for num_tokens in (1, 5, 40):
        x, logits = inputs(SPEC, num_tokens, dtype)
        expected = layer.sum_one_by_one(x, logits)
        bound = 2e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(layer.sum(x, logits), expected, atol=bound, rtol=bound)


@EACH_TARGET
@EACH_DTYPE
@pytest.mark.parametrize("size", [2, 3, 7])
def test_ranks_with_whole_experts_have_parts_of_the_sum(
    library: ctypes.CDLL, dtype: torch.dtype, size: int
) -> None:
    torch.manual_seed(3)
    spec = replace(SPEC, shared_size=0)
    weights = Weights.random(spec, HIDDEN, dtype)
    x, logits = inputs(spec, 25, dtype)
    whole = block(library, weights, spec=spec).sum(x, logits).float()
    parts = [
        block(library, weights, spec=spec, place=Place(rank, size)).sum(x, logits).float()
        for rank in range(size)
    ]
    bound = 1e-6 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, atol=bound, rtol=bound)


@EACH_TARGET
def test_a_rank_whose_experts_nobody_chose_has_zeros(library: ctypes.CDLL) -> None:
    spec = replace(SPEC, shared_size=0)
    layer = block(library, Weights.random(spec, HIDDEN, torch.float32), spec=spec, place=Place(1, 2))
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0]]).repeat(5, 1)
    assert torch.equal(layer.sum(torch.randn(5, HIDDEN), logits), torch.zeros(5, HIDDEN))


@EACH_TARGET
def test_of_equal_experts_the_first_are_chosen(library: ctypes.CDLL) -> None:
    torch.manual_seed(4)
    spec = replace(SPEC, shared_size=0)
    layer = block(library, Weights.random(spec, HIDDEN, torch.float32), spec=spec)
    x = torch.randn(3, HIDDEN)
    ties = torch.zeros(3, 7)
    tied = layer.sum(x, ties)
    torch.testing.assert_close(tied, layer.sum_one_by_one(x, ties), atol=1e-6, rtol=1e-6)
    first = layer.sum(x, torch.tensor([[0.0] * 3 + [-60.0] * 4]).repeat(3, 1))
    torch.testing.assert_close(tied, first, atol=1e-6, rtol=1e-6)


@EACH_TARGET
@EACH_DTYPE
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "logits"])
def test_a_token_that_is_not_finite_comes_out_so_alone(
    library: ctypes.CDLL, dtype: torch.dtype, bad: float, where: str
) -> None:
    torch.manual_seed(5)
    layer = block(library, Weights.random(SPEC, HIDDEN, dtype))
    x, logits = inputs(SPEC, 14, dtype)
    sound = layer.sum(x, logits)
    if where == "x":
        x[3, 7] = bad
    else:
        logits[3, : SPEC.num_experts] = bad
    found = layer.sum(x, logits)
    others = torch.arange(14) != 3
    assert not found[3].isfinite().any()
    assert torch.equal(found[others], sound[others])


def test_experts_of_several_forms_are_taken_one_by_one() -> None:
    form = QuantizedFormat(bits=8, group_size=16, scale_dtype=torch.bfloat16, has_zeros=False)
    wide = replace(form, group_size=32)
    assert not is_grouped(lambda name: form if "experts.2" in name else None)
    assert not is_grouped(lambda name: replace(form, bits=4) if "experts.2" in name else form)
    assert not is_grouped(lambda name: wide if "experts.2.gate" in name or "experts.2.up" in name else form)


def test_groups_of_the_own_experts_inner_values_must_be_equal() -> None:
    form = QuantizedFormat(bits=8, group_size=16, scale_dtype=torch.bfloat16, has_zeros=False)
    narrow = replace(form, group_size=4)
    assert not is_grouped(lambda name: narrow if name.endswith("experts.2.down_proj") else form)
    assert is_grouped(lambda name: narrow if name.endswith("down_proj") else form)
    assert is_grouped(lambda name: narrow if name.endswith("shared_expert.down_proj") else form)


def is_grouped(form_of: Callable[[str], QuantizedFormat | None]) -> bool:
    compute = Compute(
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=CpuKernels(built(), frozenset(KERNEL_NAMES)),
        format_of=lambda parts, in_size: form_of(next(iter(parts))) if parts else None,
    )
    return RoutedExperts(SPEC, HIDDEN, compute, "block").is_grouped
