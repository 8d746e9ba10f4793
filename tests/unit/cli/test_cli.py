"""The program as a whole: dispatch, help screens, spelling, errors and exit codes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from cyclopts import Parameter
from hypothesis import given
from hypothesis import strategies as st

from penstock import __version__
from penstock.cli.help import COMMANDS
from penstock.cli.program import hide_keys, run
from penstock.cli.terminal import Invocation, Style, one_line, printable, report_error
from penstock.config.engine import EngineConfig, ParallelConfig
from penstock.errors import (
    AuthenticationError,
    CheckpointError,
    InvalidRequestError,
    NotEnoughMemoryError,
    OverloadedError,
    PartitionError,
    PenstockError,
    PortInUseError,
    UsageError,
)


def invocation(**environ: str) -> Invocation:
    return Invocation(stdout=StringIO(), stderr=StringIO(), stdin=StringIO(), environ=environ)


def penstock(*words: str, **environ: str) -> tuple[int, str, str]:
    made = invocation(**environ)
    code = run(words, made)
    assert isinstance(made.stdout, StringIO)
    assert isinstance(made.stderr, StringIO)
    return code, made.stdout.getvalue(), made.stderr.getvalue()


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_import_is_free_of_torch_and_of_the_web_framework() -> None:
    code = (
        "import sys, penstock.cli.program, penstock.cli.serve, penstock.cli.doctor\n"
        "import penstock.cli.chat, penstock.cli.bench.online, penstock.cli.bench.offline\n"
        "heavy = ('torch', 'numpy', 'starlette', 'uvicorn', 'transformers')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_program_loads_no_command() -> None:
    code = (
        "import sys, penstock.cli.program\n"
        "print([name for name in ('rich', 'asyncio', 'zmq', 'rich.console') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_first_help_screen_fits_a_terminal(command: tuple[str, ...]) -> None:
    code, out, _ = penstock(*command, "--help")
    lines = out.splitlines()
    assert code == 0
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 110
    assert COMMANDS[command].example in out


def test_serve_help_shows_ten_flags_and_names_the_other_pages() -> None:
    _, first, _ = penstock("serve", "--help")
    flags = [line for line in first.splitlines() if line.startswith("  --")]
    assert len(flags) == 10
    assert all("PENSTOCK_" in line for line in flags)
    assert "`--help all`" in first
    assert "`--help kv`" in first
    assert "`--help pipeline`" in first


def test_help_all_has_every_flag_once_with_default_and_environment_name() -> None:
    _, out, _ = penstock("serve", "--help", "all")
    flags = [line.split()[0] for line in out.splitlines() if line.startswith("  --")]
    assert len(flags) == len(set(flags))
    _, first, _ = penstock("serve", "--help")
    assert f"the other {len(flags) - 10}" in first
    assert {"--async-depth", "--prefill-chunk", "--insecure", "--drain-seconds", "--seed"} <= set(flags)
    row = next(line for line in out.splitlines() if line.split()[:1] == ["--async-depth"])
    assert row.split()[-2:] == ["[auto]", "PENSTOCK_ASYNC_DEPTH"]
    assert "PENSTOCK_PP_LAYER_PARTITION" in out


def test_help_of_a_part_shows_that_part_only() -> None:
    _, out, _ = penstock("serve", "--help", "kv")
    flags = [line.split()[0] for line in out.splitlines() if line.startswith("  --")]
    assert flags == [
        "--block-size",
        "--num-blocks",
        "--kv-cache-bytes",
        "--enable-prefix-caching",
        "--kv-store",
        "--kv-store-bytes",
        "--kv-store-when-found",
        "--kv-store-patience",
        "--kv-prefetch-policy",
        "--kv-host-bytes",
        "--kv-write-rate",
        "--kv-store-policy",
        "--eviction-policy",
    ]
    assert "[on; --no-enable-prefix-caching]" in out
    code, _, err = penstock("serve", "--help", "schedule")
    assert code == 2
    assert "Did you mean scheduler?" in err


def test_root_help_and_version() -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        code, out, _ = penstock(*words)
        assert code == 0
        assert len(out.splitlines()) <= 24
        for command in COMMANDS:
            assert " ".join(command) in out
    assert penstock("--version")[1] == f"penstock {__version__}\n"
    assert penstock("version")[1].startswith(f"penstock {__version__}   python 3.")
    assert "bench serve" in penstock("bench")[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "demo", "--prot", "3"], "--port"),
        (["serve", "demo", "--max-num-seq", "3"], "--max-num-seqs"),
        (["serv", "demo"], "Did you mean serve?"),
        (["bench", "thruput"], "Commands: serve"),
        (["serve", "demo", "--dtype", "float8"], "bfloat16"),
        (["serve", "demo", "--pp", "two"], "--pp is 'two'; it must be a whole number."),
        (["serve", "demo", "extra"], "extra"),
        (["serve", "demo", "--pp"], "--pp"),
        (["serve", "demo", "--pp", "0"], "--pipeline-parallel-size is 0; it must be at least 1."),
        (["serve", "demo", "--port", "70000"], "between 0 and 65535"),
        (["serve", "demo", "--drain-seconds", "-1"], "--drain-seconds is -1.0"),
        (["serve"], "no model is given"),
        (["serve", "demo", "--pp", "2", "--threads-per-rank", "1,x"], "one per stage"),
        (
            ["serve", "demo", "--pp", "2", "--threads-per-rank", "1,2,3"],
            "Give one for all stages, or 2.",
        ),
        (["plan"], "no model is given"),
        (["plan", "demo"], "one stage holds all layers"),
        (["plan", "demo", "--pp", "2", "--partition-mix", "all"], "PROMPT:OUTPUT"),
        (["plan", "demo", "--pp", "9"], "Use at most 6."),
    ],
)
def test_a_wrong_command_line_is_exit_2_with_what_to_do(words: list[str], told: str) -> None:
    code, out, err = penstock(*words)
    assert code == 2
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert second.startswith("  ")
    assert told in err
    assert "Traceback" not in err


def test_d13_a_plan_measures_the_stages_of_a_topology_whatever_layers_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ParallelConfig] = []

    def settle(config: EngineConfig, *_: object) -> EngineConfig:
        asked.append(config.parallel)
        return msgspec.structs.replace(
            config, parallel=msgspec.structs.replace(config.parallel, partition="2,4")
        )

    monkeypatch.setattr("penstock.cli.plans.plan.settle_partition", settle)
    topology = tmp_path / "unlike.toml"
    topology.write_text("[[stage]]\nlayers = 4\ntp = 2\n[[stage]]\nlayers = 2\n")
    code, out, _ = penstock("plan", "demo", "--topology", str(topology))
    assert code == 0
    assert [(each.partition, each.tp_sizes) for each in asked] == [("auto", [2, 1])]
    assert "Serve it with the layers 2,4 in " in out


def test_vllm_spellings_are_understood_and_the_last_of_two_flags_counts() -> None:
    _, out, _ = penstock("serve", "demo", "--print-config", "-pp", "2", "--max_model_len=64", "--pp", "3")
    assert "pipeline-parallel-size = 3  # flag" in out
    assert "max-model-len = 64  # flag" in out
    _, out, _ = penstock("serve", "demo", "--print-config", "-tp", "2", "-dp=4")
    assert "tensor-parallel-size = 2  # flag" in out
    assert "data-parallel-size = 4  # flag" in out
    _, out, _ = penstock("serve", "demo", "--print-config", "--num-gpu-blocks-override", "9")
    assert "num-blocks = 9  # flag" in out


def test_values_with_underscores_stay_as_they_are() -> None:
    _, out, _ = penstock("serve", "./my_model", "--print-config", "--served-model-name=a_b")
    assert 'model = "./my_model"' in out
    assert 'served-model-name = ["a_b"]' in out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (PartitionError("x"), 2),
        (CheckpointError(file="f", expected="a", found="b"), 3),
        (NotEnoughMemoryError("x"), 4),
        (PortInUseError("x"), 5),
        (OverloadedError("x"), 5),
        (AuthenticationError("x"), 5),
        (InvalidRequestError("x"), 2),
        (PenstockError("x"), 70),
        (RuntimeError("x"), 70),
    ],
)
def test_exit_codes_and_three_parts(error: Exception, code: int) -> None:
    made = invocation()
    assert report_error(error, made) == code
    assert isinstance(made.stderr, StringIO)
    lines = made.stderr.getvalue().splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines[1].strip()) > 10  # what to do is never missing


def test_the_error_s_own_remedy_is_shown() -> None:
    made = invocation()
    report_error(
        PortInUseError("port 80 is used by pid 991 (python).", remedy="Use --port or stop it."), made
    )
    assert isinstance(made.stderr, StringIO)
    assert made.stderr.getvalue() == "error: port 80 is used by pid 991 (python).\n  Use --port or stop it.\n"


def test_a_bug_shows_its_trace_with_v_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*, invocation: Annotated[Invocation, Parameter(parse=False)]) -> int:
        raise RuntimeError("boom")

    monkeypatch.setattr("penstock.cli.doctor.version", broken)
    code, _, err = penstock("version")
    assert code == 70
    assert "RuntimeError: boom" in err
    assert "Traceback" not in err
    code, _, err = penstock("version", "-v")
    assert code == 70
    assert "Traceback" in err
    assert "in broken" in err


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*, invocation: Annotated[Invocation, Parameter(parse=False)]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.doctor.version", interrupted)
    assert penstock("version") == (130, "", "")


def test_colours_only_on_a_terminal_and_without_no_color() -> None:
    assert Style.for_stream(Terminal(), {}).paint("x", "red") == "\x1b[31mx\x1b[0m"
    assert Style.for_stream(Terminal(), {"NO_COLOR": "1"}).paint("x", "red") == "x"
    assert Style.for_stream(Terminal(), {"TERM": "dumb"}).paint("x", "red") == "x"
    assert Style.for_stream(StringIO(), {}).paint("x", "red") == "x"


@given(st.text())
def test_text_from_outside_cannot_steer_the_terminal(text: str) -> None:
    shown = printable(text)
    assert all(char.isprintable() or char in "\n\t" for char in shown)
    assert "\n" not in one_line(text)


def test_printable_keeps_readable_text() -> None:
    assert printable("a b\n\tñ 日本 🙂") == "a b\n\tñ 日本 🙂"
    assert printable("\x1b[31mred\x07") == "\\x1b[31mred\\x07"


def test_a_key_leaves_what_can_be_read_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr("setproctitle.setproctitle", titles.append)
    hide_keys(["serve", "demo", "--api-key-file", "k", "--port", "1"], {})
    assert titles == []
    hide_keys(["serve", "demo", "--api-key", "s3cret"], {})
    hide_keys(["serve", "demo", "--api_key=s3cret"], {"PENSTOCK_API_KEY": "other"})
    assert titles == ["penstock serve", "penstock serve"]
    hide_keys(["serve", "--admin-key", "s3cret"], {})
    assert titles.pop() == "penstock serve"
    hide_keys(["serve", "demo", "--port", "1"], {"PENSTOCK_ADMIN_KEY": "s3cret"})
    assert titles.pop() == "penstock serve demo --port 1"
    hide_keys(["serve", "demo", "--port", "1"], {"PENSTOCK_API_KEY": "s3cret"})
    assert titles[2:] == ["penstock serve demo --port 1"]  # a title overwrites the first environment too


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--distributed-executor-backend", "uni"],
            "'uni', which is not supported: the name for ranks in the caller's process is `inprocess`",
        ),
        (["--distributed_executor_backend=external_launcher"], "use `penstock worker --torchrun`"),
        (["--prefill-context-parallel-size", "2"], "context parallelism is not available"),
        (["-dcp", "2"], "context parallelism is not available"),
        (["--pp", "2", "--enable-elastic-ep"], "elastic expert parallelism adds and removes ranks"),
    ],
)
def test_i2_i3_i5_layouts_that_are_not_built_are_refused_by_name(words: list[str], said: str) -> None:
    code, _, err = penstock("serve", "demo", *words)
    assert code == 2
    assert said in " ".join(err.split())


def run_with(redirections: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a shell, which closes or replaces its streams, with an unknown command or none."""
    command = f"exec {shlex.quote(sys.executable)} -m penstock {redirections}"
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env={**os.environ, **environ}, timeout=120
    )


@pytest.mark.parametrize(
    ("redirections", "code"),
    [
        ("version >&-", 0),
        ("nosuch 2>&-", 2),
        ("version <&- >&- 2>&-", 0),
        ("serve nosuch/model 2>&-", 3),
    ],
)
def test_a_closed_stream_changes_no_exit_code(redirections: str, code: int) -> None:
    done = run_with(redirections)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


_HAS_ALL = "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"
_HAS_ALL_AND_CHILD = f"""
import subprocess, sys
from penstock.cli.terminal import Invocation
Invocation.of_process()
sys.exit(subprocess.run([sys.executable, "-c", {_HAS_ALL!r}]).returncode or None in (sys.stdout, sys.stderr))
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_closed_to_no_part_of_the_program(closed: str) -> None:
    words = shlex.join([sys.executable, "-c", _HAS_ALL_AND_CHILD])
    assert subprocess.run(["sh", "-c", f"exec {words} {closed}"], timeout=120).returncode == 0


def test_output_that_finds_no_room_is_no_bug() -> None:
    done = run_with("version >/dev/full")
    assert done.returncode == 4
    assert "a disk is full, perhaps the one that the output goes to: No space left" in done.stderr
    assert "Free space" in done.stderr
    assert "bug" not in done.stderr


def test_characters_that_the_output_lacks_are_escaped(tmp_path: Path) -> None:
    store = tmp_path / "ü…"
    done = run_with(
        "ls", PYTHONIOENCODING="ascii", HF_HUB_CACHE=str(store), OLLAMA_MODELS=str(store), HOME=str(store)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xfc\\u2026," in done.stdout
