"""Seeded random checkpoints of families with many small experts and plain attention, by transformers.

Corrections are as large as the scores that they correct; heads are rotated in part where a family does so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Dots1Config, Glm4MoeConfig, OlmoeConfig, PreTrainedConfig

from families import SIZES

_EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class ExpertFamily:
    """A configuration beside `families.SIZES`, and a seed that keeps the likeliest two apart."""

    config: type[PreTrainedConfig]
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def make(self, directory: Path, **changes: Any) -> Path:
        """The checkpoint in float32."""
        config = self.config(**(SIZES | self.fields | changes))
        torch.manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        seed_weights(model, self.seed)
        model.save_pretrained(directory)
        return directory


def seed_weights(model: nn.Module, seed: int) -> None:
    """Set all weights, and corrections of routers, to noise of a size at which everything counts."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in (*sorted(model.named_parameters()), *corrections(model)):
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            weight.data += 0.3 * noise
        elif weight.dim() == 1:
            weight.data = 0.3 * noise
        else:
            weight.data = noise * (0.5 if "embed_tokens" in name else 1.5 * weight.shape[-1] ** -0.5)


def corrections(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, each) for name, each in sorted(model.named_buffers()) if name.endswith("correction_bias")]


EXPERT_FAMILIES = {
    "glm4_moe": ExpertFamily(
        Glm4MoeConfig,
        _EXPERTS
        | {
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "num_nextn_predict_layers": 0,
        },
    ),
    "dots1": ExpertFamily(Dots1Config, _EXPERTS | {"sliding_window": 7, "max_window_layers": 1}),
    "olmoe": ExpertFamily(OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 2}),
}
