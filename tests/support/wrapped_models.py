"""Seeded random checkpoints of models of more than text, by transformers, whose text models we serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Mistral3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

from families import FAMILIES, SIZES

_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


@dataclass(frozen=True)
class Wrapped:
    """The configuration of a whole, that of its text model, and a seed that keeps the likeliest two apart.

    Attributes:
        embedding: about how large its numbers are.
    """

    config: type[PreTrainedConfig]
    text: dict[str, Any]
    tower: dict[str, Any] = field(default_factory=lambda: _TOWER)
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    embedding: float = 0.5

    def make(self, directory: Path) -> Path:
        """The checkpoint in float32."""
        text = SIZES | self.text
        config = self.config(text_config=text, vision_config=self.tower, **self.fields)
        torch.manual_seed(self.seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(self.seed)
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.data += 0.3 * noise
            elif parameter.dim() == 1:
                parameter.data = 0.3 * noise
            elif "embed_tokens" in name:
                parameter.data = self.embedding * noise
            else:
                parameter.data = noise * (1.5 / parameter.shape[-1] ** 0.5)
        model.save_pretrained(directory)
        return directory


def _of_family(name: str, **fields: Any) -> dict[str, Any]:
    return FAMILIES[name].fields | fields


WRAPPED = {
    "gemma3": Wrapped(
        Gemma3Config,
        _of_family("gemma3", model_type="gemma3_text"),
        tower=_TOWER | {"model_type": "siglip_vision_model"},
        fields={"mm_tokens_per_image": 4},
        seed=1,
        embedding=0.08,
    ),
    "mistral3": Wrapped(
        Mistral3Config,
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        tower=_TOWER | {"model_type": "pixtral"},
        fields={"tie_word_embeddings": False},
    ),
    "ministral3": Wrapped(
        Mistral3Config,
        _of_family("ministral3", model_type="ministral3"),
        tower=_TOWER | {"model_type": "pixtral"},
        fields={"tie_word_embeddings": False},
    ),
    "qwen2_5_vl": Wrapped(
        Qwen2_5_VLConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        tower=_QWEN_TOWER,
    ),
    "qwen3_vl": Wrapped(
        Qwen3VLConfig,
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        tower=_QWEN_TOWER,
    ),
}


def whole_model(directory: Path) -> torch.nn.Module:
    """The model with its tower, by transformers."""
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def logits_after(model: torch.nn.Module, ids: Sequence[int]) -> Tensor:
    """What the whole model says of a text without a picture: [len(ids), vocab]."""
    logits: Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0]
    return logits
