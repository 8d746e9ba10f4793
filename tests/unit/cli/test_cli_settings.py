"""Settings: where each came from, TOML that can be fed back, and the configs that they become."""

from __future__ import annotations

import math
import re
import tomllib
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.cli import program
from penstock.cli import serve as cli_serve
from penstock.cli.program import run
from penstock.cli.reporter import JsonReporter, ServeReporter
from penstock.cli.settings import configured_server, read_keys
from penstock.cli.sources import read_toml
from penstock.cli.terminal import Invocation
from penstock.config.declared import ENGINE, SERVER, configured_engine, declared
from penstock.config.engine import EngineConfig
from penstock.config.server import ServerConfig
from penstock.engine.supervisor.reports import ModelFound, Reporter
from penstock.errors import UsageError


def print_config(*words: str, **environ: str) -> str:
    out, err = StringIO(), StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ=environ)
    code = run(["serve", *words, "--print-config"], invocation)
    assert (code, err.getvalue()) == (0, "")
    return out.getvalue()


def refused(*words: str, **environ: str) -> str:
    err = StringIO()
    invocation = Invocation(stdout=StringIO(), stderr=err, stdin=StringIO(), environ=environ)
    assert run(["serve", *words, "--print-config"], invocation) == 2
    return err.getvalue()


def settings_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    return str(path)


def line_of(text: str, key: str) -> str:
    return next(line for line in text.splitlines() if line.startswith((f"{key} ", f"# {key}")))


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = settings_file(tmp_path, 'model = "m"\nport = 1\nmax-num-seqs = 2\nblock_size = 3\n')
    shown = print_config(
        "--config", path, "--port", "9", PENSTOCK_PORT="8", PENSTOCK_MAX_NUM_SEQS="7", PENSTOCK_SEED=""
    )
    assert line_of(shown, "port") == "port = 9  # flag"
    assert line_of(shown, "max-num-seqs") == "max-num-seqs = 7  # environment PENSTOCK_MAX_NUM_SEQS"
    assert line_of(shown, "block-size") == f"block-size = 3  # file {path}"
    assert line_of(shown, "seed") == "seed = 0  # default"
    assert line_of(shown, "model") == f'model = "m"  # file {path}'


def test_printed_settings_can_be_fed_back(tmp_path: Path) -> None:
    first = print_config(
        *('a "quoted" \\ path', "--pp", "3", "--partition", "1,2,3", "--insecure", "--drain-seconds", "1.5"),
        *("--num-blocks", "77", "--served-model-name", "näme", "--dtype", "float16", "--log-format", "json"),
    )
    path = settings_file(tmp_path, first)
    second = print_config("--config", path)
    assert tomllib.loads(second) == tomllib.loads(first)
    values = tomllib.loads(first)
    assert values["model"] == 'a "quoted" \\ path'
    assert values["insecure"] is True
    assert values["num-blocks"] == 77
    assert "max-model-len" not in values  # unset: a comment


def test_every_setting_has_an_environment_name() -> None:
    shown = print_config(
        PENSTOCK_MODEL="m",
        PENSTOCK_PIPELINE_PARALLEL_SIZE="2",
        PENSTOCK_INSECURE="yes",
        PENSTOCK_KV_CACHE_BYTES="1000",
        PENSTOCK_PP_LAYER_PARTITION="3,2",
    )
    assert line_of(shown, "model") == 'model = "m"  # environment PENSTOCK_MODEL'
    assert "pipeline-parallel-size = 2  # environment PENSTOCK_PIPELINE_PARALLEL_SIZE\n" in shown
    assert line_of(shown, "insecure") == "insecure = true  # environment PENSTOCK_INSECURE"
    assert line_of(shown, "kv-cache-bytes").startswith("kv-cache-bytes = 1000  #")
    assert line_of(shown, "partition") == 'partition = "3,2"  # environment PENSTOCK_PP_LAYER_PARTITION'
    assert "pipeline-parallel-size = 4  # environment PENSTOCK_PP\n" in print_config(PENSTOCK_PP="4")


def test_a_partition_of_the_environment_does_not_bind_one_stage() -> None:
    """Issue 25, point 10."""
    assert 'partition = "even"  # default' in print_config(PENSTOCK_PP_LAYER_PARTITION="3,2")
    assert 'partition = "even"' in print_config("--pp", "1", PENSTOCK_PP_LAYER_PARTITION="3,2")
    assert 'partition = "3,2"  # flag' in print_config("--partition", "3,2")


def test_the_environment_of_the_process_is_not_taken_for_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PP_LAYER_PARTITION", "3,2")
    environ = {"PENSTOCK_PP_LAYER_PARTITION": "3,2"}
    assert 'partition = "even"' in print_config(**environ)
    shown = print_config("--pp", "2", **environ)
    assert line_of(shown, "partition") == 'partition = "3,2"  # environment PENSTOCK_PP_LAYER_PARTITION'


def test_keys_are_never_printed(tmp_path: Path) -> None:
    assert "# admin-key: set by " in print_config("--admin-key", "s3cret")
    for shown in (
        print_config("--api-key", "x", PENSTOCK_ADMIN_KEY="s3cret"),
        print_config("--api-key", "s3cret"),
        print_config(PENSTOCK_API_KEY="s3cret,s3cret2"),
        print_config("--config", settings_file(tmp_path, 'api-key = ["s3cret"]\n')),
    ):
        assert "s3cret" not in shown
        assert "# api-key: set by " in shown


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot = 1\n", "Did you mean port?"),
        ("port = \n", "is not TOML"),
        ("port = " + 100_000 * "[", "is not TOML"),
        ("port = [1, 2]\n", "not a valid value of --port"),
        ("port = true\n", "not a valid value of --port"),
        ('port = "x"\n', "is 'x'; it must be a whole number."),
        ('insecure = "maybe"\n', "must be true or false"),
        ("[serve]\nport = 1\n", "serve, which is not a setting"),
        ('dtype = "float8"\n', "float8"),
        ('config = "other.toml"\n', "config, which is not a setting"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, text: str, told: str) -> None:
    path = settings_file(tmp_path, text)
    assert told in refused("--config", path)


def test_a_file_that_windows_has_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes(b"\xef\xbb\xbfport = 9000\r\n")
    assert read_toml(path) == {"port": 9000}


def test_a_bad_environment_value_is_named() -> None:
    assert "PENSTOCK_PORT" in refused(PENSTOCK_PORT="x")
    assert "PENSTOCK_INSECURE" in refused(PENSTOCK_INSECURE="perhaps")
    assert "cannot be read" in refused("--config", "/nonexistent/file.toml")


class Recorded:
    """Stands for the supervisor: keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[EngineConfig, ServerConfig, Reporter]] = []

    def __call__(self, engine: EngineConfig, server: ServerConfig, reporter: Reporter) -> int:
        self.calls.append((engine, server, reporter))
        reporter.report(ModelFound(directory="/models/demo"))
        return 17


def serve(monkeypatch: pytest.MonkeyPatch, *words: str, **environ: str) -> tuple[Recorded, str]:
    recorded, out = Recorded(), StringIO()
    monkeypatch.setattr(cli_serve, "run_supervisor", recorded)
    invocation = Invocation(stdout=out, stderr=StringIO(), stdin=StringIO(), environ=environ)
    assert run(["serve", *words], invocation) == 17  # the supervisor's exit code is the program's
    return recorded, out.getvalue()


EVERY_FLAG = """
m --served-model-name s --dtype float16 --max-model-len 11 --seed 12 --pp 2 --tp 2,1 --dp 2 --ep
--partition 4,1 --partition-mix 24:25 --async-depth 1 --max-plans-in-flight 11 --threads-per-rank 3
--device cpu,cuda:1
--tied-head transfer --heartbeat-limit 9 --load-timeout 45 --step-timeout 24 --quantization int8
--gguf-dequantize
--kernels -attention,-head --numeric-class avx512 --pin-threads off --model-impl penstock --pooling cls
--chat-template THIS_FILE
--block-size 13 --num-blocks 14 --kv-cache-bytes 15 --eviction-policy lfu
--kv-store /blocks --kv-store-bytes 2097152 --kv-store-when-found 1 --kv-store-patience 46
--kv-prefetch-policy wait-all
--kv-host-bytes 47 --kv-write-rate 48 --kv-store-policy write-back
--max-num-seqs 16 --max-num-batched-tokens 17 --prefill-chunk 18 --max-waiting-requests 19
 --queue-timeout 20 --min-start-bytes 65 --max-sessions 59 --micro-batches 2 --inter-token-target 250
 --max-waiting-tokens 30 --built-grammar-bytes 62 --record-decisions /log
--speculative-method draft_model --num-speculative-tokens 5
--speculative-model small --speculative-quantization int4 --speculative-device cuda:1
--host ::1 --port 21 --reuse-port --api-key k0 --admin-key a0 --insecure --drain-seconds 22
--json-open-objects --vllm-metric-names --no-warm-spare
--hosts 2 --listen-workers [::1]:7801 --join-token-file /token --join-token-ttl 63 --host-name attic
--link-ports 7801-7802 --insecure-links --state-dir /state --rejoin-timeout 64
--discover --ray {"placement":"pack"}
--ssl-certfile /a.crt --ssl-keyfile /a.key
--allowed-origins https://a.example --allowed-origins http://localhost:3000
--allowed-hosts host.docker.internal --allowed-hosts box
--max-body-bytes 31 --max-prompt-bytes 32 --max-json-depth 33 --max-messages 34 --max-prompts 35
--max-prompt-scores 45 --max-event-streams 49 --max-resumable-streams 48 --max-choices 11 --max-n 12
--max-profile-seconds 50 --max-profile-bytes 1048576 --max-profiles 51 --profile-dir /tmp
--max-embedding-inputs 51 --max-embedding-tokens 52
--session-idle-seconds 60 --max-session-idle-seconds 61
--max-logprobs 5 --max-stop-strings 6 --max-stop-string-bytes 7 --max-stop-token-ids 8
--max-logit-bias 9 --max-allowed-token-ids 10 --max-bad-words 13 --max-bad-word-bytes 14
--max-schema-bytes 51 --max-schema-depth 52 --max-enum-items 53 --max-pattern-bytes 54 --max-repeats 55
--max-compiling 3 --max-compile-waiting 56 --compile-timeout 57 --grammar-cache-bytes 58
--max-connections 23 --max-request-line 36 --max-header-bytes 37 --max-headers 38
--header-timeout 39 --body-timeout 40 --keep-alive-timeout 41 --write-timeout 42 --min-body-rate 43
--min-free-bytes 44
--max-tools 9 --max-tool-bytes 50 --max-template-kwargs 0 --tool-parser hermes --reasoning-parser qwen3
""".replace("THIS_FILE", __file__)


def test_every_flag_reaches_its_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# team a\nk1\n\n k2 \n")
    words = EVERY_FLAG.split()
    recorded, _ = serve(monkeypatch, *words, "--api-key-file", str(keys), "--log-format", "json")
    ((engine, server, reporter),) = recorded.calls
    assert msgspec.to_builtins(engine) == {
        "model": {
            "model": "m",
            "dtype": "float16",
            "max_model_len": 11,
            "quantization": "int8",
            "gguf_dequantize": True,
            "model_impl": "penstock",
            "pooling": "cls",
            "chat_template": __file__,
        },
        "parallel": {
            "pipeline_parallel_size": 2,
            "data_parallel_size": 2,
            "tensor_parallel_size": "2,1",
            "enable_expert_parallel": True,
            "partition": "4,1",
            "partition_mix": "24:25",
            "async_depth": 1,
            "max_plans_in_flight": 11,
            "threads_per_rank": 3,
            "device": "cpu,cuda:1",
            "tied_head": "transfer",
            "heartbeat_limit_s": 9.0,
            "warm_spare": False,
            "load_timeout_s": 45.0,
            "step_timeout_s": 24.0,
            "kernels": "-attention,-head",
            "numeric_class": "avx512",
            "pin_threads": "off",
            "backend": "mp",
        },
        "cache": {
            "block_size": 13,
            "num_blocks": 14,
            "kv_cache_bytes": 15,
            "enable_prefix_caching": True,
            "eviction_policy": "lfu",
            "kv_store": "/blocks",
            "kv_store_bytes": 1 << 21,
            "kv_store_when_found": 1,
            "kv_store_patience_s": 46.0,
            "kv_prefetch_policy": "wait-all",
            "kv_host_bytes": 47,
            "kv_write_bytes_per_s": 48,
            "kv_store_policy": "write-back",
        },
        "scheduler": {
            "max_num_seqs": 16,
            "max_num_batched_tokens": 17,
            "prefill_chunk": 18,
            "max_waiting_requests": 19,
            "max_waiting_tokens": 30,
            "queue_timeout_s": 20.0,
            "min_start_bytes": 65,
            "max_sessions": 59,
            "micro_batches": 2,
            "inter_token_target_ms": 250.0,
            "built_grammar_bytes": 62,
        },
        "speculation": {
            "speculative_method": "draft_model",
            "num_speculative_tokens": 5,
            "speculative_model": "small",
            "speculative_quantization": "int4",
            "speculative_device": "cuda:1",
        },
        "cluster": {
            "hosts": 2,
            "listen_workers": "[::1]:7801",
            "join_token_file": "/token",
            "join_token_ttl_s": 63.0,
            "host_name": "attic",
            "link_ports": "7801-7802",
            "insecure_links": True,
            "state_dir": "/state",
            "discover": True,
            "rejoin_timeout_s": 64.0,
            "ray": '{"placement":"pack"}',
        },
        "seed": 12,
        "record_decisions": "/log",
    }
    told = msgspec.to_builtins(server)
    settings = told.pop("settings")
    assert told == {
        "host": "::1",
        "port": 21,
        "api_keys": ["k0", "k1", "k2"],
        "admin_keys": ["a0"],
        "allowed_origins": ["https://a.example", "http://localhost:3000"],
        "allowed_hosts": ["host.docker.internal", "box"],
        "served_model_names": ["s"],
        "insecure": True,
        "reuse_port": True,
        "ssl_certfile": "/a.crt",
        "ssl_keyfile": "/a.key",
        "drain_s": 22.0,
        "json_open_objects": True,
        "vllm_metric_names": True,
        "min_free_bytes": 44,
        "profile_dir": "/tmp",
        "limits": {
            "max_body_bytes": 31,
            "max_prompt_bytes": 32,
            "max_json_depth": 33,
            "max_messages": 34,
            "max_prompts": 35,
            "max_prompt_scores": 45,
            "max_event_streams": 49,
            "max_resumable_streams": 48,
            "max_profile_s": 50.0,
            "max_profile_bytes": 1 << 20,
            "max_profiles": 51,
            "max_tools": 9,
            "max_tool_bytes": 50,
            "max_template_kwargs": 0,
            "max_choices": 11,
            "max_embedding_inputs": 51,
            "max_embedding_tokens": 52,
            "session_idle_s": 60.0,
            "max_session_idle_s": 61.0,
            "max_logprobs": 5,
            "max_stop_strings": 6,
            "max_stop_string_bytes": 7,
            "max_stop_token_ids": 8,
            "max_logit_bias": 9,
            "max_allowed_token_ids": 10,
            "max_bad_words": 13,
            "max_bad_word_bytes": 14,
            "max_n": 12,
        },
        "connections": {
            "max_connections": 23,
            "max_request_line": 36,
            "max_header_bytes": 37,
            "max_headers": 38,
            "header_timeout_s": 39.0,
            "body_timeout_s": 40.0,
            "keep_alive_timeout_s": 41.0,
            "write_timeout_s": 42.0,
            "min_body_rate": 43,
            "max_discarded_bytes": 64 << 20,
            "max_pipelined": 16,
        },
        "grammars": {
            "max_schema_bytes": 51,
            "max_schema_depth": 52,
            "max_enum_items": 53,
            "max_pattern_bytes": 54,
            "max_repeats": 55,
            "max_compiling": 3,
            "max_compile_waiting": 56,
            "compile_timeout_s": 57.0,
            "grammar_cache_bytes": 58,
        },
        "log_format": "json",
        "tool_parser": "hermes",
        "reasoning_parser": "qwen3",
    }
    assert isinstance(reporter, JsonReporter)
    assert (settings["port"], settings["kernels"]) == (21, "-attention,-head")
    assert settings["api-key"] == settings["api-key-file"] == settings["admin-key"] == "set"
    assert settings["admin-key-file"] == "not set"


def test_allowed_origins_come_from_everywhere(tmp_path: Path) -> None:
    shown = print_config("m", "--allowed-origins", "https://a.example", "--allowed-origins", "http://b:3000")
    values = 'allowed-origins = ["https://a.example", "http://b:3000"]'
    assert line_of(shown, "allowed-origins") == f"{values}  # flag"
    path = settings_file(tmp_path, shown)
    assert line_of(print_config("--config", path), "allowed-origins") == f"{values}  # file {path}"
    shown = print_config("m", PENSTOCK_ALLOWED_ORIGINS="https://a.example,http://b:3000")
    assert line_of(shown, "allowed-origins") == f"{values}  # environment PENSTOCK_ALLOWED_ORIGINS"
    assert line_of(print_config("m"), "allowed-origins") == "allowed-origins = []  # default"


def test_several_names_are_given_once_for_each_or_behind_one_flag_as_in_vllm(tmp_path: Path) -> None:
    """Issue 25, point 13."""
    expected = 'served-model-name = ["a", "b_c", "d"]'
    one_each = ["--served-model-name", "a", "--served-model-name=b_c", "--served_model_name", "d"]
    assert line_of(print_config("m", *one_each), "served-model-name") == f"{expected}  # flag"
    shown = print_config("m", "--port", "3", "--served-model-name", "a", "b_c", "d", "--insecure")
    assert line_of(shown, "served-model-name") == f"{expected}  # flag"
    assert line_of(shown, "insecure") == "insecure = true  # flag"
    assert expected in print_config("--config", settings_file(tmp_path, shown))
    assert expected in print_config("m", PENSTOCK_SERVED_MODEL_NAME="a,b_c,d")
    shown = print_config("--served-model-name", "a", "m")
    assert 'served-model-name = ["a"]' in shown
    assert 'model = "m"' in shown, "behind a flag, the model is the last word"
    path = settings_file(tmp_path, 'served-model-name = "a"\n')
    assert 'served-model-name = ["a"]' in print_config("m", "--config", path)


@pytest.mark.parametrize("names", [[""], ["a", " "]])
def test_a_name_without_characters_is_refused(names: list[str]) -> None:
    with pytest.raises(UsageError, match="empty name"):
        configured_server({"served_model_names": names})


def test_rule_4_what_a_client_is_shown_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GHSA-r8xv-p3w3-58q4: every setting that can hold a secret does; none of them is shown."""
    keys = {name: tmp_path / f"{name}-hidden" for name in ("api", "admin")}
    for name, path in keys.items():
        path.write_text(f"{name}-from-a-file")
    words = ["--api-key", "api-1", "--admin-key", "admin-1", "--kv-store"]
    words += ["redis://user:pass-1@host.example:6379/3?password=pass-2"]
    files = ["--api-key-file", str(keys["api"]), "--admin-key-file", str(keys["admin"])]
    recorded, _ = serve(monkeypatch, "m", *words, *files)
    ((engine, server, _),) = recorded.calls
    assert "pass-1" in (engine.cache.kv_store or ""), "the engine has it"
    assert server.settings["kv-store"] == "redis://host.example/3"
    shown = msgspec.json.encode(server.settings).decode()
    for secret in ("api-1", "admin-1", "from-a-file", "hidden", "pass-1", "pass-2", "user:"):
        assert secret not in shown
    assert {*server.settings} >= {"port", "pipeline-parallel-size", "max-headers", "kv-store-bytes"}


def test_what_is_out_of_range_is_named_by_a_flag_that_exists() -> None:
    err = StringIO()
    invocation = Invocation(stdout=StringIO(), stderr=err, stdin=StringIO(), environ={})
    assert run(["serve", "m", "--kv-write-rate", "-1"], invocation) == 2
    assert err.getvalue().startswith("error: --kv-write-rate is -1;")
    settings = {setting.name for setting in declared(*ENGINE, *SERVER)}
    fields = {field for kind in (*ENGINE, *SERVER) for field in kind.__struct_fields__}
    parts = {
        "model",
        "parallel",
        "cache",
        "scheduler",
        "speculation",
        "cluster",
        "limits",
        "connections",
        "grammars",
        "settings",
    }
    assert fields - settings == parts | {"max_discarded_bytes", "max_pipelined"}
    assert settings - fields == {"topology", "speculative_config", "api_key_file", "admin_key_file"}


def test_defaults_are_those_of_the_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, out = serve(monkeypatch, "demo")
    ((engine, server, reporter),) = recorded.calls
    assert engine == EngineConfig(model=engine.model)
    assert msgspec.structs.replace(server, settings={}) == ServerConfig()
    assert isinstance(reporter, ServeReporter)
    assert "model demo" in out


def test_names_of_kernels_may_look_like_flags(tmp_path: Path) -> None:
    expected = 'kernels = "-attention,-head"'
    assert expected in print_config("--kernels", "-attention,-head", "--port", "9")
    assert expected in print_config("--kernels=-attention,-head")
    assert expected in print_config(PENSTOCK_KERNELS="-attention,-head")
    path = settings_file(tmp_path, expected)
    assert expected in print_config("--config", path)


def test_choices_are_checked_where_they_are_typed() -> None:
    assert "int5" in refused("--quantization", "int5")
    assert "maybe" in refused("--pin-threads", "maybe")
    assert "cobol" in refused("--tool-parser", "cobol")
    assert "PENSTOCK_QUANTIZATION" in refused(PENSTOCK_QUANTIZATION="int5")


def test_several_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, out = serve(monkeypatch, "demo", PENSTOCK_API_KEY="k1,k2")
    assert recorded.calls[0][1].api_keys == ["k1", "k2"]
    assert "key on (2)" in out
    assert "k1" not in out


def test_a_key_file_must_hold_a_key(tmp_path: Path) -> None:
    marked = tmp_path / "marked"
    marked.write_text("\ufeffk1\n# another\nk2\n", encoding="utf-8")
    assert read_keys(marked) == ["k1", "k2"], "Windows marks UTF-8 at the beginning"
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n\n")
    with pytest.raises(UsageError, match="does not hold a key"):
        read_keys(empty)
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "none")
    assert read_keys(None) == []


@pytest.mark.parametrize("bad", [{"port": -1}, {"drain_s": float("nan")}, {"api_keys": [" "]}])
def test_bad_front_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        configured_server(bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_connections": 0},
        {"max_headers": -1},
        {"header_timeout_s": 0.0},
        {"write_timeout_s": math.inf},
        {"keep_alive_timeout_s": math.nan},
        {"max_body_bytes": 0},
        {"max_json_depth": 0},
        {"max_prompts": 0},
        {"max_tools": -1},
        {"max_tool_bytes": -1},
        {"max_template_kwargs": -1},
        {"max_embedding_inputs": 0},
        {"max_embedding_tokens": 0},
        {"max_logprobs": 21},
        {"max_prompt_scores": -1},
        {"max_stop_strings": 17},
        {"max_stop_string_bytes": 0},
        {"max_stop_token_ids": -1},
        {"max_choices": 0},
        {"max_n": 0},
        {"max_n": 129},
        {"max_logit_bias": 1025},
        {"max_allowed_token_ids": 1025},
        {"max_bad_words": 129},
        {"max_bad_word_bytes": 129},
        {"max_schema_bytes": 0},
        {"max_compiling": 0},
        {"compile_timeout_s": math.inf},
    ],
)
def test_bad_limits_are_refused_and_named(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be") as raised:
        configured_server(bad)
    assert raised.value.code == "out_of_range"
    assert [raised.value.param] == list(bad)


@pytest.mark.parametrize(
    "bad", [{"queue_timeout_s": 0.0}, {"queue_timeout_s": math.inf}, {"max_num_seqs": 0}]
)
def test_bad_engine_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        configured_engine(bad, "m")


def test_the_keys_that_a_process_hides_are_the_secret_settings() -> None:
    secrets = [setting for setting in declared(*ENGINE, *SERVER) if setting.setting.is_secret]
    assert [flag for setting in secrets for flag in setting.flags] == list(program._KEY_FLAGS)
    names = {name for setting in secrets for name in setting.environment_names}
    assert names == program._KEY_ENVS


def test_every_setting_is_explained_where_it_is_declared() -> None:
    for config in (*ENGINE, *SERVER):
        explained = re.findall(r"^ {8}(\w+): ", config.__doc__ or "", re.MULTILINE)
        assert {setting.name for setting in declared(config)} <= set(explained)


@pytest.mark.parametrize("given", ["ssl_certfile", "ssl_keyfile"])
def test_a_certificate_without_its_key_is_refused_and_the_other_way_round(given: str) -> None:
    missing = "ssl_keyfile" if given == "ssl_certfile" else "ssl_certfile"
    with pytest.raises(UsageError) as raised:
        configured_server({given: Path("server.pem")})
    assert raised.value.param == missing
    assert str(raised.value).startswith(f"--{given.replace('_', '-')} is given without")


def test_files_of_https_are_given_to_the_server_by_their_whole_paths() -> None:
    config = configured_server({"ssl_certfile": Path("a.crt"), "ssl_keyfile": Path("a.key")})
    assert (config.ssl_certfile, config.ssl_keyfile) == (
        str(Path("a.crt").absolute()),
        str(Path("a.key").absolute()),
    )
    assert config.scheme == "https"
