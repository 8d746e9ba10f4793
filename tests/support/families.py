"""Seeded random checkpoints of every family, written by transformers, in which what is special bites."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from depth import soaked

SIZES = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """A family's configuration beside `SIZES`, and a seed that keeps the likeliest two tokens apart.

    Attributes:
        embedding: about how large its numbers are; where they are multiplied, large ones make a tied head
            repeat its input for ever.
    """

    config: type[PreTrainedConfig]
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    embedding: float = 0.5

    def make(self, directory: Path, **changes: Any) -> Path:
        config = self.config(**(SIZES | self.fields | changes))
        torch.manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(self.seed)
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:  # about what they start with: 1, or 0 where 1 is added
                parameter.data += 0.3 * noise
            elif parameter.dim() == 1:
                parameter.data = 0.3 * noise
            elif "embed_tokens" in name:
                parameter.data = self.embedding * noise
            else:
                parameter.data = noise * (1.5 / parameter.shape[1] ** 0.5)
        model.save_pretrained(directory)
        return directory


FAMILIES = {
    "small tied llama": Family(LlamaConfig, {"tie_word_embeddings": True, "rope_theta": 1e5}),
    "mistral": Family(MistralConfig, {"sliding_window": 7}),
    "qwen2 window": Family(
        Qwen2Config, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, 1
    ),
    "gemma2": Family(
        Gemma2Config,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 1.0,
        },
        embedding=0.08,
    ),
    "gemma3": Family(
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        seed=1,
        embedding=0.08,
    ),
    "phi3": Family(
        Phi3Config,
        {
            "sliding_window": 9,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3 longrope": Family(
        Phi3Config,
        {
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [2.0, 4.0, 8.0, 16.0],
            },
        },
    ),
    "olmo2": Family(Olmo2Config),
    "olmo2 one kv head": Family(Olmo2Config, {"num_key_value_heads": 1}),
    "olmo3": Family(
        Olmo3Config,
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 5e5,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "granite": Family(
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.7,
            "tie_word_embeddings": True,
        },
        embedding=0.15,
    ),
    "qwen3": Family(Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    # What is special in those from here on is in the entries of `IN_CI` too: the rest of them is `_LATER`.
    "gemma": Family(GemmaConfig, {"head_dim": 16}, embedding=0.08),
    # neighbouring dimensions, of half a head, are rotated; gate and up are one tensor, queries are not
    "glm": Family(GlmConfig, {"head_dim": 16}, seed=2),
    "glm4": Family(Glm4Config, {"head_dim": 16, "partial_rotary_factor": 0.75}),
    "ernie4_5": Family(Ernie4_5Config, {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}),
    "seed_oss": Family(SeedOssConfig, {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": Family(SmolLM3Config, {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": False}),
    "exaone4": Family(
        Exaone4Config,
        {
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    # the prompt goes on to where queries are twice as large
    "ministral3": Family(
        Ministral3Config,
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.9,
            },
        },
    ),
}

# Of the families at the end of the table: those that `./run test` compares with transformers, and those with
# which it does all else; the soak does all with all.
COMPARED = ("glm4", "ernie4_5", "smollm3", "exaone4", "ministral3")
IN_CI = ("glm4", "ministral3")
_LATER = ("gemma", "glm", "glm4", "ernie4_5", "seed_oss", "smollm3", "exaone4", "ministral3")


def names(in_ci: Collection[str]) -> list[Any]:
    """Return parameters: all families, of the later ones those that are not given in the soak alone."""
    return [name if name not in _LATER or name in in_ci else soaked(name)[0] for name in FAMILIES]
