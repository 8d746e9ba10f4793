"""The `quantization_config` of an untrusted `config.json`, as a `QuantizationSpec`.

Called by the family modules. What is not built is refused by name, with a remedy: float8, bitsandbytes,
static activations, quantised KV caches, sparse and Marlin layouts. Torch-free.

Sources of the fields' names, defaults and meanings: the compressed-tensors library (quant_config, quant_args,
pack_quantized), transformers' GPTQConfig and AwqConfig, GPTQModel's and AutoAWQ's configuration files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from penstock.errors import ModelConfigError
from penstock.families.config_fields import ConfigFields
from penstock.families.quantization_spec import (
    LINEAR,
    PATTERN_PREFIX,
    Layout,
    ModulePattern,
    QuantizationSpec,
    WeightScheme,
)

_SECTION = "quantization_config"
_MAX_GROUP_SIZE = 1 << 20
_MAX_CONFIG_GROUPS = 64
_MAX_PATTERNS = 4096
_MAX_PATTERN_CHARACTERS = 256
_MAX_PATTERN_BITS = 24  # log2 of the number of ways in which an expression can be tried on a name
_FORMATS = ("int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")

_REMEDY = (
    "Use a checkpoint in bfloat16 or float16, optionally with --quantization int8 or int4. If none is "
    "published, convert this one first."
)


def read_quantization(config: ConfigFields) -> QuantizationSpec | None:
    """Return how the weights are quantised; None where `config.json` does not say that they are.

    Raises:
        ModelConfigError: a field is missing, malformed or out of range, or asks for what is not built.
    """
    if not config.has(_SECTION):
        return None
    fields = config.section(_SECTION)
    method = _supported(fields, "quant_method", tuple(_METHODS))
    return _METHODS[method](fields)


def _unsupported(fields: ConfigFields, name: str, expected: str, value: object) -> ModelConfigError:
    """Return an error about an unsupported format, rather than about a bad file."""
    return fields.error(name, expected, value, remedy=_REMEDY)


def _supported(fields: ConfigFields, name: str, allowed: Sequence[str], default: str | None = None) -> str:
    """Return a field's word in lower case; raise if it is not one of `allowed`."""
    word = fields.text(name, default)
    if word.lower() not in allowed:
        raise _unsupported(fields, name, f"one of {', '.join(allowed)}", word)
    return word.lower()


def _bits(fields: ConfigFields, name: str, allowed: Sequence[int]) -> int:
    bits = fields.integer(name, 1, 64)
    if bits not in allowed:
        raise _unsupported(fields, name, " or ".join(map(str, allowed)), bits)
    return bits


def _group_size(fields: ConfigFields, name: str) -> int | None:
    """Return the number of columns of a group; None: a group is the whole row, for which the file has -1."""
    size = fields.integer(name, -1, _MAX_GROUP_SIZE)
    if size == 0:
        raise fields.error(name, f"-1 or an integer from 1 to {_MAX_GROUP_SIZE}", size)
    return None if size == -1 else size


def _refuse_section(fields: ConfigFields, name: str, expected: str) -> None:
    """Raise `ModelConfigError` if a section is there and not empty."""
    if fields.has(name) and _names(fields.section(name)):
        raise _unsupported(fields, name, expected, {})


def _names(fields: ConfigFields) -> list[str]:
    return list(fields._values)


# --- GPTQ and AWQ: one scheme, for all projections that have such tensors ------------------------


def _gptq(fields: ConfigFields) -> QuantizationSpec:
    version = _supported(fields, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    _supported(fields, "pack_dtype", ("int32",), "int32")
    if fields.flag("is_marlin_format", False):
        raise _unsupported(fields, "is_marlin_format", "false (Marlin layouts are not supported)", True)
    _refuse_section(fields, "dynamic", "empty (settings of single modules are not supported)")
    fields.flag("desc_act", False)  # what counts is the order that `g_idx` has in fact
    scheme = WeightScheme(
        layout="gptq",
        bits=_bits(fields, "bits", (4, 8)),
        group_size=_group_size(fields, "group_size"),
        symmetric=fields.flag("sym", True),
        zero_offset=int(version == "gptq"),
    )
    return QuantizationSpec(method="gptq", schemes=(scheme,))


def _awq(fields: ConfigFields) -> QuantizationSpec:
    _supported(fields, "format" if fields.has("format") else "version", ("gemm",), "gemm")
    _supported(fields, "backend", ("auto", "autoawq"), "autoawq")
    scheme = WeightScheme(
        layout="awq",
        bits=_bits(fields, "w_bit" if fields.has("w_bit") else "bits", (4,)),
        group_size=_group_size(fields, "q_group_size" if fields.has("q_group_size") else "group_size"),
        symmetric=not fields.flag("zero_point", True),
    )
    return QuantizationSpec(method="awq", schemes=(scheme,))


# --- compressed-tensors --------------------------------------------------------------------------


def _compressed_tensors(fields: ConfigFields) -> QuantizationSpec:
    _supported(fields, "quantization_status", ("compressed",), "compressed")
    if fields.has("kv_cache_scheme"):
        raise _unsupported(fields, "kv_cache_scheme", "absent (KV cache schemes are not supported)", {})
    _supported(fields.section("sparsity_config"), "format", ("dense",), "dense")
    _refuse_section(fields, "transform_config", "empty (transforms are not supported)")
    default = _supported(fields, "format", _FORMATS)
    groups = fields.section("config_groups")
    names = _names(groups)
    if not 1 <= len(names) <= _MAX_CONFIG_GROUPS:
        raise fields.error("config_groups", f"1 to {_MAX_CONFIG_GROUPS} groups", len(names))
    return QuantizationSpec(
        method="compressed-tensors",
        schemes=tuple(_scheme(groups.section(name), default) for name in names),
        ignore=_patterns(fields, "ignore") if fields.has("ignore") else (),
    )


def _scheme(group: ConfigFields, default_format: str) -> WeightScheme:
    """Return the scheme of one entry of `config_groups`."""
    _check_activations(group)
    layout: Layout = "packed" if _format(group, default_format) == "pack-quantized" else "int8"
    weights = group.section("weights")
    _supported(weights, "type", ("int",), "int")
    if weights.flag("dynamic", False):
        raise _unsupported(weights, "dynamic", "false for weights", True)
    targets = _patterns(group, "targets")
    for target in targets:
        if re.fullmatch(r"[A-Z]\w*", target.text) and target.text != LINEAR:
            raise _unsupported(group, "targets", f"{LINEAR} or names of projections", target.text)
    return WeightScheme(
        layout=layout,
        bits=_bits(weights, "num_bits", (4, 8) if layout == "packed" else (8,)),
        group_size=_columns_per_scale(weights),
        symmetric=weights.flag("symmetric", True),
        targets=targets,
    )


def _format(group: ConfigFields, default: str) -> str:
    """Return the format of a group: its own, or else the default of all groups.

    "mixed-precision" as the default means that each group must have its own.
    """
    if default == "mixed-precision" or group.has("format"):
        return _supported(group, "format", _FORMATS[:-1])
    return default


def _columns_per_scale(weights: ConfigFields) -> int | None:
    """Return how many columns share a scale; None: there is one scale per output channel.

    Without a strategy in the file, the group size decides.
    """
    size = _group_size(weights, "group_size") if weights.has("group_size") else None
    inferred = "group" if size else "channel" if weights.has("group_size") else "tensor"
    strategy = _supported(weights, "strategy", ("channel", "group"), inferred)
    if strategy == "group" and size is None:
        raise weights.error("group_size", "at least 1 for groups", -1)
    return size if strategy == "group" else None


def _check_activations(group: ConfigFields) -> None:
    """Raise `ModelConfigError` if activations are to be quantised otherwise than dynamically, to 8 bits.

    Our kernels round activations while they compute, or not at all; nothing else is built.
    """
    if group.has("output_activations"):
        raise _unsupported(group, "output_activations", "absent", {})
    if not group.has("input_activations"):
        return
    activations = group.section("input_activations")
    _supported(activations, "type", ("int",), "int")
    _bits(activations, "num_bits", (8,))
    if not activations.flag("dynamic", False):
        expected = "true (static activation scales are not supported)"
        raise _unsupported(activations, "dynamic", expected, False)


# --- Names of modules -----------------------------------------------------------------------------


def _patterns(fields: ConfigFields, name: str) -> tuple[ModulePattern, ...]:
    texts = fields.text_list(name)
    if len(texts) > _MAX_PATTERNS:
        raise fields.error(name, f"at most {_MAX_PATTERNS} names", len(texts))
    for text in texts:
        if problem := _problem(text):
            raise fields.error(name, problem, text)
    return tuple(ModulePattern(text) for text in texts)


def _problem(text: str) -> str | None:
    """Return what a name or an expression would have to be, for an error; None: it is right."""
    if not 1 <= len(text) <= _MAX_PATTERN_CHARACTERS:
        return f"names of 1 to {_MAX_PATTERN_CHARACTERS} characters"
    if not text.startswith(PATTERN_PREFIX):
        return None
    expression = text[len(PATTERN_PREFIX) :]
    if _search_bits(expression) > _MAX_PATTERN_BITS:
        return "expressions that match quickly"
    if any(pair in expression for pair in ("[[", "[^[", "--", "&&", "~~", "||")):
        return "expressions without nested sets"  # their meaning is to change, says Python's `re`
    if re.search(r"\(\?[a-zA-Z-]*x", expression):
        return "expressions without free spacing"  # which could hide a repeated group
    try:
        re.compile(expression)
    except (re.error, OverflowError, RecursionError):
        return "regular expressions"
    return None


def _search_bits(expression: str) -> float:
    """Return a bound of log2 of the ways to match a name of some 32 characters; infinite for repeated groups.

    A backtracking matcher tries the lengths of each repetition and the alternatives of each group. If no
    group is repeated, the product of these numbers bounds its steps. Characters such as `*` are counted even
    where they mean themselves, so the bound is too high at worst.
    """
    if re.search(r"\)[*+{]", expression):
        return math.inf
    repetitions = len(re.findall(r"[*+{]", expression))
    options = len(re.findall(r"(?<!\()\?", expression))
    groups = max(1, expression.count("("))
    return 5 * repetitions + options + groups * math.log2(1 + expression.count("|") / groups)


_METHODS: dict[str, Callable[[ConfigFields], QuantizationSpec]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
}
