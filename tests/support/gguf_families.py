"""What of each family's small checkpoint has to be otherwise for a GGUF file to be able to say it."""

from __future__ import annotations

from typing import Any

from deepseek_models import YARN

EQUAL_SCALES = YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}
# Of `families.FAMILIES`.
BY_NUMBERS: dict[str, dict[str, Any]] = {
    "small tied llama": {},
    "qwen2 window": {"use_sliding_window": False},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": None},
    "phi3": {},
    "olmo2": {},
    "granite": {"residual_multiplier": 0.75, "attention_multiplier": 0.25, "logits_scaling": 1.75},
}
DENSE: dict[str, dict[str, Any]] = {
    "gemma": {},
    "glm": {"head_dim": 8},
    "glm4": {},
    "ernie4_5": {},
    "seed_oss": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "exaone4": {},
    "ministral3": {},
    "olmo3": {},
}
# Of `expert_families.EXPERT_FAMILIES`.
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "glm4_moe": {},
    "dots1": {"sliding_window": None},
    "olmoe": {},
}
# Of `deepseek_models.MODELS`.
LATENT: dict[str, dict[str, Any]] = {
    "v2": {},
    "v2 lite": {"attention_bias": False},
    "v2 groups, yarn": {"rope_parameters": EQUAL_SCALES},
    "v3": {},
    "v3 yarn": {"rope_parameters": EQUAL_SCALES},
    "glm": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
}
