"""What `load_spec` accepts, and how it refuses everything else."""

from __future__ import annotations

import json
import logging
import math
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoints
from paths import shared_data
from penstock.errors import ModelConfigError, UnsupportedModelError
from penstock.families.config_fields import MAX_CONFIG_BYTES
from penstock.families.registry import (
    SUPPORTED_ARCHITECTURES,
    load_spec,
    resolve_model_directory,
    served_names,
)
from penstock.families.spec import ModelSpec
from penstock.llm.prompt_preparer import default_sampling

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
QWEN = {**BASE, "architectures": ["Qwen2ForCausalLM"]}


def write(directory: Path, config: object, generation: object = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def load(directory: Path, **changes: Any) -> ModelSpec:
    return load_spec(write(directory, BASE | changes))


def refusal(directory: Path, base: dict[str, Any] = BASE, **changes: Any) -> ModelConfigError:
    with pytest.raises(ModelConfigError) as caught:
        load_spec(write(directory, base | changes))
    return caught.value


def test_reads_every_field(tmp_path: Path) -> None:
    spec = load(tmp_path, head_dim=16, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    assert (spec.architecture, spec.num_layers, spec.hidden_size) == ("LlamaForCausalLM", 5, 64)
    assert (spec.intermediate_size, spec.num_heads, spec.num_kv_heads) == (172, 8, 4)
    assert (spec.head_dim, spec.vocab_size, spec.rms_norm_eps) == (16, 512, 1e-5)
    assert (spec.max_position_embeddings, spec.dtype) == (512, "bfloat16")
    assert (spec.tie_word_embeddings, spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (True,) * 4
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert spec.generation_defaults == {}


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    optional = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "torch_dtype")
    spec = load_spec(write(tmp_path, {k: v for k, v in BASE.items() if k not in optional}))
    assert (spec.num_kv_heads, spec.head_dim) == (8, 8)
    assert (spec.rms_norm_eps, spec.max_position_embeddings, spec.dtype) == (1e-6, 2048, "float32")
    assert (spec.rope.kind, spec.rope.theta) == ("default", 10000.0)
    assert (spec.tie_word_embeddings, spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (False,) * 4


def test_qwen2_has_biases_on_query_key_and_value_only(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, QWEN | {"use_sliding_window": False, "sliding_window": 4096}))
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (True, False, False)


def test_null_counts_as_absent(tmp_path: Path) -> None:
    absent = ("head_dim", "num_key_value_heads", "rope_scaling", "bos_token_id", "eos_token_id", "dtype")
    spec = load(tmp_path, **dict.fromkeys(absent))
    assert (spec.head_dim, spec.num_kv_heads, spec.bos_token_id, spec.eos_token_ids) == (8, 8, None, ())
    assert spec.dtype == "bfloat16"


def test_new_dtype_field_wins(tmp_path: Path) -> None:
    assert load(tmp_path, dtype="float16").dtype == "float16"


def test_a_yarn_model_is_as_long_as_its_stretched_context(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert load(tmp_path, rope_scaling=scaling).max_position_embeddings == 2048
    spec = load(tmp_path, max_position_embeddings=2048, rope_scaling=scaling)
    assert spec.max_position_embeddings == 2048


def test_weights_are_not_quantised_unless_the_file_says_so(tmp_path: Path) -> None:
    assert load(tmp_path).quantization is None
    assert load(tmp_path, quantization_config=None).quantization is None


def test_quantised_weights_of_every_family(tmp_path: Path) -> None:
    section = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    for base in (BASE, QWEN):
        spec = load_spec(write(tmp_path, base | {"quantization_config": section}))
        assert spec.quantization is not None
        assert spec.quantization.describe() == "awq: int4 in groups of 64, with zero points"


def test_generation_config_adds_ends_of_text_and_sampling(tmp_path: Path) -> None:
    generation = {
        "eos_token_id": [7, 2],
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.1,
    }
    spec = load_spec(write(tmp_path, BASE, generation))
    assert spec.eos_token_ids == (7, 2)
    assert spec.generation_defaults == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.1,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (0, 2)),
        *(("top_p", value) for value in (1e-6, 1)),
        *(("min_p", value) for value in (0, 1)),
        *(("top_k", value) for value in (-1, 0, 512)),
        *(("repetition_penalty", value) for value in (1e-6, 10)),
    ],
)
def test_every_sampling_that_a_model_may_ask_for_is_one_that_requests_may_have(
    tmp_path: Path, name: str, value: float
) -> None:
    spec = load_spec(write(tmp_path, BASE, {"do_sample": True, name: value}))
    assert spec.generation_defaults == {name: value}
    default_sampling(spec.generation_defaults).validate(spec.vocab_size)


def test_sampling_numbers_without_do_sample_are_left_out_but_for_the_penalty(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, BASE, {"temperature": 0.7, "top_p": 0.8}))
    assert spec.generation_defaults == {}
    spec = load_spec(write(tmp_path, BASE, {"temperature": 0.7, "repetition_penalty": 1.05}))
    assert spec.generation_defaults == {"repetition_penalty": 1.05}


def test_auto_map_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    assert "auto_map" in caplog.text


@pytest.mark.parametrize("names", [["MambaForCausalLM"], [], ["X" * 500]])
def test_unknown_architecture_names_the_list_of_supported_ones(tmp_path: Path, names: list[str]) -> None:
    error = refusal(tmp_path, architectures=names)
    assert isinstance(error, UnsupportedModelError)
    assert error.exit_code == 3
    assert "docs/models.md" in error.message
    assert len(error.message) < 500


def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
    assert refusal(tmp_path, architectures=["\x1b[31m\nFAKE LOG LINE"]).message.isprintable()
    assert refusal(tmp_path, torch_dtype="\x1b[2J\n").message.isprintable()


BAD_FIELDS: list[tuple[str, Any]] = [
    ("architectures", "LlamaForCausalLM"),
    ("architectures", [3]),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", -5),
    ("num_hidden_layers", 10**30),
    ("num_hidden_layers", True),
    ("num_hidden_layers", 5.0),
    ("num_hidden_layers", "5"),
    ("num_hidden_layers", [5]),
    ("hidden_size", 2**40),
    ("hidden_size", 63),
    ("hidden_size", math.nan),
    ("intermediate_size", {}),
    ("num_attention_heads", 10**9),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", 16),
    ("num_key_value_heads", 0),
    ("head_dim", 7),
    ("head_dim", 2**31),
    ("vocab_size", -1),
    ("vocab_size", 2**63),
    ("max_position_embeddings", 10**18),
    ("max_position_embeddings", False),
    ("rms_norm_eps", math.nan),
    ("rms_norm_eps", math.inf),
    ("rms_norm_eps", "1e-5"),
    ("rms_norm_eps", -1e-5),
    ("rms_norm_eps", True),
    ("rope_theta", 0),
    ("rope_theta", math.inf),
    ("tie_word_embeddings", 1),
    ("tie_word_embeddings", "true"),
    ("attention_bias", "no"),
    ("mlp_bias", 0),
    ("hidden_act", "gelu"),
    ("torch_dtype", "int8"),
    ("dtype", 16),
    ("bos_token_id", 512),
    ("bos_token_id", True),
    ("eos_token_id", -1),
    ("eos_token_id", [1, 600]),
    ("eos_token_id", "2"),
    ("rope_scaling", "yarn"),
    ("rope_scaling", []),
    ("quantization_config", "gptq"),
    ("partial_rotary_factor", 0.5),
    ("layer_types", ["sliding_attention"] * 5),
    ("layer_types", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_a_bad_field_is_named_with_what_was_found(tmp_path: Path, field: str, value: Any) -> None:
    error = refusal(tmp_path, **{field: value})
    assert error.param == field
    assert error.message.startswith(f"config.json: {field} must be ")
    assert ", found " in error.message
    assert error.remedy


@pytest.mark.parametrize(
    "field", ["architectures", "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"]
)
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    with pytest.raises(ModelConfigError, match=f"{field} is required, found nothing"):
        load_spec(write(tmp_path, {k: v for k, v in BASE.items() if k != field}))
    assert "found null" in refusal(tmp_path, **{field: None}).message


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"rope_type": "longrope", "factor": 2}, "rope_type"),
        ({"type": "dynamic", "factor": 2}, "type"),
        ({"rope_type": 3}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -2}, "factor"),
        ({"rope_type": "linear", "factor": 1e300}, "factor"),
        ({"rope_type": "llama3", "factor": 8, "high_freq_factor": 4}, "low_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor",
        ),
        (
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0},
            "original_max_position_embeddings",
        ),
        ({"rope_type": "yarn", "factor": 4, "rope_theta": 1}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 4, "beta_fast": -1}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 4, "truncate": 1}, "truncate"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ],
)
def test_a_bad_rope_field_is_named_with_its_section(
    tmp_path: Path, scaling: dict[str, Any], field: str
) -> None:
    for section in ("rope_scaling", "rope_parameters"):
        assert refusal(tmp_path, **{section: scaling}).param == f"{section}.{field}"


def test_windows_of_qwen_are_those_of_the_upper_layers_if_switched_on(tmp_path: Path) -> None:
    window = {"sliding_window": 100, "max_window_layers": 3}
    assert load_spec(write(tmp_path, QWEN | window)).layer_windows == ()
    spec = load_spec(write(tmp_path, QWEN | window | {"use_sliding_window": True}))
    assert spec.layer_windows == (0, 0, 0, 100, 100)
    assert refusal(tmp_path, QWEN, use_sliding_window=True, sliding_window=0).param == "sliding_window"
    assert refusal(tmp_path, QWEN, layer_types=["sliding_attention"] * 5).param == "layer_types"


@pytest.mark.parametrize(
    "generation",
    [
        {"eos_token_id": 512},
        {"do_sample": "yes"},
        {"do_sample": True, "temperature": -1},
        {"do_sample": True, "top_p": 1.5},
        {"do_sample": True, "top_p": 0},
        {"do_sample": True, "top_k": 0.5},
        {"repetition_penalty": 0},
        {"do_sample": True, "repetition_penalty": 11},
        [],
    ],
)
def test_a_bad_generation_config_is_named(tmp_path: Path, generation: object) -> None:
    with pytest.raises(ModelConfigError, match=r"generation_config\.json"):
        load_spec(write(tmp_path, BASE, generation))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "a list, not an object"),
        (b"null", "null, not an object"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"vocab_size": "\xff"}', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        ("{}".encode("utf-16"), "not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "more than 32 levels"),
        (b"[" * 1_000_000, "more than 32 levels"),
        (b'{"a": "' + b"x" * MAX_CONFIG_BYTES + b'"}', f"larger than {MAX_CONFIG_BYTES} bytes"),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else value,
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError, match=r"config\.json.*" + what):
        load_spec(tmp_path)


def test_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json cannot be read: No such file"):
        load_spec(tmp_path)


def test_a_pipe_instead_of_a_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelConfigError, match="not a regular file"):
        load_spec(tmp_path)


def test_the_json_conformance_suite_holds_no_surprise(tmp_path: Path) -> None:
    """318 files, none of which is a model: each a typed error, whatever the parser thinks of it."""
    count = 0
    with tarfile.open(shared_data("conformance", "json_parsing_suite.tar.gz")) as archive:
        for member in archive:
            if not member.name.endswith(".json"):
                continue
            file = archive.extractfile(member)
            assert file is not None
            (tmp_path / "config.json").write_bytes(file.read())
            with pytest.raises(ModelConfigError, match=r"config\.json"):
                load_spec(tmp_path)
            count += 1
    assert count > 300


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [*BASE, "head_dim", "rope_scaling", "rope_parameters", "rope_theta", "tie_word_embeddings", "dtype"]
FIELDS += ["layer_types", "sliding_window", "use_sliding_window", "sliding_window_pattern", "logits_scaling"]
FIELDS += ["query_pre_attn_scalar", "final_logit_softcapping", "partial_rotary_factor"]
ROPE_FIELDS = [
    "rope_type",
    "factor",
    "short_factor",
    "long_factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "rope_theta",
]


@settings(max_examples=300, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4),
    scaling=st.dictionaries(st.sampled_from(ROPE_FIELDS), JSON_VALUES, max_size=3),
    kind=st.sampled_from(["default", "linear", "llama3", "longrope", "yarn"]),
    architecture=st.sampled_from(SUPPORTED_ARCHITECTURES),
)
def test_any_configuration_is_a_spec_or_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory,
    changes: dict[str, Any],
    scaling: dict[str, Any],
    kind: str,
    architecture: str,
) -> None:
    directory = tmp_path_factory.mktemp("any", numbered=True)
    own = BASE | {"architectures": [architecture]}
    write(directory, own | {"rope_scaling": {"rope_type": kind, "factor": 2.0} | scaling} | changes)
    spec_or_error = spec_or_refusal(directory)
    if isinstance(spec_or_error, ModelConfigError):
        assert spec_or_error.message.isprintable()
    else:
        assert spec_or_error.stage_parameters(0, spec_or_error.num_layers) > 0
        assert math.isfinite(spec_or_error.rope.attention_factor)


def spec_or_refusal(directory: Path) -> ModelSpec | ModelConfigError:
    try:
        return load_spec(directory)
    except ModelConfigError as error:
        return error


def hub_snapshot(cache: Path, name: str, commit: str = "0123456789abcdef") -> Path:
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return checkpoints.make_checkpoint(repository / "snapshots" / commit, layers=1)


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("no_cache")
class TestResolve:
    def test_a_directory(self, tmp_path: Path) -> None:
        assert resolve_model_directory(str(tmp_path)) == tmp_path.resolve()
        (tmp_path / "org" / "name").mkdir(parents=True)
        assert resolve_model_directory("org/name") == (tmp_path / "org" / "name").resolve()

    def test_demo_is_in_the_package(self) -> None:
        assert resolve_model_directory("demo").parts[-3:] == ("penstock", "assets", "demo")

    def test_hub_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        snapshot = hub_snapshot(tmp_path / "cache", "Org/some-model_1.5")
        assert resolve_model_directory("Org/some-model_1.5") == snapshot
        assert load_spec(snapshot).num_layers == 1

    def test_hub_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        snapshot = hub_snapshot(tmp_path / "hf" / "hub", "org/name")
        assert resolve_model_directory("org/name") == snapshot

    def test_default_cache(self, tmp_path: Path) -> None:
        cache = tmp_path / "home" / ".cache" / "huggingface" / "hub"
        snapshot = hub_snapshot(cache, "org/name")
        assert resolve_model_directory("org/name") == snapshot

    def test_a_model_that_is_not_there_tells_how_to_get_it(self) -> None:
        with pytest.raises(ModelConfigError, match="penstock pull org/name") as caught:
            resolve_model_directory("org/name")
        assert caught.value.param == "model"

    def test_a_snapshot_that_is_not_complete_is_not_there(self, tmp_path: Path) -> None:
        cache = tmp_path / "home" / ".cache" / "huggingface" / "hub"
        (hub_snapshot(cache, "org/name") / "config.json").unlink()
        with pytest.raises(ModelConfigError, match="penstock pull org/name"):
            resolve_model_directory("org/name")

    @pytest.mark.parametrize("commit", ["../../..", "a/b", "", "\udcff"])
    def test_refs_main_cannot_lead_elsewhere(self, tmp_path: Path, commit: str) -> None:
        cache = tmp_path / "home" / ".cache" / "huggingface" / "hub"
        hub_snapshot(cache, "org/name")
        main = cache / "models--org--name" / "refs" / "main"
        main.write_bytes(commit.encode("utf-8", "surrogateescape"))
        with pytest.raises(ModelConfigError):
            resolve_model_directory("org/name")

    @pytest.mark.parametrize(
        "name", ["", "../x", "a/b/c", "org/", "~nobody-here", "org/..", "nothing", "a\0b", "x" * 5000]
    )
    def test_a_name_that_is_nothing(self, name: str) -> None:
        with pytest.raises(ModelConfigError) as caught:
            resolve_model_directory(name)
        assert caught.value.remedy
        assert caught.value.message.isprintable()

    def test_a_file_is_not_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ModelConfigError, match="is a file, not a directory"):
            resolve_model_directory("model.safetensors")

    def test_a_download_of_a_gguf_file_is_found(self, tmp_path: Path) -> None:
        snapshot = hub_snapshot(tmp_path / "home" / ".cache" / "huggingface" / "hub", "org/name-GGUF")
        (snapshot / "config.json").unlink()
        (snapshot / "name-Q4_K_M.gguf").touch()
        assert resolve_model_directory("org/name-GGUF") == snapshot / "name-Q4_K_M.gguf"


@pytest.mark.parametrize("trail", ["", "/", "/."])
def test_a_directory_is_served_under_its_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trail: str
) -> None:
    """Issue 25, point 11."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "Qwen2.5-0.5B").mkdir()
    assert served_names(f"{tmp_path}/Qwen2.5-0.5B{trail}", []) == ["Qwen2.5-0.5B"]
    assert served_names(f"~/Qwen2.5-0.5B{trail}", []) == ["Qwen2.5-0.5B"]


@pytest.mark.parametrize("name", ["demo", "Qwen/Qwen2.5-0.5B", "org/name:model-q8_0.gguf"])
def test_a_name_is_served_as_it_is(name: str) -> None:
    assert served_names(name, []) == [name]


def test_names_that_the_user_chose_take_the_place_of_the_model_s_own(tmp_path: Path) -> None:
    """Issue 25, point 13."""
    assert served_names(str(tmp_path), ["gpt-4o", "small", "gpt-4o"]) == ["gpt-4o", "small"]
