"""DR5: whole engines whose builds of grammars stay unfinished until they are let go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.errors import InvalidRequestError
from penstock.grammar.matcher import Matcher, Vocabulary
from penstock.request import GenerationRequest, RequestUpdate, StructuredOutputs
from penstock.sample import grammar_rows

HELD = StructuredOutputs(regex="[a-z]{3}-[0-9]{2,4}")
OTHER = StructuredOutputs(choice=["yes", "no", "perhaps"])
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 1": {"async_depth": 0},
    "pp 1, a plan ahead, torch": {"async_depth": 1, "kernels": "off"},
    "pp 2, chunks": {"pipeline_parallel_size": 2, "async_depth": 1, "prefill_chunk": 3},
    "pp 2, tp 1,2": {"pipeline_parallel_size": 2, "tensor_parallel_size": "1,2", "async_depth": 0},
    "pp 3, two plans ahead": {"pipeline_parallel_size": 3, "async_depth": 2},
}


class Builder:
    """In the place of the library's: builds of `HELD` wait for `let_go`, or fail."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.fails = False
        self.num_built = 0

    def __call__(self, vocabulary: Vocabulary, structured: StructuredOutputs) -> Matcher:
        if structured == HELD:
            assert self.let_go.wait(60)
            if self.fails:
                raise InvalidRequestError("it was too much here.")
        self.num_built += 1
        return Matcher(vocabulary, structured)


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Builder]:
    builder = Builder()
    monkeypatch.setattr(grammar_rows, "new_matcher", builder)
    yield builder
    builder.let_go.set()


def engine(**settings: Any) -> LLM:
    common: dict[str, Any] = {"distributed_executor_backend": "inprocess", "threads_per_rank": 1}
    return LLM("demo", **common | {"dtype": "float32", "max_num_seqs": 8} | settings)


class Told:
    """Requests of an engine, and what came of them."""

    def __init__(self, llm: LLM) -> None:
        self.client, self.tokenizer = llm._client, llm.get_tokenizer()
        self.updates: dict[str, list[RequestUpdate]] = {}

    def add(self, name: str, structured: StructuredOutputs | None = None, max_tokens: int = 24) -> None:
        params = SamplingParams(seed=5, max_tokens=max_tokens, structured_outputs=structured)
        prompt = self.tokenizer.encode("Answer in a form that a machine can read: ")
        self.updates[name] = []
        self.client.add(GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=params))

    def await_end(self, *names: str) -> None:
        while any(not self.updates[name] or self.updates[name][-1].finish_reason is None for name in names):
            for update in self.client.poll(1.0):
                self.updates[update.request_id].append(update)

    def tokens(self, name: str) -> list[int]:
        return [token for update in self.updates[name] for token in update.token_ids]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Without anything held."""
    with engine(async_depth=0) as llm:
        told = Told(llm)
        told.add("free")
        told.add("bound", HELD)
        told.add("other", OTHER)
        told.await_end("free", "bound", "other")
        return {name: told.tokens(name) for name in told.updates}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_dr5_others_go_on_while_a_grammar_is_built(
    builder: Builder, expected: dict[str, list[int]], layout: dict[str, Any]
) -> None:
    with engine(**layout) as llm:
        told = Told(llm)
        told.add("other", OTHER)
        told.await_end("other")
        told.add("bound", HELD)
        told.add("gone", HELD)
        told.add("free")
        told.add("again", OTHER)  # which is there: the only thread that builds is not needed
        told.await_end("free", "again")
        assert told.updates["bound"] == []
        told.client.abort("gone")
        builder.let_go.set()
        told.await_end("bound")
        assert told.updates["gone"] == []
        for name, of in (("free", "free"), ("bound", "bound"), ("other", "other"), ("again", "other")):
            assert told.tokens(name) == expected[of], name
        assert builder.num_built == 2 * (2 if "tensor_parallel_size" in layout else 1)


@pytest.mark.parametrize("layout", [LAYOUTS["pp 1"], LAYOUTS["pp 2, tp 1,2"]], ids=["pp 1", "tp 1,2"])
def test_r10_a_build_that_fails_ends_its_request_and_is_tried_again_for_the_next(
    builder: Builder, expected: dict[str, list[int]], layout: dict[str, Any]
) -> None:
    with engine(**layout) as llm:
        told = Told(llm)
        told.add("bound", HELD)
        told.add("free")
        builder.fails = True
        builder.let_go.set()
        told.await_end("bound", "free")
        (update,) = told.updates["bound"]
        assert update.error is not None
        assert (update.error.kind, update.error.param) == ("ConstraintError", "structured_outputs")
        assert "it was too much here" in update.error.message
        builder.fails = False
        told.add("again", HELD)
        told.await_end("again")
        assert told.tokens("again") == expected["bound"]
        assert told.tokens("free") == expected["free"]
