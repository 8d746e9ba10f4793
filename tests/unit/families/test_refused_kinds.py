"""Models that are known and not served: what they are is said, and what can be done (issue 25, point 12)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gguf_files import write_gguf
from penstock.errors import CheckpointError, ModelConfigError, UnsupportedModelError
from penstock.families.refused_kinds import is_gguf
from penstock.families.registry import load_spec, resolve_model_directory
from penstock.gguf.part_names import part_name, part_paths

TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
LLAMA = TEXT | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 96}


def refusal(directory: Path, **fields: Any) -> UnsupportedModelError:
    (directory / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModelError) as caught:
        load_spec(directory)
    return caught.value


def said(error: UnsupportedModelError) -> str:
    """The whole text, which never says that a file that is right should be got again."""
    text = f"{error.message} {error.remedy}"
    assert "again" not in text
    assert error.message.isprintable()
    return text


@pytest.mark.parametrize(
    ("architecture", "model_type", "sections"),
    [
        ("LlavaForConditionalGeneration", "llava", ("text_config", "vision_config")),
        ("Gemma3nForConditionalGeneration", "gemma3n", ("text_config", "vision_config")),
        ("Gemma4ForConditionalGeneration", "gemma4", ("text_config", "vision_config", "audio_config")),
        ("Qwen3_5ForConditionalGeneration", "qwen3_5", ("text_config",)),
    ],
)
def test_a_model_of_more_than_text_is_called_so(
    tmp_path: Path, architecture: str, model_type: str, sections: tuple[str, ...]
) -> None:
    fields = {"architectures": [architecture], "model_type": model_type} | dict.fromkeys(sections, TEXT)
    text = said(refusal(tmp_path, **fields))
    assert architecture in text
    assert "reads images, sound or other inputs" in text
    assert "text_config" in text
    assert "ForCausalLM" in text
    assert "hidden_size" not in text


@pytest.mark.parametrize("architecture", ["T5ForConditionalGeneration", "BartForCausalLM"])
def test_s9_an_encoder_with_a_decoder_is_refused_by_its_configuration(
    tmp_path: Path, architecture: str
) -> None:
    error = refusal(tmp_path, architectures=[architecture], is_encoder_decoder=True)
    assert "a single list of layers" in said(error)


MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
FP8 = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("architecture", "fields", "why"),
    [
        ("GptOssForCausalLM", {"model_type": "gpt_oss", **MXFP4}, "sinks"),
        ("DeepseekV32ForCausalLM", {"model_type": "deepseek_v32", "index_topk": 2048, **FP8}, "index_topk"),
        ("GlmMoeDsaForCausalLM", {"model_type": "glm_moe_dsa", "index_topk": 2048}, "attention is sparse"),
        ("NextForCausalLM", {"model_type": "next", "index_topk": 64}, "attention is sparse"),
        ("Gemma4ForCausalLM", {"model_type": "gemma4_text"}, "heads of two shapes"),
        ("Qwen3NextForCausalLM", {"model_type": "qwen3_next"}, "a state besides keys and values"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "attention"]}, "a state besides keys"),
        (
            "Gemma3nForCausalLM",
            {"model_type": "gemma3n_text", "hidden_size_per_layer_input": 256},
            "their own inputs",
        ),
    ],
)
def test_a_model_that_computes_otherwise_is_told_by_its_configuration(
    tmp_path: Path, architecture: str, fields: dict[str, Any], why: str
) -> None:
    error = refusal(tmp_path, **TEXT, architectures=[architecture], **fields)
    assert error.message.startswith(f"{architecture} is not supported: ")
    assert why in said(error)
    assert "original" not in error.remedy, "it is the original"


@pytest.mark.parametrize("field", ["index_topk", "num_kv_shared_layers", "hidden_size_per_layer_input"])
def test_a_field_that_is_switched_off_refuses_nothing(tmp_path: Path, field: str) -> None:
    for value in (0, None, "many"):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | {field: value}))
        assert load_spec(tmp_path).num_layers == 2


@pytest.mark.parametrize("name", ["quantization", "quantization_config"])
def test_weights_in_the_format_of_mlx_are_called_so(tmp_path: Path, name: str) -> None:
    error = refusal(tmp_path, **LLAMA, **{name: {"group_size": 64, "bits": 4, "mode": "affine"}})
    assert "MLX" in said(error)
    assert error.param == name


def test_a_gguf_file_is_known_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "renamed").write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "other").write_bytes(b"GG")
    assert not is_gguf(tmp_path / "other")
    for name in ("model.gguf", "renamed"):
        assert resolve_model_directory(str(tmp_path / name)) == (tmp_path / name).resolve()
        with pytest.raises(CheckpointError, match=name):
            load_spec(tmp_path / name)


def test_layers_of_transformers_do_not_run_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"m.gguf is a GGUF file.*Leave --model-impl out"):
        load_spec(write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, {}), "transformers")


def test_a_path_of_the_hubs_cache_keeps_the_name_by_which_parts_are_found(tmp_path: Path) -> None:
    """There a file is a link to another one, whose name is a hash."""
    (tmp_path / "snapshot").mkdir()
    names = [part_name("m", number, 2) for number in (1, 2)]
    for number, name in enumerate(names):
        (tmp_path / f"blob{number}").write_bytes(b"GGUF")
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / f"blob{number}")
    path = resolve_model_directory(str(tmp_path / "snapshot" / names[0]))
    assert part_paths(path) == [tmp_path.resolve() / "snapshot" / name for name in names]


def test_a_directory_with_an_adapter_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(UnsupportedModelError, match="an adapter"):
        load_spec(tmp_path)


def test_a_directory_with_several_gguf_models_needs_a_choice(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelConfigError, match=r"several GGUF models: a-Q4_0.gguf, b-00001-of-00002.gguf\."):
        resolve_model_directory(str(tmp_path))


@pytest.mark.parametrize("beside", ["config.json", "mmproj-model-f16.gguf", "imatrix.gguf"])
def test_files_that_repositories_have_beside_a_gguf_model_are_no_other_model(
    tmp_path: Path, beside: str
) -> None:
    for name in ("a-Q4_0.gguf", beside):
        (tmp_path / name).touch()
    assert resolve_model_directory(str(tmp_path)) == tmp_path.resolve() / "a-Q4_0.gguf"


def test_a_checkpoint_goes_before_a_gguf_file_in_its_directory(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert resolve_model_directory(str(tmp_path)) == tmp_path.resolve()
