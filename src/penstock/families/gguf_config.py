"""The reading of a GGUF file's model, as a `ModelSpec`.

The metadata become the fields of a `config.json`, which the family of the same model reads
(`families.known`), so that there is one description of a family for both formats. Called by
`families.registry`. Torch-free.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping

from penstock.errors import CheckpointError, UnsupportedModelError
from penstock.families.config_fields import ConfigFields
from penstock.families.experts_spec import ExpertNames
from penstock.families.gguf_fields import (
    Fields,
    architecture_name,
    has,
    num_further_layers,
    num_layers,
    number,
    whole_number,
)
from penstock.families.gguf_kinds import GgufKind, kind_of_file, known_architectures
from penstock.families.gguf_names import StoredTensor, stored_tensors
from penstock.families.gguf_rope import rope_scaling, with_factors
from penstock.families.gguf_shapes import require_shapes
from penstock.families.gguf_types import FLOAT_TYPES, require_known_types
from penstock.families.quantization_spec import BlockQuantization
from penstock.families.spec import ModelSpec
from penstock.gguf.file import GgufFile
from penstock.gguf.part import GgufTensor
from penstock.kernels.block_formats import BLOCK_FORMATS
from penstock.tokenizer.sources.gguf_vocabulary import gguf_end_ids, has_vocabulary

_EMBEDDING = "token_embd.weight"
_OF_IMAGES = ("v.", "mm.")  # of the tower for images, and of the projector behind it

_Read = Callable[[ConfigFields, str], ModelSpec]


def gguf_spec(file: GgufFile, families: Mapping[str, _Read], *, dequantize: bool = False) -> ModelSpec:
    """Return the model of a GGUF file.

    Args:
        families: by architecture, the function that reads its configuration.
        dequantize: weights in quantised blocks are to become numbers of the dtype.

    Raises:
        UnsupportedModelError: the architecture, or the type of a tensor, is not served; or types are to be
            dequantised that need the package `gguf`, which is not installed.
        CheckpointError: the file lacks a tensor or a number of the metadata.
        ModelConfigError: a number is out of range.
    """
    kind = kind_of_file(file)
    if kind is None or kind.architecture not in families:
        raise UnsupportedModelError(
            f"{file.path.name} has the architecture {architecture_name(file)!r}; supported in GGUF files: "
            f"{', '.join(known_architectures())}.",
            remedy="Use a supported model, or the Hugging Face checkpoint that the file was made from.",
            param="model",
        )
    _require_text_alone(file)
    require_known_types(file, dequantize=dequantize)
    fields = ConfigFields(_fields(file, kind), file=file.path.name)
    spec = families[kind.architecture](fields, kind.architecture)
    stored = gguf_tensors(file, spec)
    require_shapes(stored, spec, file.path.name)
    spec = dataclasses.replace(
        spec, rope=with_factors(file, spec), num_unused_layers=num_further_layers(file)
    )
    if dequantize:
        has_blocks = any(tensor.type.name not in FLOAT_TYPES for tensor in file.tensors.values())
        return dataclasses.replace(spec, is_dequantized=has_blocks)
    return dataclasses.replace(spec, quantization=_quantization(file, stored))


def _require_text_alone(file: GgufFile) -> None:
    """Raise `UnsupportedModelError` for a file with a part for images, such as Ollama's of Gemma 3 4B."""
    if any(name.startswith(_OF_IMAGES) for name in file.tensors):
        raise UnsupportedModelError(
            f"{file.path.name} has a part for images beside the text model, as some files of Ollama do; such "
            "files are not supported.",
            remedy="Use a file of the text model alone, as llama.cpp converts it; the hub has them.",
            param="model",
        )


def gguf_tensors(file: GgufFile, spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return the tensors of a model's file, by the names that our layers have for them."""
    return stored_tensors(file, ExpertNames() if spec.experts is None else spec.experts.names)


def _fields(file: GgufFile, kind: GgufKind) -> Fields:
    """Return the fields of `config.json` that the metadata stand for."""
    fields: Fields = {
        "hidden_size": whole_number(file, "embedding_length"),
        "num_hidden_layers": num_layers(file),
        "num_attention_heads": whole_number(file, "attention.head_count"),
        "max_position_embeddings": whole_number(file, "context_length"),
        "rms_norm_eps": number(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": number(file, "rope.freq_base", 10_000.0),
        "vocab_size": _embedding(file).shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        "rope_scaling": rope_scaling(file),
    }
    optional = {
        "intermediate_size": "feed_forward_length",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
    }
    fields |= {name: whole_number(file, key) for name, key in optional.items() if has(file, key)}
    fields |= kind.fields(file)
    _require_equal_heads(file, fields)
    return fields | _token_ids(file) | _rotated_part(file, fields)


def _embedding(file: GgufFile) -> GgufTensor:
    tensor = file.tensors.get(_EMBEDDING)
    if tensor is None or len(tensor.shape) != 2:
        found = "no such name" if tensor is None else f"shape {list(tensor.shape)}"
        raise CheckpointError(
            file=file.path.name, tensor=_EMBEDDING, expected="a tensor of two dimensions", found=found
        )
    return tensor


def _require_equal_heads(file: GgufFile, fields: Fields) -> None:
    key = "attention.value_length"
    if not (has(file, key) and "head_dim" in fields) or "kv_lora_rank" in fields:
        return
    keys, values = fields["head_dim"], whole_number(file, key)
    if values != keys:
        raise UnsupportedModelError(
            f"{file.path.name}: a head has {keys} numbers in keys and {values} in values; different sizes "
            "are not supported.",
            remedy="Use another model.",
            param="model",
        )


def _token_ids(file: GgufFile) -> Fields:
    ids: Fields = {
        name: file.metadata.integer(f"tokenizer.ggml.{name}")
        for name in ("bos_token_id", "eos_token_id")
        if f"tokenizer.ggml.{name}" in file.metadata
    }
    if has_vocabulary(file):
        ids["eos_token_id"] = gguf_end_ids(file.metadata)
    return ids


def _rotated_part(file: GgufFile, fields: Fields) -> Fields:
    head_dim = fields.get("head_dim") or fields["hidden_size"] // max(fields["num_attention_heads"], 1)
    rotated = whole_number(file, "rope.dimension_count", head_dim)
    if not head_dim:  # the family refuses heads of width 0
        return {}
    # Given even if it is 1: some families rotate half of a head unless the configuration says otherwise.
    return {"partial_rotary_factor": rotated / head_dim}


def _dtype(file: GgufFile) -> str:
    """Return the dtype to compute in: that of the embedding where it is stored in floats, else bfloat16."""
    return FLOAT_TYPES.get(_embedding(file).type.name, "bfloat16")


def _quantization(file: GgufFile, stored: Mapping[str, StoredTensor]) -> BlockQuantization | None:
    """Return how the weights are quantised; None: all of them are floats."""
    formats = {
        name.removesuffix(".weight"): each.tensor.type.name
        for name, each in stored.items()
        if each.tensor.type.name in BLOCK_FORMATS
    }
    if not formats:
        return None
    tensors = file.tensors.values()
    num_values = sum(math.prod(tensor.shape) for tensor in tensors)
    counts = Counter(tensor.type.name for tensor in tensors if tensor.type.name in BLOCK_FORMATS)
    return BlockQuantization(
        formats=formats,
        num_tensors=tuple(counts.most_common()),
        mean_bits=8 * sum(tensor.num_bytes for tensor in tensors) / num_values,
    )
