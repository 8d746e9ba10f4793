"""Proving grammars before requests are sent: time, memory, crashes, the cache, and who waits for whom."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.config.limits import GrammarLimits
from penstock.errors import ErrorInfo, InvalidRequestError, OverloadedError, UnavailableError
from penstock.families.registry import resolve_model_directory
from penstock.grammar.proving import ChildProcess, GrammarModel, GrammarProver, ProcessEndedError
from penstock.request import StructuredOutputs

DEMO = GrammarModel(directory=resolve_model_directory("demo"), eos_token_ids=(1,))
DEFAULTS = GrammarLimits()
BAD = ErrorInfo(kind="InvalidRequestError", message="bad", param="structured_outputs", code="invalid_grammar")


class FakeProcess:
    """Answers by the regex that it is asked for; `hold` is waited for."""

    def __init__(self, hold: threading.Event | None = None) -> None:
        self.asked: list[str] = []
        self.is_closed = False
        self.is_gone = False
        self.opens = True
        self._hold = hold

    def open(self) -> ErrorInfo | None:
        if not self.opens:
            raise ProcessEndedError(is_late=False)
        return None

    def ask(self, structured: StructuredOutputs) -> ErrorInfo | None:
        assert structured.regex is not None
        self.asked.append(structured.regex)
        if self._hold is not None:
            assert self._hold.wait(30)
        if self.is_gone or structured.regex in ("late", "crash"):
            raise ProcessEndedError(is_late=structured.regex == "late")
        return BAD if structured.regex == "bad" else None

    def close(self) -> None:
        self.is_closed = True


class Fakes:
    """A prover over fake processes, and those that it has started."""

    def __init__(self, limits: GrammarLimits = DEFAULTS, hold: threading.Event | None = None) -> None:
        self.started: list[FakeProcess] = []
        self.opens = True
        self._hold = hold
        self.prover = GrammarProver(DEMO, limits, self._make)

    def _make(self, model: GrammarModel, seconds: float) -> FakeProcess:
        self.started.append(FakeProcess(self._hold))
        self.started[-1].opens = self.opens
        return self.started[-1]

    def prove(self, regex: str) -> None:
        self.prover.prove_now(StructuredOutputs(regex=regex))


def code_of(work: Callable[[], None]) -> str | None:
    with pytest.raises(InvalidRequestError) as raised:
        work()
    return raised.value.code


def test_what_is_known_is_not_asked_again() -> None:
    fakes = Fakes()
    for _ in range(3):
        fakes.prove("a")
        assert code_of(lambda: fakes.prove("bad")) == "invalid_grammar"
    assert [process.asked for process in fakes.started] == [["a", "bad"]]
    fakes.prover.close()
    assert fakes.started[0].is_closed


def test_the_cache_is_bounded_and_forgets_the_longest_unused() -> None:
    fakes = Fakes(GrammarLimits(grammar_cache_bytes=700))
    for regex in ("a", "b", "a", "c", "a", "b"):
        fakes.prove(regex)
    assert fakes.started[0].asked == ["a", "b", "c", "b"]
    fakes.prover.close()


def test_a_process_that_ends_is_replaced_and_only_what_crashes_is_remembered() -> None:
    fakes = Fakes()
    for regex, message in (("late", "1 s"), ("crash", "memory")):
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match=message) as raised:
                fakes.prove(regex)
            assert raised.value.code == "grammar_too_complex"
    fakes.prove("a")
    assert [process.asked for process in fakes.started] == [["late"], ["late"], ["crash"], ["a"]]
    assert [process.is_closed for process in fakes.started] == [True, True, True, False]
    fakes.prover.close()


def test_a_process_that_ended_while_it_was_idle_says_nothing_of_the_next_grammar() -> None:
    fakes = Fakes()
    fakes.prove("a")
    fakes.started[0].is_gone = True
    fakes.prove("b")
    assert [process.asked for process in fakes.started] == [["a", "b"], ["b"]]
    assert [process.is_closed for process in fakes.started] == [True, False]
    fakes.prover.close()


def test_a_process_that_never_opens_is_an_error_of_the_server() -> None:
    fakes = Fakes()
    fakes.opens = False
    for _ in range(2):
        with pytest.raises(UnavailableError, match="vocabulary"):
            fakes.prove("a")
    assert [process.is_closed for process in fakes.started] == [True, True]
    fakes.prover.close()


def test_requests_for_the_same_grammar_wait_for_one_proof() -> None:
    hold = threading.Event()
    fakes = Fakes(hold=hold)

    async def both() -> None:
        tasks = [asyncio.create_task(fakes.prover.prove(StructuredOutputs(regex="a"))) for _ in range(4)]
        await asyncio.sleep(0)
        hold.set()
        await asyncio.gather(*tasks)

    asyncio.run(both())
    assert [process.asked for process in fakes.started] == [["a"]]
    fakes.prover.close()


def test_r8_one_more_than_may_wait_is_answered_429() -> None:
    hold = threading.Event()
    fakes = Fakes(GrammarLimits(max_compiling=1, max_compile_waiting=1), hold)

    async def three() -> list[BaseException | None]:
        works = [fakes.prover.prove(StructuredOutputs(regex=regex)) for regex in "abc"]
        tasks = [asyncio.create_task(work) for work in works]
        await asyncio.wait(tasks[2:])
        hold.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third = asyncio.run(three())
    assert (first, second) == (None, None)
    assert isinstance(third, OverloadedError)
    fakes.prover.close()


def test_a_client_that_leaves_takes_no_answer_from_others() -> None:
    hold = threading.Event()
    fakes = Fakes(hold=hold)

    async def leave() -> None:
        tasks = [asyncio.create_task(fakes.prover.prove(StructuredOutputs(regex="a"))) for _ in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        hold.set()
        await tasks[1]

    asyncio.run(leave())
    fakes.prover.close()


def test_who_asks_when_it_is_closed_gets_an_error() -> None:
    fakes = Fakes()
    fakes.prover.close()
    for _ in range(2):  # the second one does not wait for the first
        with pytest.raises(UnavailableError, match="shut down"):
            fakes.prove("a")
    assert not fakes.started


def test_without_a_thread_for_it_a_grammar_is_refused_and_may_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fakes = Fakes()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="can't start new thread"):
                fakes.prove("a")
    fakes.prove("a")
    assert [process.asked for process in fakes.started] == [["a"]], "what was refused is not proved later"
    fakes.prover.close()


def test_a_model_without_a_tokenizer_has_no_structured_output(tmp_path: Path) -> None:
    for model in (None, GrammarModel(directory=tmp_path, eos_token_ids=(1,))):
        prover = GrammarProver(model, GrammarLimits())
        assert code_of(lambda: prover.prove_now(StructuredOutputs(regex="a"))) == "unsupported_by_model"  # noqa: B023
        prover.close()


@pytest.fixture(scope="module")
def prover() -> Iterator[GrammarProver]:
    """Over real processes."""
    prover = GrammarProver(DEMO, GrammarLimits(max_compiling=1))
    yield prover
    prover.close()


REFUSED = [
    ({"json": '{"not":{}}'}, "unsupported_schema", "not"),
    ({"json": '{"uniqueItems":true,"type":"array"}'}, "unsupported_schema", "uniqueItems"),
    ({"json": '{"if":{},"then":{}}'}, "unsupported_schema", "if"),
    ({"json": '{"dependentRequired":{"a":["b"]}}'}, "unsupported_schema", "dependentRequired"),
    ({"json": '{"propertyNames":{"maxLength":3}}'}, "unsupported_schema", "propertyNames"),
    ({"json": '{"contains":{}}'}, "unsupported_schema", "contains"),
    ({"json": '{"unevaluatedProperties":false}'}, "unsupported_schema", "unevaluatedProperties"),
    ({"json": '{"type":"string","format":"idn-email"}'}, "unsupported_schema", "idn-email"),
    ({"json": '{"oneOf":[{"type":"string"},{"minLength":2}]}'}, "unsupported_schema", "oneOf"),
    ({"json": '{"type":"string","pattern":"(?=a)b"}'}, "unsupported_schema", "look-around"),
    ({"json": '{"enum":[]}'}, "invalid_grammar", "nsatisfiable"),
    ({"json": '{"$ref":"#"}'}, "invalid_grammar", "no text"),
    ({"json": '{"type":"no"}'}, "invalid_grammar", "no"),
    ({"regex": "["}, "invalid_grammar", "unclosed"),
    ({"regex": r"(a)\1"}, "unsupported_schema", "backreferences"),
    ({"grammar": "start: x"}, "invalid_grammar", "x"),
    ({"grammar": "root ::= root"}, "invalid_grammar", "xpected"),
    ({"grammar": "start: <[1024]>"}, "invalid_grammar", "1024"),
]


@pytest.mark.parametrize(("asked", "code", "told"), REFUSED)
def test_r8_a_wrong_grammar_is_refused_with_its_reason(
    prover: GrammarProver, asked: dict[str, str], code: str, told: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        prover.prove_now(StructuredOutputs(**asked))  # type: ignore[arg-type]
    assert (raised.value.code, raised.value.param) == (code, "structured_outputs")
    assert told in raised.value.message
    assert "\n" not in raised.value.message
    assert "backtrace" not in raised.value.message


@pytest.mark.parametrize(
    ("schema", "code", "told"),
    [
        ('{"not":{}}', "unsupported_schema", 'Unimplemented keys: ["not"].'),
        ('{"type":"string","format":"x"}', "unsupported_schema", "Unknown format: x."),
        ('{"type":"no"}', "invalid_grammar", "Invalid type: no."),
        ('{"oneOf":[{},{}]}', "unsupported_schema", "oneOf constraints are not supported."),
    ],
)
def test_a_schema_within_a_grammar_is_refused_as_one_alone(
    prover: GrammarProver, schema: str, code: str, told: str
) -> None:
    """The grammars of tools are such."""
    for structured in (
        StructuredOutputs(json=schema),
        StructuredOutputs(grammar=f"start: %json {schema}"),
    ):
        with pytest.raises(InvalidRequestError) as raised:
            prover.prove_now(structured)
        assert (raised.value.code, raised.value.message) == (code, f"structured output: {told}")


TOO_MUCH = {
    "a divisor with as many remainders as states": {"type": "integer", "multipleOf": 99_999_999},
    "patterns that all must fit": {
        "allOf": [{"properties": {"a": {"type": "string", "pattern": f".*{i}.*"}}} for i in range(300)]
    },
}


@pytest.mark.parametrize("schema", TOO_MUCH.values(), ids=TOO_MUCH)
def test_r8_what_takes_without_end_ends_and_the_next_is_served(
    prover: GrammarProver, schema: dict[str, object]
) -> None:
    """GHSA-389x-67px-mjg3, GHSA-mgrm-fgjv-mhv8: a request's grammar must not hold up the server."""
    asked = StructuredOutputs(json=json.dumps(schema))
    assert code_of(lambda: prover.prove_now(asked)) == "grammar_too_complex"
    prover.prove_now(StructuredOutputs(regex="[ab]"))


BOUNDED = [
    {"regex": "(a{1,1000}){1,1000}"},
    {"regex": "(a|a)*b(a*)*c"},
    {"regex": "(" * 150 + "a" + ")" * 150},
    {"grammar": 'start: "a"{1000000}'},
    {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    {"json": json.dumps({"type": "array", "items": {"type": "null"}, "minItems": 10_000})},
    {"json": json.dumps({"enum": [f"number {i}" for i in range(4096)]})},
]


@pytest.mark.parametrize("asked", BOUNDED, ids=range(len(BOUNDED)))
def test_r8_what_grows_fast_is_built_or_refused(prover: GrammarProver, asked: dict[str, str]) -> None:
    try:
        prover.prove_now(StructuredOutputs(**asked))  # type: ignore[arg-type]
    except InvalidRequestError as error:
        assert error.code in ("invalid_grammar", "grammar_too_complex", "unsupported_schema")  # noqa: PT017


def test_the_process_ends_with_its_input_and_when_it_is_closed() -> None:
    for ends_by_itself in (True, False):
        child = ChildProcess(DEMO, 1.0)
        assert child.open() is None
        pid = child._process.pid
        if ends_by_itself:
            assert child._process.stdin is not None
            child._process.stdin.close()
            assert child._process.wait(20) == 0
        child.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_process_that_was_killed_is_noticed() -> None:
    child = ChildProcess(DEMO, 1.0)
    assert child.open() is None
    child._process.kill()
    with pytest.raises(ProcessEndedError) as raised:
        child.ask(StructuredOutputs(regex="a"))
    assert not raised.value.is_late
    child.close()
