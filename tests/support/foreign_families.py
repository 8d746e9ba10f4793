"""Seeded random checkpoints of families that only transformers' own layers run, and what it says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CTRLConfig,
    FlexOlmoConfig,
    GPT2Config,
    GPTNeoXConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    StableLmConfig,
    Starcoder2Config,
    VaultGemmaConfig,
)

from families import SIZES


@dataclass(frozen=True)
class Foreign:
    """A family's configuration beside `SIZES`, and a seed that keeps the likeliest two tokens apart.

    Attributes:
        embedding: about how large its numbers are.
    """

    config: type[PreTrainedConfig]
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    embedding: float = 0.5

    def make(self, directory: Path, **changes: Any) -> Path:
        model = AutoModelForCausalLM.from_config(
            self.config(**(SIZES | self.fields | changes)), dtype=torch.float32
        )
        generator = torch.Generator().manual_seed(self.seed)
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter is model.get_input_embeddings().weight:
                parameter.data = self.embedding * noise
            elif parameter.dim() == 1 and name.endswith("weight"):
                parameter.data = 1 + 0.3 * noise
            elif parameter.dim() == 1 or "wpe" in name or "positions" in name:
                parameter.data = 0.3 * noise
            else:
                parameter.data = noise * (1.5 / parameter.shape[-1] ** 0.5)
        model.save_pretrained(directory)
        return directory


FOREIGN = {
    # learned positions, transposed weights, tied
    "gpt2": Foreign(GPT2Config, {"tie_word_embeddings": True}, seed=2, embedding=0.15),
    # both residuals at once, layer norms, rotation of a quarter of a head
    "gpt_neox": Foreign(GPTNeoXConfig, {"use_parallel_residual": True}),
    # projections between embedding and layers; the final norm stands before the layers in the class
    "opt": Foreign(OPTConfig, {"word_embed_proj_dim": 16, "ffn_dim": 48}, seed=1, embedding=1.0),
    "phi": Foreign(PhiConfig, seed=1, embedding=0.15),
    # vectors that are multiplied, and a head as wide as asked
    "vaultgemma": Foreign(VaultGemmaConfig, {"head_dim": 16, "sliding_window": 7}, embedding=0.15),
    # the head multiplies the logits
    "cohere": Foreign(CohereConfig, {"logit_scale": 0.5}),
    "stablelm": Foreign(StableLmConfig, {"use_qkv_bias": True}),
    "starcoder2": Foreign(Starcoder2Config, {"sliding_window": 7}, seed=2),
    # writes over what it gets before the layers; numbers that are worked out, not loaded
    "ctrl": Foreign(CTRLConfig, {"dff": 48, "tie_word_embeddings": True}, seed=1, embedding=0.15),
    # the checkpoint has each expert by itself, the model has all in one
    "flex_olmo": Foreign(FlexOlmoConfig, {"num_experts": 4, "num_experts_per_tok": 2}, seed=1),
}


def greedy(directory: Path, prompts: Sequence[Sequence[int]], count: int) -> tuple[list[list[int]], float]:
    """The likeliest `count` ids after each prompt, without a cache; and the smallest margin between two."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found, margin = [], float("inf")
    with torch.no_grad():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(count):
                top = model(torch.tensor([ids])).logits[0, -1].topk(2)
                margin = min(margin, float(top.values[0] - top.values[1]))
                ids.append(int(top.indices[0]))
            found.append(ids[len(prompt) :])
    return found, margin


@torch.no_grad()
def logits_of(directory: Path, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """After every token: [len(ids), vocab] float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    found: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return found.float()
