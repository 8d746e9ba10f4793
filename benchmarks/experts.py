"""Experts of one layer: our grouped kernel against loops over the experts and against transformers, in turns.

    grouped              one call of our kernel
    loop, our kernels    each expert's tokens through our packed products, summed by torch
    loop, torch          each expert's tokens through `F.linear`
    transformers ...     its block, by a loop or by torch's grouped product

All take the router, the choice and the sum along. Weights are seeded and rotated over several layers, so that
they come from memory, not from a cache.

    python benchmarks/experts.py --threads 2 --rows 1,8,32,128,512
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from penstock.families.experts_spec import ExpertsSpec
from penstock.kernels.cpu.library import KERNEL_NAMES, load
from penstock.kernels.cpu.ops import CpuKernels
from penstock.layers.compute import Compute
from penstock.layers.experts import Expert, RoutedExperts, choose
from penstock.layers.matrix import GATE, PLAIN, UP, PackedMatrix

GROUPED, OUR_LOOP, TORCH_LOOP = "grouped", "loop, our kernels", "loop, torch"
THEIRS = ("eager", "grouped_mm")  # "batched_mm" copies an expert for each token: ten times as long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,8,32,128,512")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=3584)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--chosen", type=int, default=2)
    parser.add_argument("--layers", type=int, default=3, help="layers whose weights are rotated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    loaded = load()
    assert loaded.library is not None, loaded.reason
    kernels = CpuKernels(loaded.library, frozenset(KERNEL_NAMES))
    layers = [Layer(options, kernels) for _ in range(options.layers)]
    print(
        f"threads {options.threads}, {loaded.isa}, {options.dtype}; {options.experts} experts, "
        f"{options.chosen} chosen, hidden {options.hidden}, inner {options.inner}, "
        f"{layers[0].nbytes / 1e6:.0f} MB a layer; "
        f"ms a layer, median of {options.rounds} rounds (least to most); ratio to {GROUPED}",
    )
    for rows in map(int, options.rows.split(",")):
        measure(layers, rows, options)


class Layer:
    """The same weights in every form."""

    def __init__(self, options: argparse.Namespace, kernels: CpuKernels) -> None:
        self.dtype = getattr(torch, options.dtype)
        self.spec = ExpertsSpec(
            num_experts=options.experts,
            num_chosen=options.chosen,
            inner_size=options.inner,
            normalized=True,
        )
        compute = Compute(dtype=self.dtype, device=torch.device("cpu"), kernels=kernels)
        self.ours = RoutedExperts(self.spec, options.hidden, compute, "")
        config = MixtralConfig(
            hidden_size=options.hidden,
            intermediate_size=options.inner,
            num_local_experts=options.experts,
            num_experts_per_tok=options.chosen,
        )
        self.theirs: Any = MixtralSparseMoeBlock(config).to(self.dtype).eval()
        self._fill()

    @property
    def nbytes(self) -> int:
        return int(sum(parameter.nbytes for parameter in self.theirs.parameters()))

    @torch.no_grad()
    def _fill(self) -> None:
        for parameter in self.theirs.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        _put(self.ours.router.weight, self.theirs.gate.weight, PLAIN)
        for index, expert in enumerate(self.ours.experts):
            assert isinstance(expert, Expert)
            gate, up = self.theirs.experts.gate_up_proj[index].chunk(2)
            _put(expert.gate_up_proj.weight, gate, GATE)
            _put(expert.gate_up_proj.weight, up, UP)
            _put(expert.down.weight, self.theirs.experts.down_proj[index], PLAIN)

    def ways(self, x: Tensor) -> dict[str, Callable[[], Tensor]]:
        ways = {
            GROUPED: lambda: self.ours(x),
            OUR_LOOP: lambda: self.ours.sum_one_by_one(x, self.ours.router(x)),
            TORCH_LOOP: lambda: self._torch_loop(x),
        }
        return ways | {f"transformers {name}": self._their_way(name, x) for name in THEIRS}

    def _torch_loop(self, x: Tensor) -> Tensor:
        weights, chosen = choose(F.linear(x, self.theirs.gate.weight), self.spec)
        total = torch.zeros(x.shape)
        for index in range(self.spec.num_experts):
            tokens, places = torch.where(chosen == index)
            if len(tokens):
                both = F.linear(x[tokens], self.theirs.experts.gate_up_proj[index])
                gate, up = both.chunk(2, dim=-1)
                found = F.linear(F.silu(gate) * up, self.theirs.experts.down_proj[index])
                total.index_add_(0, tokens, found.float() * weights[tokens, places, None])
        return total.to(x.dtype)

    def _their_way(self, name: str, x: Tensor) -> Callable[[], Tensor]:
        def call() -> Tensor:
            self.theirs.experts.config._experts_implementation = name
            found: Tensor = self.theirs(x[None])[0]
            return found

        return call


def _put(weight: object, rows: Tensor, role: int) -> None:
    assert isinstance(weight, PackedMatrix)
    weight.put(0, rows, role)


@torch.no_grad()
def measure(layers: list[Layer], num_rows: int, options: argparse.Namespace) -> None:
    """Print a line for each way; one round of each after the other."""
    x = torch.randn(num_rows, options.hidden).to(layers[0].dtype)
    ways = [layer.ways(x) for layer in layers]
    expected = ways[0][TORCH_LOOP]()
    seconds: dict[str, list[float]] = {}
    for name, call in ways[0].items():
        # A router's numbers are rounded, and near ties fall otherwise elsewhere: of a few tokens.
        is_other = ((call() - expected).abs() > 0.05 + 0.05 * expected.abs()).any(1)
        assert is_other.sum() <= 1 + num_rows // 20, f"{name}: {int(is_other.sum())} rows are wrong"
        seconds[name] = []
    for _ in range(options.rounds):
        for name in seconds:
            began = time.perf_counter()
            for layer in ways:
                layer[name]()
            seconds[name].append((time.perf_counter() - began) / len(ways))
    ours = statistics.median(seconds[GROUPED])
    print(f"\n| {num_rows} rows | ms | ratio |\n|---|---|---|")
    for name, found in seconds.items():
        median, least, most = (1e3 * of(found) for of in (statistics.median, min, max))
        ratio = median / ours / 1e3
        print(f"| {name} | {median:.2f} ({least:.2f} to {most:.2f}) | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
