"""`doctor`: each check's three outcomes, and the exit code."""

from __future__ import annotations

import json
import re
import socket
from ctypes import CDLL
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

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
    assert "`penstock plan` does it now" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--tp", "3"), "tensor_parallel_size is 3, and"),
        (
            ("--pp", "2", "--quantization", "int8", "--tied-head", "transfer"),
            "a quantised head cannot be sent",
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
    assert (finding.level, finding.text) == ("fail", "cuda:2, cuda:7: not among the 2 GPUs of this machine")
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
