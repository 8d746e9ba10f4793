"""`quantization_config`: what is understood, what is refused by name, and nothing that hangs or leaks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import QuantizedLayout, quantization_config
from penstock.errors import ModelConfigError
from penstock.families.config_fields import ConfigFields
from penstock.families.quantization_fields import read_quantization
from penstock.families.quantization_spec import ModulePattern, QuantizationSpec, WeightScheme
from penstock.families.registry import load_spec

UP = "model.layers.3.mlp.up_proj"
GPTQ = quantization_config("gptq", bits=4, group_size=128, symmetric=True)
AWQ = quantization_config("awq", bits=4, group_size=128, symmetric=False)
PACKED = quantization_config("packed", bits=4, group_size=128, symmetric=False)
INT8 = quantization_config("int8", bits=8, group_size=None, symmetric=True)


def read(section: object) -> QuantizationSpec | None:
    return read_quantization(ConfigFields({"quantization_config": section}, file="config.json"))


def understood(section: dict[str, Any]) -> QuantizationSpec:
    spec = read(section)
    assert spec is not None
    return spec


def changed(section: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with another value under a path such as `config_groups.group_0.weights.type`."""
    result = copy.deepcopy(section)
    *parents, last = path.split(".")
    inner = result
    for name in parents:
        if inner.get(name) is None:
            inner[name] = {}
        inner = inner[name]
    inner[last] = value
    return result


def spec_or_refusal(section: object) -> QuantizationSpec | ModelConfigError | None:
    try:
        return read(section)
    except ModelConfigError as error:
        return error


def refusal(section: object) -> ModelConfigError:
    with pytest.raises(ModelConfigError) as caught:
        read(section)
    return caught.value


# --- Understood ----------------------------------------------------------------------------------------


def test_without_the_section_nothing_is_quantised() -> None:
    assert read(None) is None
    assert read_quantization(ConfigFields({}, file="config.json")) is None


@pytest.mark.parametrize(
    ("layout", "bits", "group_size", "symmetric", "found"),
    [
        ("gptq", 4, 128, True, ("gptq", 4, 128, True, 1)),
        ("gptq", 8, None, False, ("gptq", 8, None, False, 1)),
        ("gptq_v2", 4, 32, True, ("gptq", 4, 32, True, 0)),
        ("awq", 4, 64, False, ("awq", 4, 64, False, 0)),
        ("awq", 4, None, True, ("awq", 4, None, True, 0)),
        ("packed", 4, 128, True, ("packed", 4, 128, True, 0)),
        ("packed", 8, None, False, ("packed", 8, None, False, 0)),
        ("int8", 8, None, True, ("int8", 8, None, True, 0)),
        ("int8", 8, 128, False, ("int8", 8, 128, False, 0)),
    ],
)
def test_every_layout_is_understood(
    layout: QuantizedLayout, bits: int, group_size: int | None, symmetric: bool, found: tuple[Any, ...]
) -> None:
    section = quantization_config(layout, bits=bits, group_size=group_size, symmetric=symmetric)
    spec = understood(section)
    (scheme,) = spec.schemes
    read_back = (
        scheme.layout,
        scheme.bits,
        scheme.group_size,
        scheme.symmetric,
        scheme.zero_offset,
    )
    assert read_back == found
    assert spec.kind == f"int{bits}"
    assert spec.method == section["quant_method"]
    assert spec.scheme(UP) is scheme


def test_defaults_and_older_names() -> None:
    (scheme,) = understood({"quant_method": "gptq", "bits": 4, "group_size": -1}).schemes
    assert (scheme.symmetric, scheme.zero_offset, scheme.group_size) == (True, 1, None)
    (scheme,) = understood({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}).schemes
    assert (scheme.symmetric, scheme.group_size) == (False, 64)
    weights = {"num_bits": 4, "group_size": 32}
    inferred = changed(PACKED, "config_groups.group_0.weights", weights)
    (scheme,) = understood(inferred).schemes
    assert (scheme.group_size, scheme.symmetric) == (32, True)
    (scheme,) = understood(changed(inferred, "config_groups.group_0.weights.group_size", -1)).schemes
    assert scheme.group_size is None


def test_an_empty_section_of_what_is_not_built_is_harmless() -> None:
    understood(changed(GPTQ, "dynamic", {}))
    understood(changed(PACKED, "transform_config", {}))
    understood(changed(PACKED, "sparsity_config", {"format": "dense"}))
    understood(changed(PACKED, "ignore", None))


def test_the_closest_target_counts_and_ignore_counts_most() -> None:
    group = PACKED["config_groups"]["group_0"]
    section = changed(PACKED, "config_groups.group_1", copy.deepcopy(group))
    section = changed(section, "config_groups.group_1.targets", [r"re:.*\.down_proj", "lm_head"])
    section = changed(section, "config_groups.group_1.weights.num_bits", 8)
    section = changed(section, "ignore", ["model.layers.0.mlp.down_proj", r"re:.*layers\.1\."])
    spec = understood(section)
    assert spec.kind == "mixed"
    assert spec.mean_bits == 4
    bits = {
        name: None if (scheme := spec.scheme(name)) is None else scheme.bits
        for name in (
            UP,
            "model.layers.3.mlp.down_proj",
            "model.layers.0.mlp.down_proj",
            "model.layers.1.mlp.up_proj",
            "model.layers.10.mlp.up_proj",
            "lm_head",
        )
    }
    assert list(bits.values()) == [4, 8, None, None, 4, 8]
    assert spec.describe() == (
        "compressed-tensors: int4 in groups of 128, with zero points; int8 in groups of 128, with zero points"
    )


def test_each_group_may_have_its_own_format() -> None:
    section = changed(PACKED, "format", "mixed-precision")
    section = changed(section, "config_groups.group_0.format", "pack-quantized")
    other = copy.deepcopy(INT8["config_groups"]["group_0"]) | {
        "format": "int-quantized",
        "targets": ["re:.*o_proj"],
    }
    spec = understood(changed(section, "config_groups.group_1", other))
    assert [scheme.layout for scheme in spec.schemes] == ["packed", "int8"]
    assert refusal(changed(PACKED, "format", "mixed-precision")).param == (
        "quantization_config.config_groups.group_0.format"
    )


def test_groups_are_counted_with_a_short_one() -> None:
    scheme = WeightScheme(layout="gptq", bits=4, group_size=32, symmetric=True)
    assert [scheme.num_groups(size) for size in (1, 32, 33, 64)] == [1, 1, 2, 2]
    per_channel = WeightScheme(layout="int8", bits=8, group_size=None, symmetric=True)
    assert per_channel.num_groups(1000) == 1
    assert (scheme.middle, per_channel.middle) == (8, 128)
    assert (scheme.describe(), per_channel.describe()) == ("int4 in groups of 32", "int8 per channel")


def test_patterns_name_modules() -> None:
    assert ModulePattern("lm_head").rank("lm_head") == 0
    assert ModulePattern("lm_head").rank("my_lm_head") is None
    assert ModulePattern("re:.*head").rank("lm_head") == 1
    assert ModulePattern("re:head").rank("lm_head") is None, "an expression begins at the begin"
    assert ModulePattern("Linear").rank("anything") == 2


def test_the_model_carries_it(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 512,
        "torch_dtype": "float16",
        "quantization_config": GPTQ,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_spec(tmp_path).quantization == understood(GPTQ)


# --- Refused by name -----------------------------------------------------------------------------------

GROUP = "config_groups.group_0"
NOT_BUILT: list[tuple[dict[str, Any], str, object]] = [
    (GPTQ, "quant_method", "bitsandbytes"),
    (GPTQ, "quant_method", "fp8"),
    (GPTQ, "quant_method", "\x1b[31mfp8"),
    (GPTQ, "bits", 3),
    (GPTQ, "bits", 2),
    (GPTQ, "checkpoint_format", "marlin"),
    (GPTQ, "is_marlin_format", True),
    (GPTQ, "pack_dtype", "int64"),
    (GPTQ, "dynamic", {"-:.*": {}}),
    (AWQ, "bits", 8),
    (AWQ, "version", "gemv"),
    (AWQ, "version", "marlin"),
    (AWQ, "backend", "llm-awq"),
    (PACKED, "format", "float-quantized"),
    (PACKED, "format", "marlin-24"),
    (PACKED, "format", "nvfp4-pack-quantized"),
    (PACKED, "quantization_status", "frozen"),
    (PACKED, "kv_cache_scheme", {"num_bits": 8, "type": "float"}),
    (PACKED, "sparsity_config.format", "sparse-24-bitmask"),
    (PACKED, "transform_config", {"config_groups": {}}),
    (PACKED, f"{GROUP}.weights.type", "float"),
    (PACKED, f"{GROUP}.weights.num_bits", 3),
    (INT8, f"{GROUP}.weights.num_bits", 4),
    (PACKED, f"{GROUP}.weights.strategy", "block"),
    (PACKED, f"{GROUP}.weights.strategy", "tensor"),
    (PACKED, f"{GROUP}.weights.dynamic", True),
    (PACKED, f"{GROUP}.targets", ["Linear", "Embedding"]),
    (PACKED, f"{GROUP}.output_activations", {"num_bits": 8}),
    (INT8, f"{GROUP}.input_activations.dynamic", False),
    (INT8, f"{GROUP}.input_activations.type", "float"),
    (INT8, f"{GROUP}.input_activations.num_bits", 4),
]


@pytest.mark.parametrize(("section", "path", "value"), NOT_BUILT)
def test_what_is_not_built_is_refused_by_name_with_a_way_out(
    section: dict[str, Any], path: str, value: object
) -> None:
    error = refusal(changed(section, path, value))
    assert error.param == f"quantization_config.{path}"
    assert error.message.startswith(f"config.json: quantization_config.{path} must be ")
    assert ", found " in error.message
    assert "bfloat16 or float16" in error.remedy
    assert error.message.isprintable()


MALFORMED: list[tuple[dict[str, Any], str, object]] = [
    (GPTQ, "quant_method", 4),
    (GPTQ, "bits", "4"),
    (GPTQ, "bits", True),
    (GPTQ, "bits", 10**30),
    (GPTQ, "group_size", 0),
    (GPTQ, "group_size", -2),
    (GPTQ, "group_size", 2**40),
    (GPTQ, "group_size", 128.0),
    (GPTQ, "sym", 1),
    (GPTQ, "desc_act", "no"),
    (GPTQ, "dynamic", []),
    (AWQ, "zero_point", "true"),
    (AWQ, "version", 2),
    (PACKED, "config_groups", []),
    (PACKED, "config_groups", {}),
    (PACKED, "config_groups", {f"group_{i}": {} for i in range(65)}),
    (PACKED, "config_groups.W4A16", ["Linear"]),
    (PACKED, f"{GROUP}.weights", "int4"),
    (PACKED, f"{GROUP}.weights.group_size", 0),
    (PACKED, f"{GROUP}.weights.group_size", -1),
    (PACKED, f"{GROUP}.weights.symmetric", 0),
    (PACKED, f"{GROUP}.targets", "Linear"),
    (PACKED, f"{GROUP}.targets", [1]),
    (PACKED, f"{GROUP}.targets", [""]),
    (PACKED, "ignore", "lm_head"),
    (PACKED, "ignore", ["x" * 300]),
    (PACKED, "ignore", ["x"] * 5000),
    (PACKED, "ignore", ["re:("]),
    (PACKED, "ignore", ["re:a{99999999999}"]),
    (PACKED, "ignore", ["re:[[a]"]),
    (INT8, f"{GROUP}.input_activations", "int8"),
]


@pytest.mark.parametrize(("section", "path", "value"), MALFORMED)
def test_a_malformed_field_is_named(section: dict[str, Any], path: str, value: object) -> None:
    error = refusal(changed(section, path, value))
    assert error.param == f"quantization_config.{path}"
    assert error.message.startswith(f"config.json: quantization_config.{path} must be ")
    assert len(error.message) < 400
    assert error.remedy


@pytest.mark.parametrize(
    ("section", "path"),
    [
        (GPTQ, "quant_method"),
        (GPTQ, "bits"),
        (GPTQ, "group_size"),
        (PACKED, "format"),
        (PACKED, f"{GROUP}.weights.num_bits"),
        (PACKED, f"{GROUP}.targets"),
    ],
)
def test_a_missing_field_is_named(section: dict[str, Any], path: str) -> None:
    error = refusal(changed(section, path, None))
    assert error.message == f"config.json: quantization_config.{path} is required, found null."


@pytest.mark.parametrize("section", ["gptq", [], 4, True])
def test_a_section_that_is_no_object(section: object) -> None:
    assert refusal(section).param == "quantization_config"


def test_groups_without_a_size_are_refused() -> None:
    section = changed(PACKED, f"{GROUP}.weights", {"num_bits": 4, "strategy": "group"})
    assert refusal(section).param == f"quantization_config.{GROUP}.weights.group_size"


# --- Expressions that would never end ------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+$",
        "(.*)*x",
        "(?:m|mo|mod)*x",
        "(.+){9}x",
        ".*.*.*.*.*.*.*.*.*.*x",
        "(m|m)(o|o)(d|d)(e|e)(l|l)" * 6,
        "m?o?d?e?l?" * 6,
        "(?x)(a+) +$",
        "(?x:(.+) +x)",
    ],
)
def test_expressions_that_could_take_for_ever_are_refused(expression: str) -> None:
    assert refusal(changed(PACKED, "ignore", [f"re:{expression}"])).param == "quantization_config.ignore"


@pytest.mark.parametrize(
    "expression",
    [
        ".*lm_head",
        "visual.*",
        r".*self_attn\..*",
        r"model\.layers\.[0-9]+\.mlp\.(gate|up|down)_proj",
        r"^(?!.*(q_proj|k_proj|v_proj)).*$",
        r".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)$",
        r".*layers\.(0|1|2|3|4|5|6|7|8|9|10|11|12|13|14|15|16|17|18|19|20)\..*",
    ],
)
def test_expressions_as_they_are_written_are_taken(expression: str) -> None:
    understood(changed(PACKED, "ignore", [f"re:{expression}"]))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(alphabet="mod.el()[]*+?{}|^$\\19,-x:!=<>", max_size=60))
def test_any_expression_is_refused_or_harmless(expression: str) -> None:
    found = spec_or_refusal(changed(PACKED, "ignore", [f"re:{expression}"]))
    if isinstance(found, QuantizationSpec):
        found.scheme("model.layers.12.self_attn.q_proj")  # comes to an end
    else:
        assert isinstance(found, ModelConfigError)
        assert found.message.isprintable()


def test_names_of_groups_are_shown_safely() -> None:
    found = spec_or_refusal(changed(PACKED, "config_groups", {"\x1b[2J" + "x" * 100: None}))
    assert isinstance(found, ModelConfigError)
    assert found.message.isprintable()
    assert len(found.message) < 120


# --- Anything --------------------------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PATHS = [path for _, path, _ in NOT_BUILT + MALFORMED if not path.startswith("config_groups.W")]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    section=st.sampled_from([GPTQ, AWQ, PACKED, INT8]),
    path=st.sampled_from(sorted(set(PATHS))),
    value=JSON_VALUES,
)
def test_any_section_is_a_spec_or_a_typed_error(section: dict[str, Any], path: str, value: object) -> None:
    found = spec_or_refusal(changed(section, path, value))
    if isinstance(found, ModelConfigError):
        assert found.message.isprintable()
    else:
        assert found is None or found.kind in ("int4", "int8", "mixed")
