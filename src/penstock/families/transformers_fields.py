"""The reading of the configuration of a model whose layers are transformers' own, not ours.

Called by `families.registry` for an architecture that no family here knows, or for any with `--model-impl
transformers`. Torch-free, and transformers is looked up but not imported: the numbers come from `config.json`
under the names that the families of transformers use. Where these differ, the numbers from which memory is
estimated are estimates themselves. Each rank compares the numbers that must be right with the model itself
(`models.transformers_survey`).
"""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

from penstock.config.engine import ParallelConfig, Quantization
from penstock.errors import UnsupportedModelError, UsageError
from penstock.families.config_fields import ConfigFields, kind_of
from penstock.families.rope_spec import RopeSpec
from penstock.families.spec import ModelSpec

EXTRA = "penstock[hf]"

_OLDEST = 5, 23  # as in pyproject.toml
_VERSION = re.compile(r"(\d+)\.(\d+)")
_DTYPES = ("float32", "bfloat16", "float16")
_MOST = 1 << 24
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")
_DEFAULT_POSITIONS = 2048  # the default of most families; a rank refuses more than the model has
_MODEL_TYPE = re.compile(r"[a-z0-9][a-z0-9_]{0,63}")


def has_transformers() -> bool:
    """Return whether transformers is installed, and new enough."""
    return _folder() is not None


def _folder() -> Path | None:
    """Return the folder of the installed transformers; None if it cannot be used."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return None
    match = _VERSION.match(metadata.version("transformers"))
    if match is None or (int(match[1]), int(match[2])) < _OLDEST:
        return None
    return Path(spec.submodule_search_locations[0])


def knows(architecture: str, model_type: str) -> bool:
    """Return whether transformers has this architecture, and its attention can be replaced by ours.

    It looks at the text of transformers' sources, since importing them would take seconds and need torch.
    """
    installed, name = _folder(), model_type.removesuffix("_text").replace("-", "_")
    if installed is None or not _MODEL_TYPE.fullmatch(name):
        return False
    try:
        source = (installed / "models" / name / f"modeling_{name}.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return f"class {architecture}(" in source and "ALL_ATTENTION_FUNCTIONS" in source


def transformers_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of any causal model of transformers.

    Raises:
        UnsupportedModelError: it is an encoder, or is quantised.
        ModelConfigError: a number is missing or out of range.
    """
    _check_kind(config)
    width, heads = _integer(config, _WIDTH), _integer(config, _HEADS)
    head_dim = config.integer("head_dim", 1, 4096, max(1, width // heads))
    vocab_size = config.integer("vocab_size", 1, _MOST)
    dtype = "dtype" if config.has("dtype") else "torch_dtype"
    bos = config.token_ids("bos_token_id", vocab_size)
    return ModelSpec(
        implementation="transformers",
        architecture=architecture,
        num_layers=_integer(config, _LAYERS, high=1024),
        hidden_size=width,
        intermediate_size=_integer(config, _INNER, 4 * width),
        num_heads=heads,
        num_kv_heads=1 if config.flag("multi_query", False) else _integer(config, _KV_HEADS, heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        rms_norm_eps=0.0,
        rope=RopeSpec(),
        max_position_embeddings=_integer(config, _POSITIONS, _DEFAULT_POSITIONS, high=1 << 30),
        tie_word_embeddings=_is_tied(config),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        gated_mlp=False,
        dtype=config.choice(dtype, _DTYPES, "float32"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=config.token_ids("eos_token_id", vocab_size),
    )


def _check_kind(config: ConfigFields) -> None:
    if config.flag("is_decoder", False):
        raise UnsupportedModelError(
            "config.json: is_decoder is true: an encoder used as a decoder, which may count positions "
            "differently.",
            remedy="Use a decoder-only model.",
            param="is_decoder",
        )
    if config.has("quantization_config"):
        method = kind_of(config.section("quantization_config").values().get("quant_method")).strip('"')
        raise UnsupportedModelError(
            f"config.json: the weights are quantised (quantization_config, quant_method {method}), but "
            "transformers' layers cannot run quantised here.",
            remedy="Use a checkpoint in bfloat16 or float16. If none is published, convert this one first.",
            param="quantization_config",
        )


def _is_tied(config: ConfigFields) -> bool:
    """Return whether the output head is the embedding, which is transformers' default.

    The ranks look at the model itself.
    """
    return config.flag("tie_word_embeddings", True)


def _integer(
    config: ConfigFields, names: tuple[str, ...], default: int | None = None, high: int = _MOST
) -> int:
    """Return a number under the first of `names` that the file has; the first name is the usual one."""
    name = next((name for name in names if config.has(name)), names[0])
    return config.integer(name, 1, high, default)


def require_plain(spec: ModelSpec, quantization: Quantization, parallel: ParallelConfig) -> None:
    """Raise `UsageError` for a setting that only our own layers can meet."""
    if spec.implementation != "transformers":
        return
    for flag, value, plain in (
        ("--tensor-parallel-size", max(parallel.tp_sizes), 1),
        ("--quantization", quantization, "none"),
        ("--tied-head", parallel.tied_head, "load"),
    ):
        if value != plain:
            raise UsageError(
                f"{flag} is {value}; {spec.architecture} runs through transformers' layers, which cannot do "
                "that.",
                remedy=f"Use {flag} {plain}; more stages (--pp) divide the weights as well.",
                param=flag.removeprefix("--").replace("-", "_"),
                code="unsupported",
            )


def implementation_notes(spec: ModelSpec) -> tuple[str, ...]:
    """Return notes for the user about layers that are not ours."""
    if spec.implementation != "transformers":
        return ()
    return (
        f"{spec.architecture} runs through transformers' layers, in plain torch: slower than our layers, "
        "and results may depend on the other rows of a batch.",
    )
