"""Kinds and formats of models that cannot be served: told apart by their files and by `config.json`.

Called by `families.registry` before a family reads the configuration. So the error says what the model is and
what can be done, and not that some field is missing in a file that is right. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ModelConfigError, UnsupportedModelError
from penstock.families.config_fields import ConfigFields, kind_of
from penstock.gguf.part_names import SUFFIX

_GGUF_MAGIC = b"GGUF"
_TEXT_ALONE = "Use a text-only model; its architecture ends in ForCausalLM."
_ANOTHER = "Use another model; no other checkpoint or setting of this one works."

_SPARSE = "its attention is sparse (index_topk), which is not supported"
_OTHER_INPUTS = (
    "its layers need more than the previous layer's hidden states (their own inputs, or keys of other "
    "layers), which stages do not send"
)
_UNLIKE_HEADS = (
    "its layers have heads of two shapes, and in some sizes their own inputs or keys of other layers"
)
_SINKS = "its attention has sinks, which are not supported"
_STATES = "some layers keep a state besides keys and values, which is not supported"

_MODEL_TYPES: Mapping[str, str] = {
    "bamba": _STATES,
    "deepseek_v32": _SPARSE,
    "falcon_h1": _STATES,
    "falcon_mamba": _STATES,
    "gemma3n": _OTHER_INPUTS,
    "gemma4": _UNLIKE_HEADS,
    "gemma4_unified": _UNLIKE_HEADS,
    "glm_moe_dsa": _SPARSE,
    "gpt_oss": _SINKS,
    "jamba": _STATES,
    "kimi_linear": _STATES,
    "lfm2": _STATES,
    "lfm2_moe": _STATES,
    "mamba": _STATES,
    "mamba2": _STATES,
    "nemotron_h": _STATES,
    "qwen3_5": _STATES,
    "qwen3_5_moe": _STATES,
    "qwen3_next": _STATES,
    "zamba2": _STATES,
}
_STATEFUL_LAYERS = frozenset(("conv", "linear_attention", "mamba", "recurrent"))
_FIELDS: Mapping[str, str] = {
    "index_topk": _SPARSE,
    "hidden_size_per_layer_input": _OTHER_INPUTS,
    "num_kv_shared_layers": _OTHER_INPUTS,
}
_MORE_THAN_TEXT = ("text_config", "vision_config", "audio_config")


def require_known_kind(config: ConfigFields, architectures: Sequence[str], served: Sequence[str]) -> None:
    """Raise `UnsupportedModelError` for a model whose kind or format is known, and is not served.

    Args:
        architectures: architectures of the model, as `config.json` names them.
        served: architectures of models of more than text whose text part is served.
    """
    fields = config.values()
    _refuse_mlx(fields)
    if fields.get("is_encoder_decoder") is True:
        raise UnsupportedModelError(
            "config.json: is_encoder_decoder is true, but a pipeline needs a single list of layers.",
            remedy="Use a model with a decoder only.",
            param="is_encoder_decoder",
        )
    is_served = any(name in served for name in architectures)
    if not is_served and architectures and all(map(_is_more_than_text, architectures)):
        _refuse_more_than_text(architectures[0], fields)
    reason = _MODEL_TYPES.get(str(fields.get("model_type")).removesuffix("_text"))
    reason = reason or (_STATES if _has_stateful_layers(fields.get("layer_types")) else None)
    reason = reason or next((why for field, why in _FIELDS.items() if _is_set(fields.get(field))), None)
    if reason is not None:
        named = kind_of(architectures[0]).strip('"') if architectures else "the model"
        raise UnsupportedModelError(
            f"{named} is not supported: {reason}.", remedy=_ANOTHER, param="architectures"
        )


def _has_stateful_layers(kinds: Any) -> bool:
    """Return whether a list of kinds of layers has one that keeps a state."""
    return isinstance(kinds, list) and any(
        isinstance(kind, str) and kind in _STATEFUL_LAYERS for kind in kinds
    )


def _is_more_than_text(architecture: str) -> bool:
    return architecture.endswith("ForConditionalGeneration")


def _is_set(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _refuse_more_than_text(name: str, fields: Mapping[str, Any]) -> None:
    sections = [section for section in _MORE_THAN_TEXT if isinstance(fields.get(section), dict)]
    why = f" (config.json has {' and '.join(sections)})" if sections else ""
    raise UnsupportedModelError(
        f"{kind_of(name)} reads images, sound or other inputs{why}, but Penstock serves only text.",
        remedy=_TEXT_ALONE,
        param="architectures",
    )


def _refuse_mlx(fields: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModelError` for weights in MLX's format.

    MLX writes bits and group size without the name of a method, in one section or in two equal ones.
    """
    for name in ("quantization", "quantization_config"):
        section = fields.get(name)
        if not isinstance(section, dict) or "quant_method" in section:
            continue
        if {"bits", "group_size"} <= section.keys():
            raise UnsupportedModelError(
                f"config.json: {name} is in MLX's quantised format, which is not supported.",
                remedy="Use the original checkpoint, optionally with --quantization int8 or int4.",
                param=name,
            )


def file_refusal(path: Path, shown: str) -> ModelConfigError:
    """Return the error for a model that is given as a file.

    Args:
        shown: the model as the user typed it, safe to print.
    """
    return ModelConfigError(
        f"model {shown} is a file, not a directory.",
        remedy="Give the directory that holds config.json, or a GGUF file.",
        param="model",
    )


def refuse_other_format(directory: Path) -> None:
    """Raise `UnsupportedModelError` for a directory that holds an adapter and no `config.json`."""
    if (directory / "config.json").exists() or not directory.is_dir():
        return
    if (directory / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"{directory} holds an adapter (LoRA), which is not supported.",
            remedy="Merge it into its base model, and give the directory of the result.",
            param="model",
        )


def is_gguf(path: Path) -> bool:
    """Return whether a file is a model in GGUF, by its name or its first bytes."""
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        if not path.is_file():  # a pipe would block for ever
            return False
        with path.open("rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError:
        return False
