"""Reasoning and calls of tools in the forms of all families, by real tokens: two stages, the openai client.

One pipe serves them all: a family is a chat template, which an API process reads when it starts, so another
one takes over for each. Grammars and biases make the model write the family's markers, some of which are
tokens. What it wrote is known from its ids: they are those of one stage, and the text of them is taken apart
here by a pattern of the family, and not by the server's parsers. The whole answer and the streamed one must
be just that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from depth import sampled
from disturbed import named
from marked_model import END, make_marked_model, write_template
from penstock import LLM, SamplingParams
from penstock.request import StructuredOutputs
from penstock.server.openai.openai_types import SampledRequest
from penstock.server.openai.responses_types import ResponsesRequest
from penstock.tokenizer.model_syntax import ModelSyntax, model_syntax
from penstock.tokenizer.template_files import load_chat_template
from penstock.tokenizer.tokenizer import load_tokenizer
from penstock.tokenizer.tool_grammar import CallTask, Thinks, call_grammar, reasoned_grammar
from served import Served, wait_until

MESSAGES: Any = [{"role": "user", "content": "How is Rome?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
JSON = r'\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}'
SPACE = r"[ \n]*"


class Made(NamedTuple):
    """What an answer says."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    reason: str


class Case(NamedTuple):
    """A request, and the least number of calls in its answer.

    Attributes:
        bias: by marker, or by text of one token; with the seed it has the model write what the case is about.
    """

    fields: Mapping[str, Any]
    bias: Mapping[str, float]
    seed: int
    num_calls: int = 0


REQUIRED: Mapping[str, Any] = {"tools": [LOOK, NOW], "tool_choice": "required"}
AUTO: Mapping[str, Any] = {"tools": [LOOK]}
CHOICE: Mapping[str, Any] = {"structured_outputs": {"choice": ["Fine.", "Foul."]}}
THINK: Mapping[str, float] = {"<think>": 45, "</think>": 20}
CASES: Mapping[str, Mapping[str, Case]] = {
    "mistral": {
        "several calls": Case(REQUIRED, {"[TOOL_CALLS]": 20, "]": 18}, 6, 2),
        "text and calls": Case(AUTO, {"[TOOL_CALLS]": 8, "<|end|>": 2}, 1, 2),
        "reasoning between markers that are no tokens": Case(
            {"structured_outputs": {"regex": r"\[THINK\][a-z ]{9,30}\[/THINK\]\n?[A-Z][a-z ]{3,12}"}}, {}, 1
        ),
    },
    "mistral_args": {
        "several calls": Case(REQUIRED, {"<|end|>": -8}, 9, 2),
        "text and calls": Case(AUTO, {"[TOOL_CALLS]": 8, "<|end|>": 2}, 3, 2),
    },
    "llama3_json": {
        "one call": Case(REQUIRED, {}, 1, 1),
        "a call that it need not make": Case(AUTO, {"{": 30}, 1, 1),
        "a marker before text": Case({"tools": [NOW]}, {"<|python_tag|>": 7}, 1),
    },
    "hermes": {
        "reasoning, then calls": Case(
            REQUIRED, {"<think>": 45, "</think>": 17, "<tool_call>": 25, "<|end|>": 4}, 2, 2
        ),
        "several calls": Case(REQUIRED, {"<think>": -100, "<|end|>": 4}, 5, 2),
        "text and calls": Case(AUTO, {"<think>": -100, "<tool_call>": 8, "<|end|>": 4}, 9, 2),
        "reasoning, then a bound answer": Case(CHOICE, THINK, 1),
        "reasoning that the prompt has opened": Case(
            {**CHOICE, "chat_template_kwargs": {"thinking": True}}, THINK, 2
        ),
        "none that the prompt has closed": Case(
            {**CHOICE, "chat_template_kwargs": {"thinking": False}}, {"<think>": -100}, 1
        ),
    },
}
FIRST = "mistral"  # the others follow as in the table, to change as seldom as may be

_CALL = rf'\{{"name": "(\w+)", "(?:arguments|parameters)": ({JSON})\}}'
_ONE = re.sub(r"(?<!\\)\((?!\?)", "(?:", _CALL)
BLOCKS: Mapping[str, str] = {
    "hermes": rf"<tool_call>\n{_ONE}\n</tool_call>",
    "mistral": rf"\[TOOL_CALLS\] ?\[{_ONE}(?:, {_ONE})*\]",
    "mistral_args": rf"\[TOOL_CALLS\]\w+\[ARGS\]{JSON}",
    "llama3_json": _ONE,
}
CALLS = dict.fromkeys(BLOCKS, _CALL) | {"mistral_args": rf"\[TOOL_CALLS\](\w+)\[ARGS\]({JSON})"}
PLACES = {"hermes": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}


class Pipe:
    """Two stages, and clients of the families in turn."""

    def __init__(self, served: Served, model: Path) -> None:
        self._served = served
        self._model = model
        self._family = FIRST
        self.tokenizer = load_tokenizer(model)
        self.client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)

    def become(self, family: str) -> ModelSyntax:
        """Have an API process that has read the family's template; how it reads answers."""
        if family != self._family:
            before = self._num_api_processes
            write_template(self._model, family)
            named(self._served, "penstock api").kill()
            wait_until(lambda: self._num_api_processes > before, 60)
            self._family = family
        template = load_chat_template(self._model, self.tokenizer)
        return model_syntax(template, self.tokenizer.added_token_ids)

    def text(self, token_ids: list[int]) -> str:
        """All of it, markers included; without the end of the sequence."""
        kept = [token_id for token_id in token_ids if token_id != END]
        return self.tokenizer.decode(kept, skip_special_tokens=False)

    def bias(self, wanted: Mapping[str, float]) -> dict[int, float]:
        (*found,) = (self.tokenizer.encode_trusted(text, add_special_tokens=False) for text in wanted)
        return {token_id: value for (token_id,), value in zip(found, wanted.values(), strict=True)}

    @property
    def _num_api_processes(self) -> int:
        return len(re.findall(r"recovered in \S+ s +API process", self._served.output))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_marked_model(tmp_path_factory.mktemp("marked") / "demo", FIRST)


@pytest.fixture(scope="module")
def pipe(model: Path) -> Iterator[Pipe]:
    with Served(str(model), "--pp", "2", "--threads-per-rank", "1", "--dtype", "float32") as served:
        made = Pipe(served, model)
        with made.client:
            yield made


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    settings: Any = {"dtype": "float32", "threads_per_rank": 1, "distributed_executor_backend": "inprocess"}
    with LLM(str(model), **settings) as made:
        yield made


def taken_apart(family: str, raw: str, *, is_open: bool) -> Made:
    """What the text of an answer says by the family's own form."""
    reasoning, content = "", raw
    opening, closing = PLACES.get(family, ("", ""))
    if opening and (is_open or raw.startswith(opening)):
        reasoning, _, content = raw.removeprefix(opening).partition(closing)
    rest = re.sub(SPACE + BLOCKS[family] + SPACE, "", content)
    calls = re.findall(CALLS[family], content)
    return Made(reasoning.strip("\n"), rest.lstrip("\n"), calls, "tool_calls" if calls else "stop")


def grammar_of(fields: Mapping[str, Any], syntax: ModelSyntax, *, is_open: bool) -> StructuredOutputs | None:
    """What the answer must follow by `tool_grammar`, which has tests of its own."""
    thinks: Thinks = "no" if syntax.reasoning is None else "opened" if is_open else "maybe"
    if "tools" not in fields:
        structured = StructuredOutputs(**fields["structured_outputs"])
        if syntax.reasoning is None:
            return structured
        text = reasoned_grammar(structured, syntax.reasoning, syntax.marker_ids, is_open=is_open)
        return structured if text is None else StructuredOutputs(grammar=text)
    functions = [tool["function"] for tool in fields["tools"]]
    is_forced = "tool_choice" in fields
    if not is_forced and not any("strict" in function for function in functions):
        return None
    schemas = {function["name"]: function.get("parameters") for function in functions}
    task = CallTask(schemas=schemas, is_forced=is_forced, thinks=thinks)
    return StructuredOutputs(grammar=call_grammar(task, syntax))


def made_of(choice: Any) -> Made:
    """What the client has understood."""
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    reasoning = getattr(message, "reasoning_content", None) or ""
    return Made(reasoning, message.content or "", calls, choice.finish_reason)


@pytest.mark.parametrize(
    "of", sampled([(family, case) for family in CASES for case in CASES[family]], 4), ids="-".join
)
def test_d12_an_answer_is_what_the_tokens_say_whole_and_streamed(
    pipe: Pipe, llm: LLM, of: tuple[str, str]
) -> None:
    family, case = of
    fields, wanted, seed, num_calls = CASES[family][case]
    syntax, bias = pipe.become(family), pipe.bias(wanted)
    is_open = bool(fields.get("chat_template_kwargs", {}).get("thinking"))
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": seed, "max_tokens": 250}
    body = {"logit_bias": bias, "return_token_ids": True, **sampling, **fields}
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "extra_body": body}
    whole = pipe.client.chat.completions.create(**asked)
    choice: Any = whole.choices[0]
    made = made_of(choice)

    bound = grammar_of(fields, syntax, is_open=is_open)
    params = SamplingParams(**sampling, logit_bias=bias, structured_outputs=bound)
    (output,) = llm.generate({"prompt_token_ids": choice.prompt_token_ids}, params)
    assert output.outputs[0].token_ids == choice.token_ids
    assert made == taken_apart(family, pipe.text(choice.token_ids), is_open=is_open)
    assert len(made.calls) >= num_calls
    assert bool(made.reasoning) == ("reasoning" in case)
    assert bool(made.content) == (not num_calls or "text" in case)

    with pipe.client.chat.completions.stream(**asked) as stream:
        num_chunks = sum(event.type == "chunk" for event in stream)
        last = stream.get_final_completion()
    assert made_of(last.choices[0]) == made
    assert num_chunks > 4
    if "reasoning" in case:
        hidden = pipe.client.chat.completions.create(
            **asked | {"extra_body": body | {"include_reasoning": False}}
        )
        assert made_of(hidden.choices[0]) == made._replace(reasoning="")
    ids = {call.id for one in (choice, last.choices[0]) for call in one.message.tool_calls or []}
    assert len(ids) == 2 * len(made.calls)


# --- the Responses API ------------------------------------------------------------------------------------

TEXT = "How is Rome?"
PLACE: dict[str, Any] = {"text": {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}}
BOUND = {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}}
FLAT: Any = [{"type": "function", **LOOK["function"]}, {"type": "function", **NOW["function"]}]


@pytest.fixture
def hermes(pipe: Pipe) -> Pipe:
    pipe.become("hermes")
    return pipe


def responding(pipe: Pipe, *cases: str, **fields: Any) -> dict[str, Any]:
    """A request, sampled as a case of `CASES` is."""
    _, wanted, seed, _ = CASES["hermes"][cases[0] if cases else "several calls"]
    hot = {"logit_bias": pipe.bias(wanted), "seed": seed, "top_p": 0.95}
    extra = fields.pop("extra_body", {})
    told = {"model": "demo", "input": TEXT, "temperature": 1.0, "max_output_tokens": 250}
    return told | fields | {"extra_body": hot | extra}


def items_of(answer: Any) -> list[Any]:
    """All that the items of a response say, their ids left out."""
    found: list[Any] = []
    for item in answer.output:
        said = (item.name, item.arguments) if item.type == "function_call" else item.content[0].text
        found.append((item.type, item.status, said))
    return found


def streamed(pipe: Pipe, asked: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """The items that the deltas make, and those of the last event."""
    events: list[Any] = list(pipe.client.responses.create(stream=True, **asked))
    made: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            made[event.output_index] = made.get(event.output_index, "") + event.delta
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len(events) > 10
    return list(made.values()), items_of(events[-1].response)


def test_a_response_says_what_the_chat_says(hermes: Pipe) -> None:
    asked = responding(hermes, instructions="Play.", max_output_tokens=24)
    chat = hermes.client.chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": "Play."}, *MESSAGES],
        max_tokens=24,
        temperature=1.0,
        extra_body=asked["extra_body"],
    )
    whole = hermes.client.responses.create(**asked)
    assert whole.output_text
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage is not None
    assert chat.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    with hermes.client.responses.stream(**asked) as events:
        assert events.get_final_response().output_text == whole.output_text


@pytest.mark.parametrize("case", ["reasoning, then calls", "several calls"])
def test_calls_and_reasoning_are_items_whole_and_streamed_as_in_the_chat(hermes: Pipe, case: str) -> None:
    asked = responding(hermes, case, tools=FLAT, tool_choice="required")
    whole = hermes.client.responses.create(**asked)
    chat = hermes.client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=250,
        temperature=1.0,
        extra_body={**REQUIRED, **asked["extra_body"]},
    )
    made = made_of(chat.choices[0])
    wanted: list[Any] = [("function_call", "completed", call) for call in made.calls]
    if made.reasoning:
        wanted.insert(0, ("reasoning", "completed", made.reasoning))
        assert whole.usage is not None
        assert whole.usage.output_tokens_details.reasoning_tokens > 2
    assert items_of(whole) == wanted
    assert len(made.calls) > 1
    texts, last = streamed(hermes, asked)
    assert last == wanted
    assert texts == [said if isinstance(said, str) else said[1] for _, _, said in wanted]


def test_a_conversation_goes_on_over_calls(hermes: Pipe) -> None:
    turn: list[Any] = [{"role": "user", "content": TEXT}]
    asked = responding(hermes, input=turn, tools=FLAT, tool_choice="required", parallel_tool_calls=False)
    first = hermes.client.responses.create(**asked)
    (call,) = first.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city"}
    turn += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}]
    second = hermes.client.responses.create(**responding(hermes, input=turn, tools=FLAT, max_output_tokens=8))
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_schema_binds_the_text_behind_the_reasoning(hermes: Pipe) -> None:
    asked = responding(hermes, "reasoning, then a bound answer", **PLACE)
    whole: Any = hermes.client.responses.create(**asked)
    assert [(item.type, item.status) for item in whole.output] == [
        ("reasoning", "completed"),
        ("message", "completed"),
    ]
    assert set(json.loads(whole.output_text)) == {"city"}
    assert streamed(hermes, asked)[1] == items_of(whole)
    hidden = responding(
        hermes, "reasoning, then a bound answer", extra_body={"include_reasoning": False}, **PLACE
    )
    assert items_of(hermes.client.responses.create(**hidden)) == items_of(whole)[1:]
    opened = {"chat_template_kwargs": {"thinking": True}}
    asked = responding(hermes, "reasoning that the prompt has opened", extra_body=opened, **PLACE)
    assert [item.type for item in hermes.client.responses.create(**asked).output] == ["reasoning", "message"]


# Fields that change no answer: what is sent, whether a header says so, and whether it comes back.
NOTED: Mapping[str, tuple[Any, str, bool]] = {
    "reasoning": ({"effort": "low", "summary": "auto"}, "reasoning.summary, reasoning.effort", True),
    "metadata": ({"a": "b"}, "", True),
    "store": (True, "store", False),
    "max_tool_calls": (1, "max_tool_calls", True),
    "service_tier": ("flex", "service_tier", False),
    "prompt_cache_key": ("k", "prompt_cache_key", True),
    "prompt_cache_retention": ("24h", "prompt_cache_retention", False),
    "safety_identifier": ("who", "", True),
    "stream_options": ({"include_obfuscation": False}, "", False),
}
REFUSED: Mapping[str, Any] = {
    "previous_response_id": "resp_1",
    "conversation": "conv_1",
    "background": True,
    "prompt": {"id": "p"},
    "truncation": "auto",
}
ABOVE = {"input", "instructions", "max_output_tokens", "tools", "tool_choice", "parallel_tool_calls", "text"}
ABOVE |= {"top_logprobs", "include", "include_reasoning", "chat_template_kwargs"}


def test_fields_that_change_nothing_are_said_to(hermes: Pipe) -> None:
    def ask(**fields: Any) -> Any:
        asked = responding(hermes, max_output_tokens=4, extra_body=fields)
        return hermes.client.responses.with_raw_response.create(**asked)

    plain = ask()
    assert "x-penstock-warning" not in plain.headers
    for name, (value, told, comes_back) in NOTED.items():
        answer = ask(**{name: value})
        assert answer.headers.get("x-penstock-warning", "").endswith(told)
        assert items_of(answer.parse()) == items_of(plain.parse())
        assert (answer.parse().to_dict().get(name) == value) == comes_back, name


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_server_does_that_keeps_responses_is_refused(hermes: Pipe, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        hermes.client.responses.create(**responding(hermes, extra_body={name: REFUSED[name]}))
    assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


def test_no_parameter_of_responses_is_left_out() -> None:
    """Those that chats have too are in `test_conformance`."""
    own = set(ResponsesRequest.__struct_fields__) - set(SampledRequest.__struct_fields__)
    assert own == ABOVE | set(NOTED) | set(REFUSED)


def test_log_probabilities_are_included_where_all_is_text(pipe: Pipe) -> None:
    pipe.become("mistral_args")
    asked = responding(pipe, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=12)
    whole: Any = pipe.client.responses.create(**asked)
    part = whole.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}
    chat: Any = pipe.client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=12,
        temperature=1.0,
        logprobs=True,
        top_logprobs=2,
        extra_body=asked["extra_body"],
    )
    told = [entry.logprob for entry in chat.choices[0].logprobs.content]
    assert [entry.logprob for entry in part.logprobs] == pytest.approx(told, abs=1e-5)
    plain: Any = pipe.client.responses.create(**responding(pipe, max_output_tokens=4))
    assert not plain.output[0].content[0].logprobs


@pytest.mark.parametrize("case", ["reasoning, then a bound answer", "text and calls"])
def test_log_probabilities_are_those_of_the_text_beside_reasoning_and_calls(hermes: Pipe, case: str) -> None:
    """Issue 25, point 18. They are among those of the chat, which tells all, one behind the other."""
    fields = PLACE if "bound" in case else {"tools": FLAT[:1]}
    told = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    asked = responding(hermes, case, **fields, **told)
    whole: Any = hermes.client.responses.create(**asked)
    assert len(whole.output) > 1
    chat: Any = hermes.client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=250,
        temperature=1.0,
        logprobs=True,
        extra_body={**asked["extra_body"], **(BOUND if "bound" in case else AUTO)},
    )
    every = [(entry.token, round(entry.logprob, 4)) for entry in chat.choices[0].logprobs.content]
    parts = [item.content[0] for item in whole.output if item.type == "message"]
    assert parts
    at = 0
    for part in parts:
        own = [(entry.token, round(entry.logprob, 4)) for entry in part.logprobs]
        at = next(place for place in range(at, len(every)) if every[place : place + len(own)] == own)
        at += len(own)
        text = "".join(token for token, _ in own)
        assert part.text in text
        assert part.text not in text.removeprefix(own[0][0])
    deltas = [
        event
        for event in hermes.client.responses.create(stream=True, **asked)
        if event.type == "response.output_text.delta"
    ]
    streamed_tokens = [entry.token for event in deltas for entry in event.logprobs]
    assert streamed_tokens == [entry.token for part in parts for entry in part.logprobs]
