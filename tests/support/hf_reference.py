"""What `transformers` says: seeded random checkpoints, their greedy tokens and logits in float32.

The seeds are such that every top-two margin of the greedy run exceeds `MIN_MARGIN` (the tests assert it): a
wrong token can then only come from a wrong computation, never from rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from checkpoints import Family, make_checkpoint

PROMPT = [1, 5, 9, 33, 7]
NUM_TOKENS = 64
MIN_MARGIN = 1e-3  # between the likeliest two tokens: below it, rounding may choose


class RandomModel(NamedTuple):
    """A checkpoint by its seed."""

    family: Family
    tied: bool
    kv_heads: int
    seed: int

    def make(self, directory: Path) -> Path:
        return make_checkpoint(
            directory, family=self.family, tied=self.tied, kv_heads=self.kv_heads, seed=self.seed
        )


MODELS = [
    RandomModel("llama", False, 1, 0),
    RandomModel("llama", False, 2, 1),
    RandomModel("llama", False, 4, 0),
    RandomModel("llama", True, 1, 1),
    RandomModel("llama", True, 2, 0),
    RandomModel("llama", True, 4, 0),
    RandomModel("qwen2", False, 1, 0),
    RandomModel("qwen2", False, 2, 0),
    RandomModel("qwen2", False, 4, 1),
    RandomModel("qwen2", True, 1, 1),
    RandomModel("qwen2", True, 2, 0),
    RandomModel("qwen2", True, 4, 0),
]


def reference(directory: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logits(directory: Path, ids: list[int]) -> Tensor:
    """Logits of every position: [len(ids), vocab]."""
    return reference(directory)(torch.tensor([ids])).logits[0]


@torch.no_grad()
def reference_greedy(directory: Path) -> tuple[list[int], Tensor]:
    """`NUM_TOKENS` greedy ids, each from a plain forward pass over all before it; and the top-two margins."""
    model, ids, margins = reference(directory), list(PROMPT), []
    for _ in range(NUM_TOKENS):
        top = model(torch.tensor([ids])).logits[0, -1].topk(2)
        margins.append(top.values[0] - top.values[1])
        ids.append(int(top.indices[0]))
    return ids[len(PROMPT) :], torch.stack(margins)
