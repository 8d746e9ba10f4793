"""DeepSeek's latent attention by our kernels against the same by torch, in turns, on one layer.

    python benchmarks/latent_attention.py [--threads 1] [--heads 16] [--rank 512] [--repeats 15]

Measured is what lies between the projections of hidden states: queries to latent width, rotation, storing,
attention, results to values. The sizes are DeepSeek-V2-Lite's, in bfloat16. Decodes have one new token a row,
prefills many tokens of one row. Printed are milliseconds (medians) and the median of the ratios of
neighbouring turns; the bar: our kernels take no longer than torch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from ratios import in_turns, shown
from torch import Tensor

from penstock.attention.cpu_latent import CpuLatentAttention
from penstock.attention.latent_paged import LatentPagedAttention
from penstock.attention.metadata import AttentionMetadata
from penstock.distributed.share import Share
from penstock.families.latent_spec import LatentSpec
from penstock.families.rope_spec import RopeSpec
from penstock.kernels.cpu import library as kernel_library
from penstock.kernels.cpu.ops import CpuKernels, Sight
from penstock.layers.compute import Compute
from penstock.layers.rope import RotaryEmbedding
from penstock.models.latent_attention import LatentExpansion

BLOCK, DTYPE = 32, torch.bfloat16
PLAIN_DIM, ROTARY_DIM, VALUE_DIM = 128, 64, 128


class Case(NamedTuple):
    """Rows of a step, all alike."""

    num_rows: int
    num_tokens: int  # of each row
    context: int


CASES = [
    Case(1, 1, 1024), Case(1, 1, 4096), Case(1, 1, 16384), Case(8, 1, 1024), Case(8, 1, 4096),
    Case(1, 512, 512), Case(1, 512, 4096),
]  # fmt: skip


class Side:
    """One way to compute the layer: our kernels, or torch where there are none."""

    def __init__(self, latent: LatentSpec, num_heads: int, kernels: CpuKernels | None) -> None:
        compute = Compute(dtype=DTYPE, device=torch.device("cpu"), kernels=kernels)
        self._num_heads = num_heads
        self._expansion = LatentExpansion(latent, Share.all(num_heads), compute)
        rows = torch.randn(num_heads * (PLAIN_DIM + VALUE_DIM), latent.rank, dtype=DTYPE) * 0.05
        if isinstance(self._expansion.weight, torch.nn.Parameter):
            self._expansion.weight.data.copy_(rows)
            self._attention = LatentPagedAttention(num_heads, latent, DTYPE)
        else:
            assert kernels is not None
            self._expansion.weight.put(0, rows, 0)
            self._expansion.weight.finish()
            self._attention = CpuLatentAttention(num_heads, latent, DTYPE, kernels)

    def layer(self, case: Case, latent: LatentSpec) -> Callable[[], float]:
        """Return a function that computes one step and returns its seconds."""
        per_row = -(-case.context // BLOCK)
        memory = torch.zeros(case.num_rows * per_row * self._attention.block_bytes(BLOCK), dtype=torch.uint8)
        kv = self._attention.layer_kv(memory)
        kv.latent.normal_()
        metadata = _metadata(case, per_row)
        rope = RotaryEmbedding(
            RopeSpec(interleaved=True),
            ROTARY_DIM,
            compute=Compute(dtype=DTYPE, device=torch.device("cpu")),
        )
        positions = torch.arange(case.context - case.num_tokens, case.context).repeat(case.num_rows)
        angles, count = rope.angles(positions), case.num_rows * case.num_tokens
        query = torch.randn(count, self._num_heads, PLAIN_DIM + ROTARY_DIM, dtype=DTYPE)
        key = torch.randn(count, latent.width, dtype=DTYPE)
        sight = Sight(scale=(PLAIN_DIM + ROTARY_DIM) ** -0.5)

        def step() -> float:
            start = time.perf_counter()
            plain, rotary = torch.split(query, [PLAIN_DIM, ROTARY_DIM], dim=-1)
            wide = torch.cat((self._expansion.absorb(plain), rotary), dim=-1).flatten(1)
            qk = torch.cat((wide, key), dim=-1)
            self._expansion.values(self._attention.attend(qk, angles, kv, metadata, sight))
            return time.perf_counter() - start

        return step


def _metadata(case: Case, per_row: int) -> AttentionMetadata:
    tables = torch.randperm(case.num_rows * per_row).view(case.num_rows, per_row)
    position = torch.arange(case.context - case.num_tokens, case.context)
    slots: Tensor = tables[:, position // BLOCK] * BLOCK + position % BLOCK
    return AttentionMetadata(
        query_starts=list(range(0, case.num_rows * case.num_tokens + 1, case.num_tokens)),
        seq_lens=[case.context] * case.num_rows,
        block_tables=tables,
        slot_mapping=slots.flatten(),
        num_decodes=case.num_rows if case.num_tokens == 1 else 0,
        block_size=BLOCK,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rank", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    loaded = kernel_library.load()
    assert loaded.library is not None, loaded.reason
    kernels = CpuKernels(loaded.library, frozenset(kernel_library.KERNEL_NAMES))
    latent = LatentSpec(
        rank=options.rank, query_rank=0, plain_dim=PLAIN_DIM, rotary_dim=ROTARY_DIM, value_dim=VALUE_DIM
    )
    sides = [Side(latent, options.heads, kernels), Side(latent, options.heads, None)]
    print(f"{loaded.isa}; threads {options.threads}, heads {options.heads}, rank {options.rank}, bfloat16")
    print("| rows | tokens of each | context | ours, ms | torch, ms | ours/torch | bar 1.0 |")
    print("|---|---|---|---|---|---|---|")
    are_met = [_measured(case, sides, latent, options.repeats) for case in CASES]
    return 0 if all(are_met) else 1


def _measured(case: Case, sides: list[Side], latent: LatentSpec, repeats: int) -> bool:
    """Print a line of the table; whether the bar is met."""
    steps = [side.layer(case, latent) for side in sides]
    rounds = in_turns(steps, lambda step: step(), repeats, warm_up=2)
    ours, torchs = (statistics.median(found[place] for found in rounds) * 1e3 for place in (0, 1))
    ratios = [own / other for own, other in rounds]
    is_met = statistics.median(ratios) <= 1.0
    word = "met" if is_met else "missed"
    print(f"| {' | '.join(map(str, case))} | {ours:.2f} | {torchs:.2f} | {shown(ratios)} | {word} |")
    return is_met


if __name__ == "__main__":
    sys.exit(main())
