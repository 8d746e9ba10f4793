"""`penstock plan --devices`: figures, recommended layouts and refusals, as a user gets them."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.plans import plan_devices
from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.config.engine import EngineConfig
from penstock.errors import UsageError
from published_shapes import write_shape


def plan(model: str | Path, *words: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    made = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ={})
    code = run(["plan", str(model), *words], made)
    return code, out.getvalue(), err.getvalue()


def planned(model: str | Path, *words: str) -> dict[str, Any]:
    code, out, err = plan(model, *words, "--json")
    assert (code, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    return report


def test_the_numbers_of_a_70b_model_on_four_devices(tmp_path: Path) -> None:
    report = planned(write_shape(tmp_path, "llama-70b"), "--devices", "a100-80g:4", "--concurrency", "32")
    ranks = report["per_rank"]
    assert [(rank["stage"], rank["tp_rank"], rank["layers"]) for rank in ranks] == [
        (0, tp_rank, 80) for tp_rank in range(4)
    ]
    for rank in ranks:
        norms = 80 * 2 * 8192 + 8192
        assert rank["parameters"] == 80 * (37_748_736 + 176_160_768) + 2 * 32064 * 8192 + norms
        assert rank["weight_bytes"] == 2 * rank["parameters"]
        assert rank["kv_bytes_per_token"] == 80 * 1024
        assert rank["all_reduce_bytes_per_step"] == 80 << 20
        assert rank["kv_tokens"] >= 8192
    assert report["model"]["kv_bytes_per_token"] == 320 * 1024
    assert ranks[0]["weight_bytes"] / 1e9 == pytest.approx(35.3, abs=0.05)
    assert report["model"]["parameters"] / 1e9 == pytest.approx(70.55, abs=0.01)
    assert 1e3 * ranks[0]["all_reduce_s"] == pytest.approx(0.14, abs=0.005)


def test_blocks_of_sixteen_tokens(tmp_path: Path) -> None:
    words = ["--devices", "a100-80g:4", "--block-size", "16"]
    report = planned(write_shape(tmp_path, "llama-70b"), *words)
    rank = report["per_rank"][0]
    assert rank["kv_block_bytes"] == 5 << 18  # 1.25 MiB
    assert 8192 // 16 * rank["kv_block_bytes"] == 640 << 20


def test_what_crosses_between_stages(tmp_path: Path) -> None:
    path = write_shape(tmp_path, "llama-70b")
    (hop,) = planned(path, "--devices", "h100:1x2@100Gbit", "--concurrency", "256", "--pp", "2")["hops"] or [
        {}
    ]
    assert hop["hidden_and_residual_bytes"] == 8 << 20
    assert 1e6 * hop["hidden_and_residual_s"] == pytest.approx(671, abs=1)
    assert hop["bytes_per_step"] == 4 << 20  # the two are added before they are sent
    (hop,) = planned(path, "--devices", "h100:2", "--concurrency", "256", "--pp", "2")["hops"]
    assert 1e6 * hop["hidden_and_residual_s"] == pytest.approx(9.3, abs=0.05)


def test_the_bubbles_of_equal_stages(tmp_path: Path) -> None:
    words = ["--devices", "a100-80g:4", "--pp", "4", "--tp", "1"]
    report = planned(write_shape(tmp_path, "llama-70b"), *words)
    rounded = {number: round(bubble, 4) for number, bubble in report["bubble_of_equal_stages"].items()}
    assert rounded == {"1": 0.75, "4": 0.4286, "8": 0.2727, "16": 0.1579}
    assert report["predicted"]["bubble"] == pytest.approx(0.75, abs=0.02)
    assert [rank["layers"] for rank in report["per_rank"]] == [20, 20, 20, 20]


@pytest.mark.parametrize(
    ("model", "devices", "layout"),
    [
        ("llama-8b", "a100-80g", (1, 1, 1, 1)),
        ("llama-8b", "a100-80g:8", (1, 1, 1, 1)),
        ("llama-70b", "a100-80g:4", (1, 4, 1, 1)),
        ("llama-70b", "a100-80g:8", (1, 8, 1, 1)),
        ("llama-405b", "a100-80g:8x2", (2, 8, 1, 1)),
        ("llama-405b", "h100:8x3", (3, 8, 1, 1)),
        ("llama-405b", "h100:8x4", (2, 8, 1, 1)),
        ("llama-405b", "gpu:40g@1555GB/s:312tflops:8x4:nvlink", (4, 8, 1, 1)),
        ("mixtral-8x7b", "a100-40g:4", (1, 4, 1, 4)),
        ("deepseek-v3", "h100:8x4", (4, 8, 1, 32)),
        ("deepseek-v3", "h100:8x8", (4, 8, 1, 32)),
        ("deepseek-v3", "a100-40g:8x8", (8, 8, 1, 64)),
    ],
)
def test_i6_the_recommended_layouts_of_the_table(
    model: str, devices: str, layout: tuple[int, ...], tmp_path: Path
) -> None:
    recommended = planned(write_shape(tmp_path, model), "--devices", devices)["recommended"]
    assert tuple(recommended[name] for name in ("pp", "tp", "dp", "ep")) == layout
    assert recommended["reasons"]


def test_i6_replicas_use_devices_that_are_left_over_when_there_are_requests(tmp_path: Path) -> None:
    path = write_shape(tmp_path, "llama-8b")
    recommended = planned(path, "--devices", "a100-80g:8", "--concurrency", "64")["recommended"]
    assert (recommended["pp"], recommended["tp"], recommended["dp"]) == (1, 1, 8)
    assert recommended["flags"] == "--pp 1 --tp 1 --dp 8 --device cuda"


def test_i6_layers_of_transformers_are_cut_into_stages_of_one_rank(tmp_path: Path) -> None:
    words = ["--devices", "a100-80g:4", "--model-impl", "transformers"]
    report = planned(write_shape(tmp_path, "llama-70b"), *words)
    assert {each["tp"] for each in (report["recommended"], *report["alternatives"])} == {1}
    assert report["recommended"]["pp"] > 1


def command_of(out: str) -> str:
    """The command that a plan shows, which may go on in a second line."""
    _, _, shown = out.partition("  penstock serve ")
    first, second, *_ = shown.splitlines()
    return first.removesuffix("\\") + second.strip() if first.endswith("\\") else first


@pytest.mark.parametrize(
    ("devices", "end"), [("a100-80g", "--tp 1 --device cuda"), ("cpu:16c:64g", "--tp 1")]
)
def test_the_command_that_is_shown_runs_on_the_devices_that_were_described(
    devices: str, end: str, tmp_path: Path
) -> None:
    _, out, _ = plan(write_shape(tmp_path, "llama-8b"), "--devices", devices)
    assert command_of(out).endswith(end)


def test_the_command_that_is_shown_has_the_flags_by_which_weights_were_counted(tmp_path: Path) -> None:
    words = ["--dtype", "float32", "--gguf-dequantize", "--model-impl", "penstock"]
    _, out, _ = plan(write_shape(tmp_path, "llama-8b"), "--devices", "a100-80g", *words)
    assert command_of(out).endswith(" --gguf-dequantize --dtype float32 --model-impl penstock")


def test_i6_a_tighter_context_leaves_fewer_hosts_for_one_replica(tmp_path: Path) -> None:
    words = ["--devices", "h100:8x8", "--concurrency", "64"]
    recommended = planned(write_shape(tmp_path, "deepseek-v3"), *words)["recommended"]
    assert (recommended["pp"], recommended["dp"], recommended["ep"]) == (4, 2, 32)


def test_i6_without_nvlink_the_prediction_decides(tmp_path: Path) -> None:
    path = write_shape(tmp_path, "llama-8b")
    report = planned(path, "--devices", "gpu:12g@500GB/s:80tflops:2")
    assert report["devices"][0]["link"] == "pcie"
    assert "not by NVLink" in " ".join(report["recommended"]["reasons"])
    speeds = [report["recommended"], *report["alternatives"]]
    assert [each["tokens_per_s"] for each in speeds] == sorted(
        (each["tokens_per_s"] for each in speeds), reverse=True
    )


def test_i6_where_nvlink_joins_devices_of_which_no_one_stage_can_use_enough_the_prediction_decides(
    tmp_path: Path,
) -> None:
    """Five devices: heads divide by four, and four devices are too small."""
    report = planned(write_shape(tmp_path, "llama-70b"), "--devices", "a100-40g:34g:5")
    recommended = report["recommended"]
    assert report["devices"][0]["link"] == "nvlink"
    assert (recommended["pp"], recommended["tp"]) == (5, 1)
    assert "no layout of one stage fits" in " ".join(recommended["reasons"])


def test_i6_unlike_devices_get_as_many_layers_as_they_are_fast(tmp_path: Path) -> None:
    words = ["--devices", "rtx4090+cpu:16c:200g@40GB/s", "--max-model-len", "2048"]
    report = planned(write_shape(tmp_path, "llama-70b"), *words)
    assert report["recommended"]["pp"] == 2
    gpu, cpu = report["recommended"]["layers"]
    assert (gpu + cpu, gpu < cpu) == (80, True)  # the GPU is full
    assert f"--device cuda:0,cpu --partition {gpu},{cpu}" in report["recommended"]["flags"]


def test_d16_the_tightest_stage_strands_the_memory_of_the_others(tmp_path: Path) -> None:
    words = ["--devices", "a100-80g,a100-40g", "--pp", "2"]
    report = planned(write_shape(tmp_path, "llama-8b", max_position_embeddings=131072), *words)
    roomy, tight = report["per_rank"]
    assert tight["stranded_bytes"] == 0
    blocks = (roomy["kv_tokens"] - tight["kv_tokens"]) // 32
    assert roomy["stranded_bytes"] == blocks * roomy["kv_block_bytes"] > 0


def test_a_plan_says_what_would_help(tmp_path: Path) -> None:
    path = write_shape(tmp_path, "llama-70b")
    words = [
        "--devices",
        "a100-80g:2,a100-80g:2@100Mbit@20ms",
        "--concurrency",
        "8",
        "--max-model-len",
        "2048",
    ]
    report = planned(path, *words)
    gains = {each["change"]: each for each in report["would_help"]}
    assert "twice the memory bandwidth" in next(iter(gains))
    more = next(each for change, each in gains.items() if change.startswith("8 GiB more"))
    assert more["kv_gain"] > 0


def test_a_slow_link_is_what_would_help_most_where_it_bounds(tmp_path: Path) -> None:
    words = ["--devices", "h200:1x2@10Mbit@1ms", "--concurrency", "16", "--max-model-len", "2048"]
    first = planned(write_shape(tmp_path, "llama-70b", num_hidden_layers=100), *words)["would_help"][0]
    assert first["change"] == "a network 10 times as fast"
    assert first["gain"] > 0.5


def test_every_prediction_is_there_and_follows_the_concurrency(tmp_path: Path) -> None:
    path = write_shape(tmp_path, "llama-70b")
    one = planned(path, "--devices", "a100-80g:4")["predicted"]
    many = planned(path, "--devices", "a100-80g:4", "--concurrency", "100")["predicted"]
    for own in (one, many):
        assert {"ttft_s", "time_per_token_s", "tokens_per_s", "bubble"} <= own.keys()
        assert 0.0 <= own["bubble"] < 1.0
    assert many["running"] == 100
    assert many["tokens_per_s"] > 10 * one["tokens_per_s"]
    assert many["time_per_token_s"] > one["time_per_token_s"]


@pytest.mark.parametrize("concurrency", ["1", "32"])
@pytest.mark.parametrize("devices", ["a100-80g:4", "h100:8x2@100Gbit", "rtx4090:4,cpu:16c:200g@40GB/s"])
def test_the_table_fits_a_hundred_columns(
    devices: str, concurrency: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_shape(tmp_path, "llama-70b")
    monkeypatch.chdir(path.parent)
    code, out, err = plan(Path(path.name), "--devices", devices, "--concurrency", concurrency)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100, max(lines, key=len)
    assert any(line.startswith("  penstock serve ") for line in lines)


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["--devices", "h101"], 2, "'h101' is not a known device"),
        (["--devices", "absent.toml"], 2, "it cannot be read"),
        (["--devices", "joined"], 2, "no host is to join"),
        (["--devices", "a100-80g:4", "--concurrency", "0"], 2, "concurrency is 0"),
        (["--devices", "a100-80g:4", "--tp", "3"], 2, "the recommended layout is --pp 1 --tp 4"),
        (["--devices", "a100-80g:4", "--pp", "5"], 2, "no layout with the given"),
        (["--devices", "a100-80g:4", "--max-model-len", "9000"], 2, "this model allows 2 to 8192"),
        (["--devices", "rtx4090"], 4, "131.4 GiB of weights"),
        (["--devices", "cpu:4c:8g", "--quantization", "int8"], 4, "Use more devices, --quantization int8"),
        (["--devices", "a100-80g:4", "--quantization", "int4"], 2, "but a100-80g is a GPU: they run on the"),
        (["--devices", "a100-80g:4", "--partition-mix", "x"], 2, "not a mix of prefill and decode"),
        (["--json"], 2, "--json is for a plan with --devices"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_words(
    words: list[str], code: int, what: str, tmp_path: Path
) -> None:
    exit_code, _, err = plan(write_shape(tmp_path, "llama-70b"), *words)
    assert exit_code == code, err
    assert what in err
    assert "Traceback" not in err


def test_hosts_join_whatever_is_set_for_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EngineConfig] = []

    def open_hosts(config: EngineConfig, _: object) -> None:
        asked.append(config)
        raise UsageError("hosts were waited for.")

    monkeypatch.setattr(plan_devices, "open_hosts", open_hosts)
    words = ["--devices", "joined", "--hosts", "3", "--listen-workers", "127.0.0.1:7700"]
    words += ["--join-token-file", str(tmp_path / "token"), "--pp", "2", "--threads-per-rank", "1,2"]
    code, _, err = plan("demo", *words)
    assert (code, "hosts were waited for" in err) == (2, True), err
    (config,) = asked
    assert (config.cluster.hosts, config.parallel.pipeline_parallel_size) == (3, 3), "a stage for each"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "config.json"),
        ('{"architectures": ["NoSuchForCausalLM"]}', "NoSuchForCausalLM"),
        ("[]", "config.json"),
    ],
)
def test_a_bare_config_that_is_bad_is_refused(content: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    code, _, err = plan(tmp_path / "config.json", "--devices", "h100")
    assert code == 3
    assert what in err
