"""Structured output through whole engines: every text that stops is valid, and the same in every layout."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from depth import sampled as sampled_values
from json_formats import CHECKER
from penstock import LLM, SamplingParams
from penstock.engine.client.outputs import CompletionOutput
from penstock.errors import ConstraintError, InvalidRequestError
from penstock.request import GenerationRequest, RequestUpdate, StructuredOutputs
from schemas import Schema, schemas

MAX_TOKENS = 300
PROMPT = "Answer in a form that a machine can read: "
OTHERS = [
    StructuredOutputs(regex=r"[a-z]{3}-[0-9]{2,4}"),
    StructuredOutputs(choice=["yes", "no", 'may "be"\n', "é"]),
    StructuredOutputs(grammar='start: "(" item ("," item){0,3} ")"\nitem: /[xyz]{1,3}/ | start'),
    StructuredOutputs(
        json=json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}), whitespace=True
    ),
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 2, a plan ahead, chunks": {"pipeline_parallel_size": 2, "async_depth": 1, "prefill_chunk": 3},
    "pp 4, two plans ahead": {"pipeline_parallel_size": 4, "async_depth": 2},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2, tp 1,2": {"pipeline_parallel_size": 2, "tensor_parallel_size": "1,2", "async_depth": 1},
    "few blocks": {"pipeline_parallel_size": 2, "async_depth": 1, "num_blocks": 40, "block_size": 8},
}


def engine(**settings: Any) -> LLM:
    common: dict[str, Any] = {"distributed_executor_backend": "inprocess", "threads_per_rank": 1}
    common["dtype"] = "float32"  # so that the sums of two ranks are those of one, but for the last bits
    return LLM("demo", **common | {"async_depth": 0, "max_num_seqs": 32} | settings)


def sampled(llm: LLM, asked: Sequence[StructuredOutputs], **changes: Any) -> list[CompletionOutput]:
    params = [
        SamplingParams(seed=seed, max_tokens=MAX_TOKENS, structured_outputs=structured, **changes)
        for seed, structured in enumerate(asked)
    ]
    return [output.outputs[0] for output in llm.generate([PROMPT] * len(params), params)]


def of_schemas(made: Sequence[Schema]) -> list[StructuredOutputs]:
    return [StructuredOutputs(json=json.dumps(schema)) for schema in made]


def is_valid(value: Any, schema: Schema) -> None:
    """Raise what it is not by the schema, formats included."""
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator, format_checker=CHECKER)


def check(made: Sequence[Schema], found: Sequence[CompletionOutput]) -> None:
    """Whatever has stopped is valid; almost all have."""
    stopped = [(s, o) for s, o in zip(made, found, strict=True) if o.finish_reason == "stop"]
    assert len(stopped) >= 0.95 * len(made)
    for schema, output in stopped:
        is_valid(json.loads(output.text), schema)
        assert json.loads(output.text) is None or not re.match(r"\s", output.text)


@pytest.fixture(scope="module")
def made() -> list[Schema]:
    return schemas(24)


@pytest.fixture(scope="module")
def expected(made: list[Schema]) -> list[CompletionOutput]:
    with engine() as llm:
        return sampled(llm, [*of_schemas(made), *OTHERS])


def test_d12_every_text_that_stops_is_valid(made: list[Schema], expected: list[CompletionOutput]) -> None:
    check(made, expected[: len(made)])
    texts = [output.text for output in expected[len(made) :]]
    assert re.fullmatch(r"[a-z]{3}-[0-9]{2,4}", texts[0])
    assert texts[1] in (OTHERS[1].choice or [])
    assert re.fullmatch(r"[(xyz,)]+", texts[2])
    assert len(json.loads(texts[3])) <= 3
    assert {output.stop_reason for output in expected if output.finish_reason == "stop"} == {None}


@pytest.mark.parametrize("layout", sampled_values(LAYOUTS.values(), 2), ids=LAYOUTS)
def test_d12_tokens_are_the_same_in_every_layout(
    made: list[Schema], expected: list[CompletionOutput], layout: dict[str, Any]
) -> None:
    with engine(**layout) as llm:
        found = sampled(llm, [*of_schemas(made), *OTHERS])
        assert [o.token_ids for o in found] == [o.token_ids for o in expected]
        stats = llm.stats()
        assert stats is not None
        assert ("num_blocks" in layout) == (stats.scheduler.num_preemptions > 0)


@pytest.mark.parametrize(
    "changes",
    sampled_values(
        [{"top_k": 5}, {"temperature": 0.0}, {"top_p": 0.7, "logprobs": 2}, {"min_p": 0.1, "top_k": 200}], 2
    ),
)
def test_d12_every_way_of_sampling_keeps_to_the_grammar(made: list[Schema], changes: dict[str, Any]) -> None:
    """The likeliest, candidates and whole logits; log-probabilities are those of the model, without masks."""
    some = made[:8]
    with engine(pipeline_parallel_size=2, async_depth=1) as llm:
        for schema, output in zip(some, sampled(llm, of_schemas(some), **changes), strict=True):
            if output.finish_reason == "stop":
                is_valid(json.loads(output.text), schema)
        (alone,) = sampled(llm, of_schemas(some[:1]), **changes)
    with engine() as llm:
        assert sampled(llm, of_schemas(some[:1]), **changes)[0].token_ids == alone.token_ids


@pytest.mark.parametrize(
    "layout", [{}, {"pipeline_parallel_size": 3, "async_depth": 2}], ids=["pp 1", "pp 3"]
)
def test_d12_whom_a_grammar_runs_with_changes_nothing(
    made: list[Schema], expected: list[CompletionOutput], layout: dict[str, Any]
) -> None:
    """Alone, and beside rows without a grammar; those are not changed either."""
    with engine(**layout) as llm:
        plain = SamplingParams(seed=7, max_tokens=40, ignore_eos=True)
        (free,) = llm.generate(PROMPT, plain)
        first = SamplingParams(seed=0, max_tokens=MAX_TOKENS, structured_outputs=of_schemas(made)[0])
        both = llm.generate([PROMPT] * 3, [plain, first, plain])
        assert [o.outputs[0].token_ids for o in both] == [
            free.outputs[0].token_ids,
            expected[0].token_ids,
            free.outputs[0].token_ids,
        ]


def run_together(llm: LLM, requests: Sequence[GenerationRequest]) -> dict[str, list[RequestUpdate]]:
    """All updates of each; unlike `generate`, an error of one ends no other."""
    updates: dict[str, list[RequestUpdate]] = {request.request_id: [] for request in requests}
    for request in requests:
        llm._client.add(request)
    alive = set(updates)
    while alive:
        for update in llm._client.poll(1.0):
            updates[update.request_id].append(update)
            if update.finish_reason is not None:
                alive.discard(update.request_id)
    return updates


def tokens_of(updates: Sequence[RequestUpdate]) -> list[int]:
    """What was said, in how many updates it ever came: a right guess brings two tokens in one."""
    return [token for update in updates for token in update.token_ids]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_r10_a_row_that_no_token_is_left_for_fails_alone(num_stages: int) -> None:
    """A pattern that grows beyond the library's limits while it is matched, and one that never was one."""
    grows = StructuredOutputs(regex=".*" + ".{0,50}" * 30 + "x")
    asked: list[StructuredOutputs | None] = [grows, None, StructuredOutputs(regex="["), OTHERS[0]]
    with engine(pipeline_parallel_size=num_stages, async_depth=1) as llm:
        prompt = llm.get_tokenizer().encode(PROMPT)
        requests = [
            GenerationRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                sampling=SamplingParams(seed=number, max_tokens=60, structured_outputs=structured),
            )
            for number, structured in enumerate(asked)
        ]
        alone = run_together(llm, requests[1:2])["1"]
        found = run_together(llm, requests)
        for name, told in (("0", "too many expressions"), ("2", "regex")):
            error = found[name][-1].error
            assert error is not None
            assert (error.kind, error.code, error.param) == (
                "ConstraintError",
                "constraint_unmet",
                "structured_outputs",
            )
            assert told in error.message
        assert len(found["0"]) > 1
        assert tokens_of(found["1"]) == tokens_of(alone)
        assert found["3"][-1].finish_reason == "stop"


def test_g8_bad_words_hold_within_a_grammar_and_may_leave_nothing() -> None:
    asked = StructuredOutputs(regex="(a|b){6}")
    with engine() as llm:
        tokenizer = llm.get_tokenizer()
        (a,), (b,) = (tokenizer.encode(letter, add_special_tokens=False) for letter in "ab")
        letters = {"temperature": 1.0, "allowed_token_ids": [a, b, 1], "structured_outputs": asked}
        pairs = SamplingParams(seed=1, bad_word_ids=[[a, a], [b, b]], **letters)
        assert llm.generate(PROMPT, pairs)[0].outputs[0].text in ("ababab", "bababa")
        nothing = SamplingParams(seed=1, bad_word_ids=[[a, a], [b, b], [b, a, b], [a, b, a]], **letters)
        with pytest.raises(
            ConstraintError, match=r"output token 2 .*its constraints allow no token"
        ) as raised:
            llm.generate(PROMPT, nothing)
        assert raised.value.code == "constraint_unmet"


def test_g8_d12_biases_penalties_choices_and_scores_go_with_a_grammar() -> None:
    asked = {"structured_outputs": StructuredOutputs(regex="(a|b){6}"), "seed": 3}
    with engine(pipeline_parallel_size=2, async_depth=1) as llm:
        (a,), (b,) = (llm.get_tokenizer().encode(letter, add_special_tokens=False) for letter in "ab")

        def texts(**changes: Any) -> list[str]:
            (output,) = llm.generate(PROMPT, SamplingParams(**asked | {"max_tokens": 20} | changes))
            return [completion.text for completion in output.outputs]

        assert texts(temperature=0.0, allowed_token_ids=[a, b, 1], logit_bias={a: -100.0}) == ["bbbbbb"]
        (greedy,) = texts(temperature=0.0)
        (varied,) = texts(temperature=0.0, frequency_penalty=2.0)
        assert varied != greedy
        three = texts(n=3)
        assert three[:1] == texts()
        assert all(re.fullmatch("(a|b){6}", text) for text in [greedy, varied, *three])
        (scored,) = llm.generate(PROMPT, SamplingParams(**asked, max_tokens=0, prompt_logprobs=0))
        assert scored.outputs[0].text == ""
        assert len(scored.prompt_logprobs or []) == len(scored.prompt_token_ids)


def test_stop_strings_and_stop_ids_end_a_text_before_its_grammar_does() -> None:
    asked = StructuredOutputs(regex="(abc){3}")
    with engine() as llm:
        whole = sampled(llm, [asked])[0]
        assert (whole.text, whole.finish_reason, whole.stop_reason) == ("abcabcabc", "stop", None)
        by_text = sampled(llm, [asked], stop="ca")[0]
        assert (by_text.text, by_text.stop_reason) == ("ab", "ca")
        by_id = sampled(llm, [asked], stop_token_ids=[whole.token_ids[1]])[0]
        assert by_id.token_ids == whole.token_ids[:2]
        short = llm.generate(PROMPT, SamplingParams(max_tokens=1, structured_outputs=asked))[0].outputs[0]
        assert short.finish_reason == "length"


def test_r8_what_cannot_be_had_is_refused_before_anything_runs() -> None:
    with engine() as llm:
        for structured, code in (
            (StructuredOutputs(json='{"not":{}}'), "unsupported_schema"),
            (StructuredOutputs(regex="["), "invalid_grammar"),
            (StructuredOutputs(), "invalid_value"),
        ):
            with pytest.raises(InvalidRequestError) as raised:
                llm.generate(PROMPT, SamplingParams(structured_outputs=structured))
            assert (raised.value.code, raised.value.param) == (code, "structured_outputs")


@pytest.mark.soak
@pytest.mark.parametrize("stage", [1, 0])
def test_r4_d12_texts_go_on_valid_and_the_same_when_a_stage_is_lost(
    made: list[Schema], expected: list[CompletionOutput], stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another last stage builds the matchers anew, and gives them the tokens that there are."""
    monkeypatch.setenv("PENSTOCK_FAULTS", f"stage.forward@{stage}:23=kill")
    with engine(distributed_executor_backend="mp", pipeline_parallel_size=2, async_depth=1) as llm:
        found = sampled(llm, of_schemas(made[:12]))
        stats = llm.stats()
        assert stats is not None
        assert stats.epoch == 1
    assert [o.token_ids for o in found] == [o.token_ids for o in expected[:12]]


@pytest.mark.soak
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_d12_soak_hundreds_of_schemas(num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = schemas(300)
    with engine() as llm:
        expected = [output.token_ids for output in sampled(llm, of_schemas(made))]
    for depth in (0, 1, 2):
        layout = {"pipeline_parallel_size": num_stages, "async_depth": depth, "prefill_chunk": 3 + 4 * depth}
        with engine(**layout) as llm:
            found = sampled(llm, of_schemas(made))
        assert [output.token_ids for output in found] == expected
        check(made, found)
    for number in range(max(3, num_stages)):  # every depth, and the loss of every stage
        lost, depth = number % num_stages, number % 3
        layout = {"pipeline_parallel_size": num_stages, "async_depth": depth, "prefill_chunk": 3 + 4 * depth}
        monkeypatch.setenv("PENSTOCK_FAULTS", f"stage.forward@{lost}:{101 + 50 * number}=kill")
        with engine(distributed_executor_backend="mp", **layout) as llm:
            assert [output.token_ids for output in sampled(llm, of_schemas(made))] == expected
            stats = llm.stats()
            assert stats is not None
            assert stats.epoch == 1
