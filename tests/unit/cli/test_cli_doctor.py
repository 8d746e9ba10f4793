"""`doctor`: each check's three outcomes, and the exit code."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from ctypes import CDLL
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from checkpoints import make_checkpoint, make_quantized_checkpoint
from gguf_models import as_gguf
from model_stores import in_ollama
from penstock.cli import doctor as cli_doctor
from penstock.cli.doctor import (
    DoctorSettings,
    Finding,
    check_cores,
    check_cpu_kernels,
    check_descriptors,
    check_gpus,
    check_kernel,
    check_machine,
    check_memory,
    check_model,
    check_packages,
    check_port,
    check_python,
    check_torch,
    installed_version,
)
from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.kernels.cpu.library import LoadedKernels
from penstock.tokenizer.detokenizer import byte_level_alphabet


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here compiles, or writes into the user's cache."""
    loaded = LoadedKernels(library=CDLL(None), isa="avx2", reason="from cache (g++ 12.2.0)")
    monkeypatch.setattr(cli_doctor, "load", lambda: loaded)


def doctor(*words: str, **environ: str) -> tuple[int, str]:
    out = StringIO()
    invocation = Invocation(stdout=out, stderr=StringIO(), stdin=StringIO(), environ=environ)
    return run(["doctor", *words], invocation), out.getvalue()


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (check_python((3, 11, 0)), "ok"),
        (check_python((3, 10, 12)), "fail"),
        (check_cores(2, 2), "ok"),
        (check_cores(1, 2), "warn"),
        (check_memory(2 << 30), "ok"),
        (check_memory(1 << 29), "warn"),
        (check_torch("2.13.0+cpu"), "ok"),
        (check_torch("2.11.1"), "ok"),
        (check_torch("2.9.1"), "fail"),
        (check_torch(None), "fail"),
        (check_packages({"numpy": "1", "pyzmq": "2"}), "ok"),
        (check_packages({"numpy": "1", "pyzmq": None}), "fail"),
        (check_descriptors((1024, 1 << 20)), "ok"),
        (check_descriptors((256, 512)), "warn"),
        (check_descriptors((256, -1)), "ok"),
        (check_cpu_kernels(LoadedKernels(library=CDLL(None), isa="avx2", reason="from cache")), "ok"),
        (
            check_cpu_kernels(LoadedKernels(library=CDLL(None), isa="avx2", reason="built", remedy="Do.")),
            "warn",
        ),
        (check_cpu_kernels(LoadedKernels(reason="no C++ compiler found", remedy="Install g++.")), "warn"),
    ],
)
def test_a_check_says_ok_or_what_to_do(finding: Finding, level: str) -> None:
    assert finding.level == level
    assert (finding.remedy == "") == (level == "ok")


def test_a_missing_package_is_named() -> None:
    assert "pyzmq" in check_packages({"numpy": "1", "pyzmq": None}).text
    assert installed_version("no-such-package-here") is None
    assert installed_version("msgspec") is not None


def test_which_kernels_run_and_why_is_said() -> None:
    found = check_cpu_kernels(LoadedKernels(library=CDLL(None), isa="avx2", reason="from cache (g++ 12.2.0)"))
    assert found.text == "avx2, from cache (g++ 12.2.0)"
    none = check_cpu_kernels(LoadedKernels(reason="no C++ compiler found", remedy="Install g++."))
    assert none.text.startswith("none: no C++ compiler found; plain torch is used")
    assert none.remedy == "Install g++."


def test_a_kernel_call_that_is_forbidden_fails() -> None:
    def refused() -> None:
        raise PermissionError(1, "Operation not permitted")

    finding = check_kernel("pidfd", refused, "pidfd_open")
    assert finding.level == "fail"
    assert "Operation not permitted" in finding.text


def test_a_port_in_use_fails_and_names_who() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = check_port("127.0.0.1", port)
        code, out = doctor("--port", str(port))
    assert finding.level == "fail"
    assert str(port) in finding.text
    assert "--port" in finding.remedy
    assert code == 1
    assert "fail  port" in out
    assert check_port("127.0.0.1", port).level == "ok"


def test_this_machine_passes() -> None:
    findings = check_machine(DoctorSettings(port=0), ParallelConfig())
    assert [finding for finding in findings if finding.level == "fail"] == []
    subjects = [finding.subject for finding in findings]
    expected = {"python", "cores", "memory", "torch", "shared memory", "eventfd", "pidfd", "port", "kernels"}
    assert expected <= set(subjects)
    assert len(subjects) == len(set(subjects))


def test_the_demo_model_passes_and_its_stages_are_shown() -> None:
    code, out = doctor("demo", "--pp", "2", "--port", "0")
    assert code == 0
    assert "stage 0" in out
    assert "stage 1" in out
    assert "LlamaForCausalLM, 6 layers" in out


def test_a_partition_that_will_be_measured_is_not_refused() -> None:
    code, out = doctor("demo", "--pp", "2", "--partition", "auto", "--port", "0")
    assert code == 0
    assert "`penstock plan` measures now" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--tp", "3"), "tensor_parallel_size is 3, but"),
        (
            ("--pp", "2", "--quantization", "int8", "--tied-head", "transfer"),
            "a quantised head cannot be transferred",
        ),
        (("--max-model-len", "99999"), "max_model_len"),
        (("--pp", "2", "--partition", "5,5"), "5,5"),
    ],
)
def test_what_serve_would_refuse_fails_with_its_remedy(words: tuple[str, ...], told: str) -> None:
    code, out = doctor("demo", "--port", "0", *words)
    assert code == 1
    failed = out.partition("fail  model")[2]
    assert told in failed.splitlines()[0]
    assert len(failed.splitlines()) == 2, "what to do"


def test_a_topology_shows_each_stages_ranks_and_layers(tmp_path: Path) -> None:
    topology = tmp_path / "pipe.toml"
    topology.write_text("[[stage]]\ntp = 2\nlayers = 4\n[[stage]]\nlayers = 2\n")
    code, out = doctor("demo", "--port", "0", "--topology", str(topology))
    assert code == 0
    assert "usable for 3 ranks" in out
    assert re.search(r"stage 0 +layers 0-3, \d+.\d MB of weights shared by 2 ranks, cpu\n", out)
    assert re.search(r"stage 1 +layers 4-5, \d+.\d MB of weights, cpu\n", out)
    _, out = doctor("demo", "--port", "0", "--quantization", "int8")
    assert "MB of weights before they are int8, cpu\n" in out


def test_gpus_that_are_not_there_are_named() -> None:
    assert check_gpus(["cpu", "cuda:1", "cuda"], 2) == []
    (finding,) = check_gpus(["cuda:2", "cpu", "cuda:7", "cuda:0"], 2)
    assert (finding.level, finding.text) == ("fail", "cuda:2, cuda:7: not among this machine's 2 GPUs")
    code, out = doctor("demo", "--port", "0", "--pp", "2", "--device", "cpu,cuda:99")
    assert code == 1
    assert "fail  device          cuda:99: not among" in out
    code, out = doctor("demo", "--port", "0", "--dp", "2", "--device", "cpu,cuda:98")
    assert code == 1
    assert "cuda:98: not among" in out, "of the second replica too"


def write_model(directory: Path) -> Path:
    """A Llama of one layer, without a tokenizer, written by hand."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 16,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (16, 8),
        "model.norm.weight": (8,),
        "model.layers.0.input_layernorm.weight": (8,),
        "model.layers.0.post_attention_layernorm.weight": (8,),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.layers.0.self_attn.o_proj.weight": (8, 8),
        "model.layers.0.mlp.gate_proj.weight": (12, 8),
        "model.layers.0.mlp.up_proj.weight": (12, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 12),
    }
    write_safetensors(directory / "model.safetensors", shapes)
    return directory


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, data = {}, b""
    for name, shape in shapes.items():
        raw = np.zeros(shape, dtype="<f4").tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def engine_of(model: Path, **parallel: int) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=str(model)), parallel=ParallelConfig(**parallel))


def levels(model: Path) -> dict[str, str]:
    findings = check_model(engine_of(model))
    return {finding.subject: finding.level for finding in findings}


def test_a_model_without_tokenizer_fails_and_without_template_warns(tmp_path: Path) -> None:
    found = levels(write_model(tmp_path))
    assert found == {
        "model": "ok",
        "config.json": "ok",
        "tokenizer.json": "fail",
        "chat template": "warn",
        "weights": "ok",
        "stage 0": "ok",
    }
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("x")
    found = levels(tmp_path)
    assert found["tokenizer.json"] == "ok"
    assert "chat template" not in found


def test_more_stages_than_layers_fail_with_the_remedy(tmp_path: Path) -> None:
    findings = check_model(engine_of(write_model(tmp_path), pipeline_parallel_size=2))
    assert findings[-1].level == "fail"
    assert "`--pp 2` is more than the model's 1 layers" in findings[-1].text
    assert findings[-1].remedy == "Use at most 1."


def test_a_truncated_file_and_missing_tensors_fail(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-100])
    findings = check_model(engine_of(model))
    assert findings[-1].level == "fail"
    assert "model.safetensors" in findings[-1].text
    write_safetensors(model / "model.safetensors", {"model.norm.weight": (8,)})
    found = levels(model)
    assert found["weights"] == "fail"


@pytest.mark.parametrize("layout", ["gptq", "awq", "packed", "int8"])
def test_words_of_a_quantised_checkpoint_count_as_all_their_weights(tmp_path: Path, layout: Any) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "layers": 3}
    make_quantized_checkpoint(tmp_path, layout, bits=8 if layout == "int8" else 4, **sizes)
    assert levels(tmp_path)["weights"] == "ok"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    assert levels(tmp_path)["weights"] == "fail"


def test_a_directory_that_does_not_exist_fails() -> None:
    code, out = doctor("/nonexistent/model", "--port", "0")
    assert code == 1
    assert "fail  model" in out


def test_output_is_plain_lines_with_remedies_below(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("ok", "a", "fine"), Finding("warn", "b", "so\nso\x1b[2J", "Do this.")]
    monkeypatch.setattr(cli_doctor, "check_machine", lambda settings, parallel: found)
    code, out = doctor()
    assert code == 0  # a warning is no failure
    lines = out.splitlines()
    assert lines[0] == "ok    a               fine"
    assert lines[1] == "warn  b               so\\nso\\x1b[2J"
    assert lines[2].strip() == "Do this."


def test_a3_layers_that_the_environment_asks_for_are_those_that_would_be_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Issue 25, point 10."""
    asked = {"PENSTOCK_PP_LAYER_PARTITION": "4,2"}
    monkeypatch.setenv(*next(iter(asked.items())))  # of the process too, as it is when the program runs
    assert "layers 0-5" in doctor("demo", **asked)[1]
    assert "layers 0-3" in doctor("demo", "--pp", "2", **asked)[1]
    assert "layers 0-2" in doctor("demo", "--pp", "2", "--partition", "even", **asked)[1]


def gguf_of(directory: Path, num_parts: int = 1, more: Mapping[str, object] = MappingProxyType({})) -> Path:
    """A small model with a vocabulary of one token for each id and `more` metadata."""
    sizes = {"layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 262}
    checkpoint = make_checkpoint(directory / "checkpoint", **sizes)  # type: ignore[arg-type]
    letters = [*byte_level_alphabet(), *(f"<{index}>" for index in range(6))]
    vocabulary: dict[str, object] = {
        "general.name": "Tiny\x1b one",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.merges": [],
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    return as_gguf(
        checkpoint,
        directory / "gguf",
        lambda name: None if "norm" in name else "Q4_K",
        num_parts=num_parts,
        more_metadata=vocabulary | dict(more),
    ).path


def told_of(model: Path, **parallel: int) -> dict[str, Finding]:
    return {finding.subject: finding for finding in check_model(engine_of(model, **parallel))}


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_gguf_file_says_what_it_is_and_how_it_would_run(tmp_path: Path, num_parts: int) -> None:
    last = sorted(gguf_of(tmp_path, num_parts).parent.glob("*.gguf"))[-1]
    told = told_of(last, pipeline_parallel_size=2)
    assert all(finding.level == "ok" for finding in told.values()), told
    assert list(told) == ["model", "metadata", "vocabulary", "weights", "stage 0", "stage 1", "products"]
    assert told["metadata"].text.startswith(r"GGUF 3 of llama (Tiny\x1b one); LlamaForCausalLM, 2 layers")
    assert "gguf: Q4_K (16 tensors), 4.5 bits a weight" in told["weights"].text
    assert f"in {num_parts} file" in told["weights"].text
    assert told["products"].text == "our kernels compute with the blocks as they are in the file"


def test_a_gguf_file_in_ollamas_store_is_found_by_name_and_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    content = {"model": gguf_of(tmp_path).read_bytes()}
    files = in_ollama(tmp_path / "store", "registry.ollama.ai/library/tiny/latest", content)
    for name in ("tiny", str(files["model"])):
        code, out = doctor(name, "--port", "0")
        assert "GGUF 3 of llama" in out
        assert code == 0


def test_without_kernels_blocks_are_held_as_floats_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_doctor, "load", lambda: LoadedKernels(reason="no C++ compiler found"))
    told = told_of(gguf_of(tmp_path))["products"]
    assert told.level == "warn"
    assert re.search(r"held as float32, \d\.\d MB in all", told.text)


BAD: dict[str, tuple[dict[str, object], str, str]] = {
    "rule": ({"tokenizer.ggml.pre": "unheard-of"}, "vocabulary", "rule 'unheard-of'"),
    "size": (
        {"tokenizer.ggml.tokens": [f"<{index}>" for index in range(200)]},
        "vocabulary",
        "expected 262 tokens, .* found 200",
    ),
    "none": ({"tokenizer.ggml.model": "none"}, "vocabulary", "the file has none"),
    "template": ({"tokenizer.chat_template": "{% if %}"}, "chat template", "the chat template of"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_of_a_gguf_file_would_not_be_served_fails_by_name(tmp_path: Path, case: str) -> None:
    metadata, subject, said = BAD[case]
    told = told_of(gguf_of(tmp_path, more=metadata))
    assert told[subject].level == "fail"
    assert re.search(said, told[subject].text)
    assert told[subject].remedy


def test_a_given_template_counts_and_a_missing_one_can_be_given(tmp_path: Path) -> None:
    model = gguf_of(tmp_path, more={"tokenizer.chat_template": ""})
    assert "--chat-template" in told_of(model)["chat template"].remedy
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    assert "chat template" not in doctor(str(model), "--chat-template", str(tmp_path / "own.jinja"))[1]


def test_a_damaged_and_an_incomplete_gguf_file_fail_with_tensor_or_part(tmp_path: Path) -> None:
    whole = gguf_of(tmp_path)
    (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[:-1000])
    told = told_of(tmp_path / "cut.gguf")["model"]
    assert (told.level, "Download" in told.remedy) == ("fail", True)
    assert re.search(r"cut\.gguf: tensor \S+: expected \d+ bytes .* found a file of \d+ bytes", told.text)
    parts = sorted(gguf_of(tmp_path / "split", 3).parent.glob("*.gguf"))
    parts[2].unlink()
    assert "model-00003-of-00003.gguf: expected all 3 parts" in told_of(parts[0])["model"].text


def test_weights_larger_than_free_memory_warn() -> None:
    assert cli_doctor.check_room(2 << 30, 3 << 30) == []
    (finding,) = cli_doctor.check_room(40 << 30, 3 << 30)
    assert (finding.level, finding.text) == (
        "warn",
        "weights of 40.0 GiB, and 3.0 GiB of memory are free",
    )
