"""The scaling of positions in a GGUF file: by its metadata, or by factors that it keeps as tensors.

Called by `families.gguf_config`, and by `families.gguf_kinds` where an architecture says more. Torch-free; of
the tensors' data, the factors of the rotation alone are read.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from penstock.errors import CheckpointError
from penstock.families.gguf_fields import Fields, architecture_name, has, number, whole_number
from penstock.families.rope_spec import RopeSpec
from penstock.families.spec import ModelSpec
from penstock.gguf.file import GgufFile
from penstock.gguf.part import GgufTensor

_LLAMA_3_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS = "rope_factors_short.weight"
# Read with the configuration, and not as weights.
ROPE_FACTORS = (_LLAMA_3_FACTORS, "rope_factors_long.weight", _SHORT_FACTORS)
_LARGEST_FACTOR = 1e6
_YARN = {  # field of config.json -> key
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def rope_scaling(file: GgufFile) -> Fields | None:
    """Return the section of `config.json` that scales positions; None: they are not scaled by metadata.

    The factors of Llama 3.1, which are a tensor, come later (`with_factors`).
    """
    kind = file.metadata.text(f"{architecture_name(file)}.rope.scaling.type", "none")
    if _SHORT_FACTORS in file.tensors:
        return _longrope(file)
    if kind in ("none", ""):
        return None
    scaling: Fields = {"rope_type": kind, "factor": number(file, "rope.scaling.factor", 1.0)}
    if has(file, "rope.scaling.original_context_length"):
        name = "original_max_position_embeddings"
        scaling[name] = whole_number(file, "rope.scaling.original_context_length")
    if has(file, "rope.scaling.attn_factor"):
        scaling["attention_factor"] = number(file, "rope.scaling.attn_factor")
    if kind == "yarn":
        scaling |= {name: number(file, key) for name, key in _YARN.items() if has(file, key)}
    return scaling


def sharpened(file: GgufFile, scaling: Fields | None, unit: float) -> Fields | None:
    """Return the scaling with the file's number, if it has one, by which scores grow in stretched contexts.

    Args:
        scaling: the scaling without it (`rope_scaling`).
        unit: what the file's number is divided by. The quotient is rounded, since the file has float32.
    """
    key = "rope.scaling.yarn_log_multiplier"
    if scaling is None or not has(file, key):
        return scaling
    factor = round(number(file, key) / unit, 6)
    return scaling | {"mscale": factor, "mscale_all_dim": factor}


def _longrope(file: GgufFile) -> Fields:
    short = _factors(file, file.tensors[_SHORT_FACTORS])
    scaling: Fields = {
        "rope_type": "longrope",
        "short_factor": list(short),
        "long_factor": list(short),  # not used
        "original_max_position_embeddings": whole_number(
            file, "rope.scaling.original_context_length", whole_number(file, "context_length")
        ),
    }
    if has(file, "rope.scaling.attn_factor"):
        scaling["attention_factor"] = number(file, "rope.scaling.attn_factor")
    return scaling


def with_factors(file: GgufFile, spec: ModelSpec) -> RopeSpec:
    """Return the rotation with the factors of Llama 3.1 and later, if the file has them as a tensor.

    They have the form of longrope's short factors: one for each wavelength.
    """
    tensor = file.tensors.get(_LLAMA_3_FACTORS)
    if tensor is None:
        return spec.rope
    factors = _factors(file, tensor)
    if len(factors) != spec.rope.rotary_dim(spec.head_dim) // 2:
        raise CheckpointError(
            file=file.path.name,
            tensor=tensor.name,
            expected=f"{spec.rope.rotary_dim(spec.head_dim) // 2} factors, one for each rotated pair",
            found=str(len(factors)),
        )
    return dataclasses.replace(spec.rope, kind="longrope", short_factors=factors, attention_factor=1.0)


def _factors(file: GgufFile, tensor: GgufTensor) -> tuple[float, ...]:
    """Read the factors of wavelengths, which are float32."""
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(
            file=file.path.name,
            tensor=tensor.name,
            expected="F32 of one dimension",
            found=f"{tensor.type.name} of {list(tensor.shape)}",
        )
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.start)
        values = np.frombuffer(stream.read(tensor.num_bytes), "<f4")
    if len(values) != tensor.shape[0] or not ((values > 0) & (values <= _LARGEST_FACTOR)).all():
        raise CheckpointError(
            file=file.path.name,
            tensor=tensor.name,
            expected=f"{tensor.shape[0]} factors above 0, at most {_LARGEST_FACTOR:g}",
            found="others",
        )
    return tuple(values.tolist())
