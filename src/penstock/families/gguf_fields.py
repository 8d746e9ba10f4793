"""The fields of an architecture in the metadata of a GGUF file, number by number.

A key such as `qwen2.block_count` begins with the architecture's name. The argument `name` of these functions
is the rest of the key. Called by the modules that turn metadata into the fields of `config.json`
(`families.gguf_config`, `families.gguf_kinds`, `families.gguf_experts`, `families.gguf_rope`). Torch-free.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import CheckpointError, UnsupportedModelError
from penstock.gguf.file import GgufFile

Fields = dict[str, Any]
_MOST_LISTED = 1 << 16  # layers; more than any family takes


def architecture_name(file: GgufFile) -> str:
    """Return what the file calls its architecture."""
    return file.metadata.text("general.architecture")


def key_of(file: GgufFile, name: str) -> str:
    """Return the whole key of a value of the architecture."""
    return f"{architecture_name(file)}.{name}"


def has(file: GgufFile, name: str) -> bool:
    """Return whether the file gives this value of its architecture."""
    return key_of(file, name) in file.metadata


def whole_number(file: GgufFile, name: str, default: int | None = None) -> int:
    """Return a number of the architecture. Where the file has one for each layer, they must be equal."""
    key = key_of(file, name)
    value = file.metadata.get(key)
    if not isinstance(value, np.ndarray):
        return file.metadata.integer(key, default)
    if len(value) and value.dtype.kind in "iu" and (value == value[0]).all():
        return int(value[0])
    raise CheckpointError(
        file=file.path.name,
        key=key,
        expected="one number for all layers",
        found=f"{len(set(value.tolist()))} numbers",
        remedy="Use another model; layers of different shapes are not supported.",
    )


def number(file: GgufFile, name: str, default: float | None = None) -> float:
    """Return a number of the architecture that may have a fraction."""
    return float(file.metadata.number(key_of(file, name), default))


def width_per_head(file: GgufFile) -> int:
    """Return the part of the hidden states' width that falls to a head."""
    return whole_number(file, "embedding_length") // max(whole_number(file, "attention.head_count"), 1)


def head_width(file: GgufFile) -> int:
    """Return the width of a head of queries and keys."""
    return whole_number(file, "attention.key_length", width_per_head(file))


def flag(file: GgufFile, name: str, default: bool) -> bool:
    """Return a truth value of the architecture."""
    return file.metadata.flag(key_of(file, name), default)


def unsupported(file: GgufFile, what: str) -> UnsupportedModelError:
    """Return the error for a variant of a served architecture that is not built."""
    return UnsupportedModelError(f"{file.path.name}: {what}.", remedy="Use another model.", param="model")


def has_tensor(file: GgufFile, part: str) -> bool:
    """Return whether the first layer has this tensor, such as `attn_q.bias`."""
    return f"blk.0.{part}" in file.tensors


def num_further_layers(file: GgufFile) -> int:
    """Return how many layers the file has behind the model's last one, to guess further tokens."""
    return whole_number(file, "nextn_predict_layers", 0)


def num_layers(file: GgufFile) -> int:
    """Return how many layers the model has."""
    return whole_number(file, "block_count") - num_further_layers(file)


def kinds_of_layers(file: GgufFile) -> list[str] | None:
    """Return for each layer whether it has a window, in the words of `layer_types`; None: the file has none.

    The file has a truth value for each layer, or the length of a pattern whose last layer sees all. The
    result is None, too, for a number of layers that every family refuses.
    """
    name = "attention.sliding_window_pattern"
    if not has(file, name) or not 0 < num_layers(file) <= _MOST_LISTED:
        return None
    pattern = file.metadata[key_of(file, name)]
    layers = range(num_layers(file))
    if not isinstance(pattern, np.ndarray):
        period = whole_number(file, name)
        slides = [period == 0 or (layer + 1) % period != 0 for layer in layers]
    elif len(pattern) >= len(layers):
        slides = [bool(pattern[layer]) for layer in layers]
    else:
        raise CheckpointError(
            file=file.path.name,
            key=key_of(file, name),
            expected=f"a value for each of {len(layers)} layers",
            found=str(len(pattern)),
        )
    return ["sliding_attention" if each else "full_attention" for each in slides]
