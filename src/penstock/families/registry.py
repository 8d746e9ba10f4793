"""Finds a model on disk and reads what it is.

`resolve_model_directory` turns what the user typed into a directory or a GGUF file; `load_spec` reads a
`ModelSpec` from it. The supervisor and the command line call both, a rank only `load_spec`, or
`load_gguf_spec` for a file that it has opened. Torch-free, and nothing here opens a connection: a model of
the hub must have been downloaded before (`local_models`). Code that a checkpoint brings along (`auto_map`) is
never run.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.engine import ModelImpl
from penstock.errors import ModelConfigError, UnsupportedModelError
from penstock.families.config_fields import ConfigFields, kind_of, read_config
from penstock.families.known.deepseek import deepseek_v2_spec, deepseek_v3_spec
from penstock.families.known.dots import dots1_spec
from penstock.families.known.ernie import ernie4_5_spec
from penstock.families.known.exaone import exaone4_spec
from penstock.families.known.gemma import gemma2_spec, gemma3_spec, gemma_spec
from penstock.families.known.glm import glm4_moe_lite_spec, glm4_moe_spec, glm4_spec, glm_spec
from penstock.families.known.granite import granite_spec
from penstock.families.known.llama import llama_spec
from penstock.families.known.mistral import ministral3_spec, mistral_spec
from penstock.families.known.mixtral import mixtral_spec
from penstock.families.known.olmo import olmo2_spec, olmo3_spec, olmoe_spec
from penstock.families.known.phi import phi3_spec
from penstock.families.known.qwen import qwen2_spec, qwen3_spec
from penstock.families.known.qwen_moe import qwen2_moe_spec, qwen3_moe_spec
from penstock.families.known.seed import seed_oss_spec
from penstock.families.known.smollm import smollm3_spec
from penstock.families.refused_kinds import (
    file_refusal,
    is_gguf,
    refuse_other_format,
    require_known_kind,
)
from penstock.families.spec import ModelSpec
from penstock.families.transformers_fields import EXTRA, has_transformers, knows, transformers_spec
from penstock.families.wrappers import WRAPPERS, wrapper_spec
from penstock.local_models.gguf_names import gguf_models
from penstock.local_models.locating import locate_model
from penstock.request import VectorShape

if TYPE_CHECKING:
    from penstock.gguf.file import GgufFile

DEMO_MODEL = "demo"
GENERATION_FILE = "generation_config.json"

_logger = logging.getLogger(__name__)

_Read = Callable[[ConfigFields, str], ModelSpec]

_FAMILIES: dict[str, _Read] = {
    "DeepseekV2ForCausalLM": deepseek_v2_spec,
    "DeepseekV3ForCausalLM": deepseek_v3_spec,
    "Dots1ForCausalLM": dots1_spec,
    "Ernie4_5ForCausalLM": ernie4_5_spec,
    "Exaone4ForCausalLM": exaone4_spec,
    "Gemma2ForCausalLM": gemma2_spec,
    "Gemma3ForCausalLM": gemma3_spec,
    "GemmaForCausalLM": gemma_spec,
    "Glm4ForCausalLM": glm4_spec,
    "Glm4MoeForCausalLM": glm4_moe_spec,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite_spec,
    "GlmForCausalLM": glm_spec,
    "GraniteForCausalLM": granite_spec,
    "LlamaForCausalLM": llama_spec,
    "MiMoForCausalLM": qwen2_spec,
    "Ministral3ForCausalLM": ministral3_spec,
    "MistralForCausalLM": mistral_spec,
    "MixtralForCausalLM": mixtral_spec,
    "Olmo2ForCausalLM": olmo2_spec,
    "Olmo3ForCausalLM": olmo3_spec,
    "OlmoeForCausalLM": olmoe_spec,
    "Phi3ForCausalLM": phi3_spec,
    "Qwen2ForCausalLM": qwen2_spec,
    "Qwen2MoeForCausalLM": qwen2_moe_spec,
    "Qwen3ForCausalLM": qwen3_spec,
    "Qwen3MoeForCausalLM": qwen3_moe_spec,
    "SeedOssForCausalLM": seed_oss_spec,
    "SmolLM3ForCausalLM": smollm3_spec,
    **dict.fromkeys(WRAPPERS, wrapper_spec),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)

_ABOVE_ZERO = 1e-6
_GENERATION_RANGES = {  # within those of penstock.request.SamplingParams
    "temperature": (0.0, 2.0),
    "top_p": (_ABOVE_ZERO, 1.0),
    "min_p": (0.0, 1.0),
}
_PENALTY_RANGE = (_ABOVE_ZERO, 10.0)


def load_spec(directory: Path, model_impl: ModelImpl = "auto", *, dequantize: bool = False) -> ModelSpec:
    """Return the spec of the model that `directory` holds.

    Args:
        directory: directory of the model, or its GGUF file.
        model_impl: whose layers are to run the model; "auto": ours if its architecture has any, else
            transformers'.
        dequantize: weights of a GGUF file are to be held as numbers of the dtype.

    Raises:
        UnsupportedModelError: the model is of a kind or format that is not served; it is a GGUF file, and
            transformers' layers are to run it; or `config.json` names an architecture that is not in
            `SUPPORTED_ARCHITECTURES`, and transformers may not run it, is not installed, or cannot run it.
        ModelConfigError: a file is unreadable, or a field is missing, of the wrong type or out of range.
        CheckpointError: a GGUF file is damaged, or lacks a tensor or a number of the metadata.
    """
    if not directory.is_dir():
        if model_impl == "transformers":
            raise UnsupportedModelError(
                f"{directory.name} is a GGUF file, which the layers of transformers do not run here.",
                remedy="Leave --model-impl out, or give the Hugging Face checkpoint of the model.",
                param="model_impl",
            )
        from penstock.gguf.file import GgufFile  # here: numpy is slow to import

        return load_gguf_spec(GgufFile.open(directory), dequantize=dequantize)
    refuse_other_format(directory)
    config = read_config(directory / "config.json")
    if config.has("auto_map"):
        _logger.warning("config.json: auto_map names code to run; it is ignored")
    architecture, read = _architecture(config, model_impl)
    spec = read(config, architecture)
    generation_file = directory / GENERATION_FILE
    return _with_generation(spec, read_config(generation_file)) if generation_file.exists() else spec


def load_gguf_spec(file: GgufFile, *, dequantize: bool = False) -> ModelSpec:
    """Return the spec of the model in a GGUF file that is open already; see `load_spec`."""
    from penstock.families.gguf_config import gguf_spec  # here: numpy is slow to import

    return gguf_spec(file, _FAMILIES, dequantize=dequantize)


def _architecture(config: ConfigFields, model_impl: ModelImpl) -> tuple[str, _Read]:
    """Return the first known architecture, and the function that reads its config."""
    names = config.text_list("architectures")
    require_known_kind(config, names, WRAPPERS if model_impl != "transformers" else ())
    if model_impl != "transformers":
        for name in names:
            if name in _FAMILIES:
                return name, _FAMILIES[name]
    if model_impl != "penstock":
        for name in names:
            if knows(name, config.text("model_type", "none")):
                return name, transformers_spec
    declared = ", ".join(kind_of(name).strip('"') for name in names[:4]) or "none"
    raise UnsupportedModelError(
        f"config.json asks for architecture {declared}; supported: see docs/models.md.",
        remedy=_remedy(model_impl),
        param="architectures",
    )


def _remedy(model_impl: ModelImpl) -> str:
    if not has_transformers():
        return f"Run `pip install {EXTRA}` for more architectures, or use a supported one."
    if model_impl == "penstock":
        return "Leave --model-impl out for more architectures, or use a supported one."
    return "Use a supported architecture; the installed transformers cannot run this one either."


def _with_generation(spec: ModelSpec, fields: ConfigFields) -> ModelSpec:
    own_eos = fields.token_ids("eos_token_id", spec.vocab_size)
    return dataclasses.replace(
        spec,
        eos_token_ids=tuple(dict.fromkeys(own_eos + spec.eos_token_ids)),
        generation_defaults=_generation_defaults(fields, spec.vocab_size),
    )


def load_generation_defaults(directory: Path, vocab_size: int) -> dict[str, float]:
    """Return `ModelSpec.generation_defaults` alone, whichever layers run the model.

    Raises:
        ModelConfigError: `generation_config.json` is unreadable, or a field of it is bad.
    """
    path = directory / GENERATION_FILE  # a GGUF file has none
    return _generation_defaults(read_config(path), vocab_size) if path.exists() else {}


def load_vector_shape(directory: Path, hidden_size: int) -> VectorShape:
    """Return the lengths of the vectors that an embedding model gives: whole, and cut as it was trained for.

    `matryoshka_dimensions` lists shorter lengths; `is_matryoshka` alone means any (arXiv 2205.13147).

    Raises:
        ModelConfigError: `config.json` is unreadable, or one of these fields is bad.
    """
    if not directory.is_dir():
        return VectorShape(size=hidden_size, cuts=(), any_cut=False)
    fields = read_config(directory / "config.json")
    cuts = tuple(fields.integer_list("matryoshka_dimensions", 1, hidden_size))
    is_trained = fields.flag("is_matryoshka", False)
    return VectorShape(size=hidden_size, cuts=cuts, any_cut=is_trained and not cuts)


def _generation_defaults(fields: ConfigFields, vocab_size: int) -> dict[str, float]:
    """Return the sampling parameters that the checkpoint asks for.

    Without `do_sample` only the penalty counts, which transformers applies to greedy texts too. The other
    numbers are then leftovers.
    """
    ranges = {"repetition_penalty": _PENALTY_RANGE}
    is_drawn = fields.flag("do_sample", False)
    if is_drawn:
        ranges |= _GENERATION_RANGES
    defaults: dict[str, float] = {
        name: fields.number(name, low, high) for name, (low, high) in ranges.items() if fields.has(name)
    }
    if not is_drawn:
        return defaults
    if fields.has("top_k"):
        defaults["top_k"] = fields.integer("top_k", -1, vocab_size)
    return defaults


def resolve_model_directory(name: str) -> Path:
    """Return a model's directory: `demo`, a path, or the name of a model on this machine.

    For a GGUF model the path of its file is returned, also if `name` is a directory that has no other model.
    A path that exists wins over a name; `local_models.locating` finds names.

    Raises:
        ModelConfigError: there is no such model, and the error says where it was looked for and how to
            download it; or `name` is a file and not in GGUF, or a directory with several GGUF models.
        UnsupportedModelError: it is a download in a format that is not served.
    """
    if name == DEMO_MODEL:
        return Path(__file__).resolve().parent.parent / "assets" / DEMO_MODEL
    path = os.path.expanduser(name)  # os.path, because it calls an impossible name absent instead of raising
    if os.path.isdir(path):
        return gguf_in_directory(Path(path).resolve())
    if os.path.exists(path):
        if is_gguf(Path(path)):
            # A link keeps its name, as in the hub's cache: by the names the parts of a split file are found.
            return Path(path).parent.resolve() / Path(path).name
        raise file_refusal(Path(path), kind_of(name))
    return locate_model(name).path


def gguf_in_directory(directory: Path) -> Path:
    """Return the only GGUF model of a directory that has no safetensors, or else the directory.

    A repository of GGUF files may have a `config.json` too, and projectors for pictures; they do not count.

    Raises:
        ModelConfigError: the directory holds several GGUF models.
    """
    names = [path.name for path in directory.glob("*")]
    models = gguf_models(names)
    is_checkpoint = "config.json" in names and any(name.endswith(".safetensors") for name in names)
    if not models or is_checkpoint:
        return directory
    if len(models) > 1:
        raise ModelConfigError(
            f"{directory} holds several GGUF models: {', '.join(model.first for model in models)}.",
            remedy="Give the path of one of these files.",
            param="model",
        )
    return directory / models[0].first


def served_names(model: str, given: Sequence[str]) -> list[str]:
    """Return the names under which clients may ask for a model; the first is the one in answers.

    Args:
        model: the model as the user typed it. The name of a directory is the last part of its path, that of
            a GGUF file its file name without the suffix; any other text is itself the name.
        given: the names that the user chose instead; may be empty.
    """
    if given:
        return list(dict.fromkeys(given))
    path = Path(os.path.expanduser(model))
    is_name_of_file = ":" in model and not os.path.exists(path)  # such as org/name:FILE.gguf
    if is_gguf(path) and not is_name_of_file:
        return [path.name.removesuffix(path.suffix)]
    return [path.resolve().name if os.path.isdir(path) else model]
