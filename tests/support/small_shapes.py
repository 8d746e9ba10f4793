"""The configuration of a small Llama, without weights: for whoever plans, predicts or simulates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALL_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def write_small_llama(folder: Path, **changes: Any) -> str:
    """Write its `config.json` into a folder; returns the folder, as commands take it."""
    (folder / "config.json").write_text(json.dumps(SMALL_LLAMA | changes))
    return str(folder)
