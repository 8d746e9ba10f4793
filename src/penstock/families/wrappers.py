"""Models for more than text, of which only the text model is served; it must belong to a family we have.

The configuration of the text model is a section of the file. What belongs to the whole file and not to the
section, such as the dtype, the ids that end a text and how weights are quantised, is taken from the file.
Called by `families.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import UnsupportedModelError
from penstock.families.config_fields import ConfigFields, kind_of
from penstock.families.known.gemma import gemma3_spec
from penstock.families.known.mistral import ministral3_spec, mistral_spec
from penstock.families.known.qwen import qwen2_spec, qwen3_spec
from penstock.families.spec import ModelSpec
from penstock.families.text_names import text_name

_SECTION = "text_config"
# The file's own fields, which a section may lack.
_OF_THE_FILE = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")

_Read = Callable[[ConfigFields, str], ModelSpec]


def _gemma3_text_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of Gemma 3's text model.

    Published files give only the fields that differ from transformers' defaults.
    """
    defaults = {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    return gemma3_spec(config.with_defaults(**defaults), architecture)


_TEXT_MODELS: Mapping[str, Mapping[str, _Read]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": _gemma3_text_spec},
    "Mistral3ForConditionalGeneration": {"mistral": mistral_spec, "ministral3": ministral3_spec},
    # A token of a text has the same place in time, height and width, so positions are plain ones.
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": qwen2_spec, "qwen2_vl": qwen2_spec},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": qwen2_spec, "qwen2_5_vl": qwen2_spec},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": qwen3_spec},
}
WRAPPERS = tuple(_TEXT_MODELS)


def wrapper_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the text model of a model of more than text.

    Raises:
        UnsupportedModelError: the text model is not of a family that is served from within another.
    """
    fields = _text_fields(config)
    models = _TEXT_MODELS[architecture]
    model_type = fields.text("model_type", next(iter(models)))
    if model_type not in models:
        raise UnsupportedModelError(
            f"config.json: the text model of {architecture} has model_type {kind_of(model_type)}; "
            f"supported: {', '.join(models)}.",
            remedy="Use a text-only model, or another model of this kind.",
            param=f"{_SECTION}.model_type" if config.has(_SECTION) else "model_type",
        )
    return models[model_type](fields, architecture)


def _text_fields(config: ConfigFields) -> ConfigFields:
    """Return the text model's configuration: a section, or in older files fields of the whole file."""
    if not config.has(_SECTION):
        return config
    values = config.values()
    own = {name: values[name] for name in _OF_THE_FILE if values.get(name) is not None}
    if "quantization_config" in own:
        own["quantization_config"] = _with_text_names(own["quantization_config"])
    fields = config.section(_SECTION).with_defaults(**own)
    # As in transformers, the value in the file counts more than that in the section.
    tied = "tie_word_embeddings"
    return fields.with_values(**{tied: values[tied]}) if config.has(tied) else fields


def _with_text_names(section: Any) -> Any:
    """Return the section with the text model's own names for the modules that are not quantised."""
    ignored = section.get("ignore") if isinstance(section, dict) else None
    if not isinstance(ignored, list):
        return section
    names = [(text_name(name) or name) if isinstance(name, str) else name for name in ignored]
    return section | {"ignore": names}
