"""What a wrong command line is answered with: our own words, and those of other engines understood
(issue 25, point 13)."""

from __future__ import annotations

from io import StringIO

import pytest
from cyclopts import CycloptsError

from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.cli.usage_errors import usage_error
from penstock.config.foreign_flags import FOREIGN_FLAGS


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line that should be refused, and is not, starts no server."""
    monkeypatch.setattr("penstock.cli.serve.run_supervisor", lambda *arguments: 0)


def refused(*words: str, **environ: str) -> tuple[str, str]:
    """The two lines of a refusal: what happened, and what to do."""
    out, err = StringIO(), StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ=environ)
    assert run(words, invocation) == 2
    assert out.getvalue() == ""
    first, second = err.getvalue().splitlines()
    return first.removeprefix("error: "), second.strip()


@pytest.mark.parametrize(
    ("words", "said", "remedy"),
    [
        (["serve", "demo", "--prot", "3"], "`penstock serve` has no flag --prot.", "Did you mean --port?"),
        (["serve", "demo", "--prot=3"], "`penstock serve` has no flag --prot.", "Did you mean --port?"),
        (["serve", "demo", "-zz"], "`penstock serve` has no flag -zz.", "`penstock serve --help all` lists"),
        (["chat", "--quik", "x"], "`penstock chat` has no flag --quik.", "Did you mean --quick?"),
        (["serve", "demo", "--pp", "two"], "--pp is 'two'; it must be a whole number.", "--help all"),
        (["serve", "demo", "--pp", "1.5"], "--pp is '1.5'; it must be a whole number.", "--help all"),
        (
            ["serve", "demo", "--tp=.5"],
            "--tp is '.5'; it must be a whole number or several with commas.",
            "--help all",
        ),
        (
            ["serve", "demo", "--dtype", "bfloat"],
            "--dtype is 'bfloat'; it must be auto, float32, bfloat16 or float16.",
            "Did you mean bfloat16?",
        ),
        (
            ["serve", "demo", "--async-depth", "many"],
            "--async-depth is 'many'; it must be a whole number or auto.",
            "--help all",
        ),
        (
            ["serve", "demo", "--drain-seconds", "soon"],
            "--drain-seconds is 'soon'; it must be a number.",
            "--help all",
        ),
        (["serve", "demo", "--pp"], "--pp needs a value.", "--help all"),
        (["serve", "demo", "--pp", "--port", "3"], "--pp needs a value.", "--help all"),
        (
            ["serve", "demo", "a\nb", "c"],
            "`penstock serve` does not take the word 'a\\nb', 'c'.",
            "Usage: penstock serve MODEL",
        ),
        (["bench", "latency"], "no model is given.", "Usage: penstock bench latency MODEL"),
    ],
)
def test_what_is_wrong_with_a_command_line_is_said_in_our_words(
    words: list[str], said: str, remedy: str
) -> None:
    first, second = refused(*words)
    assert first == said
    assert remedy in second


def test_a_value_of_the_environment_is_named_by_its_name_there() -> None:
    said, _ = refused("serve", "demo", PENSTOCK_PORT="x")
    assert said == "PENSTOCK_PORT is 'x'; it must be a whole number."


def test_no_text_of_the_library_reaches_a_user() -> None:
    """Whatever the library may come up with."""
    error = CycloptsError(msg="Parameter --pp requires an argument.")
    said = usage_error(error, ("serve",), ["serve", "demo"], frozenset({"--pp"}))
    assert "Parameter" not in str(said)
    assert said.message == "`penstock serve` cannot be run with these arguments."


def test_a_fraction_is_taken_where_one_belongs_and_a_whole_number_may_have_a_point() -> None:
    out = StringIO()
    words = [
        "serve",
        "demo",
        "--queue-timeout",
        "1.5",
        "--pp",
        "2.0",
        "--async-depth",
        "auto",
        "--print-config",
    ]
    assert run(words, Invocation(stdout=out, stderr=out, stdin=StringIO(), environ={})) == 0
    assert "queue-timeout = 1.5 " in out.getvalue()
    assert "pipeline-parallel-size = 2 " in out.getvalue()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-running-requests", "8"], "is a flag of SGLang; here it is `--max-num-seqs`."),
        (["--max_running_requests=8"], "--max-running-requests is a flag of SGLang"),
        (["--gpu-memory-utilization", "0.9"], "here it is `--kv-cache-bytes` (bytes, and not a share of"),
        (["-ngl", "99"], "-ngl is a flag of llama.cpp; here it is `--device`"),
        (["-c", "4096"], "here it is `--max-model-len`"),
        (["--ctx-size", "4096"], "here it is `--max-model-len`"),
        (["--alias", "name"], "here it is `--served-model-name`"),
        (["-q", "int8"], "-q is a flag of vLLM; here it is `--quantization`"),
        (["--tp-size", "2"], "here it is `--tensor-parallel-size`"),
        (["--disable-radix-cache"], "here it is `--no-enable-prefix-caching`"),
        (
            ["--trust-remote-code"],
            "is a flag of vLLM and SGLang that Penstock does not have: code that a",
        ),
        (["--enforce-eager"], "is a flag of vLLM that Penstock does not have"),
        (["--model", "demo"], "the model is the first word"),
    ],
)
def test_a_flag_of_another_engine_is_answered_from_the_table(words: list[str], said: str) -> None:
    first, second = refused("serve", "demo", *words)
    assert said in first
    assert "Did you mean" not in second
    assert second


@pytest.mark.parametrize("command", [["doctor"], ["plan"], ["bench", "throughput"]])
def test_so_it_is_for_every_command_with_an_engine(command: list[str]) -> None:
    assert "here it is `--max-model-len`" in refused(*command, "demo", "-c", "4096")[0]


def test_the_model_may_stand_behind_a_flag_of_another_engine() -> None:
    assert "--max-num-seqs" in refused("serve", "--max-running-requests", "8", "demo")[0]


def test_a_command_without_an_engine_has_nothing_to_say_of_engines() -> None:
    assert refused("chat", "-c", "4096")[0] == "`penstock chat` has no flag -c."
    assert "--top-k" in FOREIGN_FLAGS
    assert refused("chat", "--top-k", "4")[0] == "`penstock chat` has no flag --top-k."
