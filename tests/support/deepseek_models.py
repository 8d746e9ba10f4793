"""Seeded random DeepSeek checkpoints, written by transformers: all that V2 and V3 differ in, in small.

Heads of queries, of values and latent vectors have widths of their own, and so have layers with and without
experts. Corrections are as large as the scores that they correct.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    PreTrainedConfig,
)

from expert_families import EXPERT_FAMILIES, seed_weights

SIZES = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "rope_theta": 1e4,
    "mscale": 1.4,
    "mscale_all_dim": 0.8,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,
}
GROUPS = {"n_group": 4, "topk_group": 2}


@dataclass(frozen=True)
class DeepseekModel:
    """A configuration beside `SIZES`, and a seed that keeps the likeliest two tokens apart."""

    config: type[PreTrainedConfig]
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def make(self, directory: Path, **changes: Any) -> Path:
        """The checkpoint in float32."""
        torch.manual_seed(self.seed)
        config = self.config(**(SIZES | self.fields | changes))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        seed_weights(model, self.seed)
        model.save_pretrained(directory)
        return directory


def make_with_mtp(directory: Path, *, is_right: bool = False, name: str = "v3", **changes: Any) -> Path:
    """A checkpoint in float32 with a layer behind the last that guesses one token further.

    Args:
        is_right: its guesses are right as a rule: all layers add little to what a token says by itself, and
            it looks at the token that follows alone. Else its weights are random.
    """
    (MODELS | EXPERT_FAMILIES)[name].make(directory, **changes)
    path, config_path = directory / "model.safetensors", directory / "config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors, layer, size = load_file(path), config["num_hidden_layers"], config["hidden_size"]
    if is_right:
        outputs = [key for key in tensors if key.endswith(("o_proj.weight", "down_proj.weight"))]
        tensors |= {key: 0.02 * tensors[key] for key in outputs}
    generator = torch.Generator().manual_seed(3)
    own = {
        "enorm.weight": 1.0 + 0.3 * torch.randn(size, generator=generator),
        "hnorm.weight": 1.0 + 0.3 * torch.randn(size, generator=generator),
        "eh_proj.weight": torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5,
        "shared_head.norm.weight": 1.0 + 0.3 * torch.randn(size, generator=generator),
    }
    if is_right:
        own["enorm.weight"] = torch.ones(size)
        own["eh_proj.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
        own["shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    own["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    own["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    last, prefix = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
    for key in [key for key in tensors if key.startswith(last)]:
        value = tensors[key]
        mixed = value.flip(0) if not is_right and value.dim() > 1 and "gate" not in key else value.clone()
        own[key.removeprefix(last)] = mixed
    tensors |= {prefix + key: value.contiguous() for key, value in own.items()}
    save_file(tensors, path, {"format": "pt"})
    return directory


MODELS = {
    "v2": DeepseekModel(DeepseekV2Config),
    "v2 lite": DeepseekModel(
        DeepseekV2Config, {"q_lora_rank": None, "attention_bias": True, "n_shared_experts": 1}
    ),
    "v2 groups, yarn": DeepseekModel(
        DeepseekV2Config,
        GROUPS
        | {
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "rope_parameters": YARN,
        },
        seed=1,
    ),
    "v3": DeepseekModel(DeepseekV3Config, GROUPS),
    "v3 yarn": DeepseekModel(
        DeepseekV3Config,
        {
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.9,
            "rope_parameters": YARN,
        },
        seed=2,
    ),
    "v3 halves": DeepseekModel(DeepseekV3Config, GROUPS | {"rope_interleave": False}),
    # GLM-4.7-Flash, which lists its layers with a plain MLP
    "glm": DeepseekModel(
        Glm4MoeLiteConfig, {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 1}
    ),
}
