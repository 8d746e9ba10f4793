"""Every parameter of the API, by the openai client, against two stages: its default, and what it does.

What a sampling parameter does is what `LLM` with one stage does for the same `SamplingParams`. Bounds are
`server/test_openapi_fuzz`'s; what only responses have is in `test_call_families`. A field of another
request without a row here is an error.
"""

from __future__ import annotations

import base64
import json
import struct
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import openai
import pytest

from depth import soaked
from disturbed import ADMIN_KEY, Server
from penstock import LLM, SamplingParams
from penstock.request import StructuredOutputs
from penstock.server.openai.openai_types import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    SampledRequest,
)

PROMPT = "ROMEO:\n"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
FIXED: dict[str, Any] = {"seed": 7, "max_tokens": 24}
EOS = 1
Client = openai.OpenAI


@pytest.fixture(scope="module")
def client(demo_server: Server) -> Iterator[Client]:
    with openai.OpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", threads_per_rank=1) as made:
        yield made


class Said(NamedTuple):
    """What a choice consists of."""

    text: str
    reason: str
    stop: int | str | None


def complete(client: Client, **fields: Any) -> list[Said]:
    answer = client.completions.create(model="demo", prompt=PROMPT, extra_body=FIXED | fields)
    return [Said(one.text, one.finish_reason, one.stop_reason) for one in answer.choices]  # type: ignore[attr-defined]


def chat(client: Client, **fields: Any) -> list[Said]:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, extra_body=FIXED | fields)
    return [
        Said(one.message.content or "", one.finish_reason, one.stop_reason)  # type: ignore[attr-defined]
        for one in answer.choices
    ]


def respond(client: Client, **fields: Any) -> list[Said]:
    """The same of a response, which does not say by what it was stopped."""
    body = FIXED | fields
    body["max_output_tokens"] = body.pop("max_tokens")
    answer = client.responses.create(model="demo", input=PROMPT, extra_body=body)
    return [Said(answer.output_text, "stop" if answer.status == "completed" else "length", None)]


ROUTES: Mapping[str, Callable[..., list[Said]]] = {
    "completions": complete,
    "chat": chat,
    "responses": respond,
}


def offline(llm: LLM, route: str, **fields: Any) -> list[Said]:
    """What one stage says without HTTP."""
    defaults = {"temperature": 0.8, "top_p": 0.95}  # the checkpoint's
    values = defaults | FIXED | fields
    if values.get("structured_outputs"):
        values["structured_outputs"] = StructuredOutputs(**values["structured_outputs"])
    if values.get("logit_bias"):
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    params = SamplingParams(**values)
    (output,) = llm.generate(PROMPT, params) if route == "completions" else llm.chat(MESSAGES, params)
    said = [Said(one.text, one.finish_reason or "", one.stop_reason) for one in output.outputs]
    return [one._replace(stop=None) for one in said] if route == "responses" else said


class Row(NamedTuple):
    """A parameter: its default, another value, and what else must be asked for it to matter."""

    default: Any
    value: Any
    beside: Mapping[str, Any] = {}
    matters: bool = True
    not_of: tuple[str, ...] = ()


E_IDS = [203, 48, 647, 357, 722, 16]
SAMPLING: Mapping[str, Row] = {
    "temperature": Row(0.8, 0.1),
    "top_k": Row(0, 2, {"temperature": 1.5}),
    "top_p": Row(0.95, 0.1, {"temperature": 1.5}),
    "min_p": Row(0.0, 0.5, {"temperature": 1.5}),
    "presence_penalty": Row(0.0, 2.0),
    "frequency_penalty": Row(0.0, 2.0),
    "repetition_penalty": Row(1.0, 4.0),
    "logit_bias": Row({}, {"203": -100, "48": 5}),
    "allowed_token_ids": Row(None, E_IDS),
    "bad_words": Row([], [","]),
    "seed": Row(7, 8),
    "max_tokens": Row(24, 5),
    "stop": Row([], ["e", "zzz"]),
    "stop_token_ids": Row([], [16, 485]),
    "min_tokens": Row(0, 6, {"stop_token_ids": [16, 316]}),
    "ignore_eos": Row(False, True, {"logit_bias": {str(EOS): 100}}),
    "include_stop_str_in_output": Row(False, True, {"stop": "e"}),
    "skip_special_tokens": Row(True, False, {"logit_bias": {str(EOS): 100}, "ignore_eos": True}),
    "structured_outputs": Row(None, {"regex": "[a-c]{3,9}"}),
    "n": Row(1, 3, not_of=("responses",)),
    "speculative": Row(True, False, matters=False),
    "cache_salt": Row("", "mine", matters=False),
    "priority": Row(0, 5, matters=False),
}


@pytest.mark.parametrize("route", ["chat", *soaked("completions", "responses")])
@pytest.mark.parametrize("field", SAMPLING)
def test_a_sampling_parameter_does_what_one_stage_does(
    client: Client, llm: LLM, route: str, field: str
) -> None:
    row = SAMPLING[field]
    if route in row.not_of:
        return
    ask = ROUTES[route]
    left_out = ask(client, **row.beside)
    assert ask(client, **{**row.beside, field: row.default}) == left_out
    assert left_out == offline(llm, route, **row.beside)
    other = {**row.beside, field: row.value}
    said = ask(client, **other)
    assert said == offline(llm, route, **other)
    assert (said != left_out) == row.matters


def raw_headers(call: Any, **fields: Any) -> Mapping[str, str]:
    headers: Mapping[str, str] = call.with_raw_response.create(model="demo", **fields).headers
    return headers


def usage(client: Client, **fields: Any) -> Any:
    body: dict[str, Any] = {"messages": MESSAGES} | fields
    answer = client.chat.completions.create(model="demo", max_tokens=1, **body)
    assert answer.usage is not None
    return answer.usage


def has_model(client: Client) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)


def streams(client: Client) -> None:
    (whole,) = chat(client)
    chunks = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, extra_body=FIXED)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.text
    (whole,) = complete(client)
    texts = client.completions.create(model="demo", prompt=PROMPT, stream=True, extra_body=FIXED)
    assert "".join(chunk.choices[0].text for chunk in texts) == whole.text
    (whole,) = respond(client)
    events: Any = client.responses.create(
        model="demo", input=PROMPT, max_output_tokens=24, stream=True, extra_body={"seed": 7}
    )
    *_, last = events
    assert last.response.output_text == whole.text


def tells_usage_of_streams(client: Client) -> None:
    for wanted in (False, True):
        *_, last = client.completions.create(
            model="demo", prompt=PROMPT, stream=True, stream_options={"include_usage": wanted}, max_tokens=3
        )
        assert (last.usage.completion_tokens if last.usage else None) == (3 if wanted else None)
    fields: dict[str, Any] = {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "extra_body": FIXED | {"max_tokens": 5},
    }
    for chunks in (
        client.completions.create(model="demo", prompt=PROMPT, stream=True, **fields),
        client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, **fields),
    ):
        told = [chunk.usage for chunk in chunks]
        counted = [usage.completion_tokens for usage in told]
        assert counted == sorted(counted)
        assert counted[0] < counted[-1] == 5, "a chunk says how much there is when it is sent"
        assert {usage.total_tokens - usage.completion_tokens for usage in told} == {told[-1].prompt_tokens}


def shows_reasoning(client: Client) -> None:
    """This model has none: `test_call_families` has one that thinks."""
    for wanted in (True, False):
        assert chat(client, include_reasoning=wanted) == chat(client)


def is_ignored(**fields: Any) -> Callable[[Client], None]:
    def check(client: Client) -> None:
        assert chat(client, **fields) == chat(client)
        assert complete(client, **fields) == complete(client)

    return check


def is_without_effect(field: str, **fields: Any) -> Callable[[Client], None]:
    """Taken, and named in a header: the demo model's template does not read it."""

    def check(client: Client) -> None:
        assert chat(client, **fields) == chat(client)
        headers = raw_headers(client.chat.completions, messages=MESSAGES, max_tokens=1, extra_body=fields)
        assert field in headers["x-penstock-warning"]

    return check


def names_sessions(client: Client) -> None:
    """What an open one does is in `test_sessions_served`."""
    asked = urllib.request.Request(
        str(client.base_url).removesuffix("v1/") + "open_session?session_id=talk",
        headers={"authorization": f"Bearer {ADMIN_KEY}"},
        method="POST",
    )
    urllib.request.urlopen(asked, timeout=60).close()
    for ask in ROUTES.values():
        assert ask(client, session_id="talk") == ask(client, session_id="") == ask(client)
        with pytest.raises(openai.NotFoundError) as refused:
            ask(client, session_id="nobody")
        assert refused.value.param == "session_id"


def returns_ids(client: Client) -> None:
    answer = client.completions.create(
        model="demo", prompt=PROMPT, extra_body=FIXED | {"return_token_ids": True}
    )
    choice: Any = answer.choices[0]
    again = client.completions.create(model="demo", prompt=choice.prompt_token_ids, extra_body=FIXED)
    assert (again.choices[0].text, len(choice.token_ids)) == (choice.text, 24)
    assert not hasattr(again.choices[0], "token_ids")


def scores_the_prompt(client: Client) -> None:
    answer: Any = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=0, extra_body={"prompt_logprobs": 2}
    )
    first, *others = answer.choices[0].prompt_logprobs
    assert first is None
    assert {len(one) for one in others} <= {2, 3}
    assert answer.usage.completion_tokens == 0


def binds_formats(client: Client) -> None:
    assert chat(client, response_format={"type": "text"}) == chat(client)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    (said,) = chat(
        client,
        max_tokens=100,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": schema | {"additionalProperties": False}},
        },
    )
    assert json.loads(said.text)["a"] in (1, 2)
    (said,) = complete(client, temperature=0, response_format={"type": "json_object"}, max_tokens=200)
    assert said.text.startswith("{")


def takes_roles_and_parts(client: Client) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    assert usage(client, messages=parts).prompt_tokens == usage(client).prompt_tokens
    longer = [
        {"role": "system", "content": "Be"},
        *MESSAGES,
        {"role": "assistant", "content": "no"},
        *MESSAGES,
    ]
    assert usage(client, messages=longer).prompt_tokens > 2 * usage(client).prompt_tokens


def takes_four_forms_of_prompts(client: Client) -> None:
    answer: Any = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=1, extra_body={"return_token_ids": True}
    )
    ids = answer.choices[0].prompt_token_ids
    forms: list[Any] = [PROMPT, [PROMPT, PROMPT], ids, [ids, ids]]
    texts = [
        [one.text for one in client.completions.create(model="demo", prompt=form, extra_body=FIXED).choices]
        for form in forms
    ]
    assert [len(found) for found in texts] == [1, 2, 1, 2]
    assert {text for found in texts for text in found} == {texts[0][0]}


def prefers_the_newer_name(client: Client) -> None:
    assert chat(client, max_completion_tokens=5) == chat(client, max_tokens=5)


def tells_logprobs(client: Client) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2, 2]
    plain = client.chat.completions.create(model="demo", messages=MESSAGES, logprobs=False, max_tokens=3)
    assert plain.choices[0].logprobs is None


def tells_logprobs_of_texts(client: Client) -> None:
    for count in (0, 3):
        # With a seed: of some samples all four tokens are less likely than those that are asked for.
        answer = client.completions.create(model="demo", prompt=PROMPT, logprobs=count, max_tokens=4, seed=1)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.top_logprobs is not None
        assert {max(1, count)} <= {len(top) for top in logprobs.top_logprobs} <= {max(1, count), count + 1}
    assert client.completions.create(model="demo", prompt=PROMPT, max_tokens=1).choices[0].logprobs is None


def echoes(client: Client) -> None:
    (plain,) = complete(client, echo=False)
    assert complete(client) == [plain]
    assert complete(client, echo=True) == [plain._replace(text=PROMPT + plain.text)]


PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("look", "find")
]
BRACE, OPENING, CLOSING = "95", "63", "65"  # ids of { [ ]


def calls(client: Client, **fields: Any) -> list[str]:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, tools=TOOLS, max_tokens=200, seed=7, extra_body=fields
    )
    made = answer.choices[0].message.tool_calls or []
    for call in made:
        assert 0 <= json.loads(call.function.arguments)["a"] <= 9  # type: ignore[union-attr]
    return [call.function.name for call in made]  # type: ignore[union-attr]


def calls_tools(client: Client) -> None:
    assert usage(client, tools=TOOLS).prompt_tokens > usage(client).prompt_tokens
    assert usage(client, tools=TOOLS, tool_choice="none").prompt_tokens == usage(client).prompt_tokens
    bound = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    to_call: dict[str, Any] = {
        "tools": bound,
        "logit_bias": {BRACE: 50},
    }  # this model calls nothing by itself
    assert len(calls(client, tool_choice="auto", **to_call)) == 1
    assert calls(client, tool_choice="auto", **to_call) == calls(client, **to_call)
    made = set(calls(client, tool_choice="required"))
    assert made
    assert made <= {"look", "find"}
    named = {"type": "function", "function": {"name": "find"}}
    assert calls(client, tool_choice=named) == ["find"]


def calls_one_tool(client: Client) -> None:
    listed: dict[str, Any] = {"tool_choice": "required", "logit_bias": {OPENING: 100, CLOSING: -100}}
    many = calls(client, parallel_tool_calls=True, **listed)
    assert len(many) > 1
    assert many == calls(client, **listed)
    assert len(calls(client, parallel_tool_calls=False, **listed)) == 1


def rendered(client: Client, **fields: Any) -> str:
    answer: Any = client.post("/chat/completions/render", body=fields, cast_to=object)
    return str(answer["prompt"])


def begins_answers(client: Client) -> None:
    whole = rendered(client, messages=MESSAGES, add_generation_prompt=True)
    assert rendered(client, messages=MESSAGES) == whole
    cut = rendered(client, messages=MESSAGES, add_generation_prompt=False)
    assert whole.startswith(cut)
    assert whole != cut


def continues_messages(client: Client) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "But soft"}]
    assert rendered(client, messages=begun, continue_final_message=True).endswith("But soft")
    ended = rendered(client, messages=begun, continue_final_message=False)
    assert ended == rendered(client, messages=begun)
    assert not ended.endswith("But soft")


def embeds(client: Client) -> None:
    def vectors(**fields: Any) -> list[list[float]]:
        body: dict[str, Any] = {"model": "demo", "input": PROMPT, "encoding_format": "float"} | fields
        found: Any = client.post("/embeddings", body=body, cast_to=object)
        return [one["embedding"] for one in found["data"]]

    (plain,) = vectors()
    same: list[dict[str, Any]] = [
        {"input": [PROMPT]},
        {"encoding_format": None},
        {"dimensions": len(plain)},
        {"pooling": "last"},
        {"normalize": True},
        {"user": "me"},
    ]
    for fields in same:
        assert vectors(**fields) == [plain]
    assert len(vectors(input=[PROMPT, "b", "c"])) == 3
    raw: Any = vectors(encoding_format="base64")[0]
    assert list(struct.unpack(f"<{len(plain)}f", base64.b64decode(raw))) == pytest.approx(plain, abs=1e-7)
    assert client.embeddings.create(model="demo", input=PROMPT).data[0].embedding == pytest.approx(plain)
    for fields in ({"pooling": "mean"}, {"pooling": "cls"}, {"normalize": False}):
        assert vectors(**fields) != [plain]


FURTHER: Mapping[str, Callable[[Client], None]] = {
    "model": has_model,
    "stream": streams,
    "stream_options": tells_usage_of_streams,
    "session_id": names_sessions,
    "user": is_ignored(user="me"),
    "return_token_ids": returns_ids,
    "prompt_logprobs": scores_the_prompt,
    "response_format": binds_formats,
    "messages": takes_roles_and_parts,
    "prompt": takes_four_forms_of_prompts,
    "max_completion_tokens": prefers_the_newer_name,
    "logprobs": tells_logprobs_of_texts,
    "top_logprobs": tells_logprobs,
    "echo": echoes,
    "tools": calls_tools,
    "tool_choice": calls_tools,
    "parallel_tool_calls": calls_one_tool,
    "reasoning_effort": is_without_effect("reasoning_effort", reasoning_effort="low"),
    "include_reasoning": shows_reasoning,
    "add_generation_prompt": begins_answers,
    "continue_final_message": continues_messages,
    "chat_template_kwargs": is_without_effect(
        "chat_template_kwargs.enable_thinking", chat_template_kwargs={"enable_thinking": False}
    ),
    "embeddings": embeds,
}


@pytest.mark.parametrize("check", FURTHER)
def test_a_further_parameter_does_what_the_page_says(client: Client, check: str) -> None:
    FURTHER[check](client)


def test_usage_says_what_was_found_and_a_salt_finds_its_own(client: Client) -> None:
    asked: Any = [{"role": "user", "content": "Who comes there, and who comes with him? " * 6}]

    def cached(**fields: Any) -> int:
        found = usage(client, messages=asked, extra_body=fields)
        assert found.prompt_tokens_details is not None
        return int(found.prompt_tokens_details.cached_tokens)

    whole = (usage(client, messages=asked, extra_body={"cache_salt": "first"}).prompt_tokens - 1) // 16 * 16
    assert whole > 32
    assert [cached(), cached()] == [0, whole]
    assert [cached(cache_salt=salt) for salt in ("mine", "mine", "first", "other", "")] == [
        0,
        whole,
        whole,
        0,
        whole,
    ]
    answer = client.responses.create(model="demo", input=asked, max_output_tokens=1)
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == whole


def test_text_becomes_ids_and_ids_text(client: Client) -> None:
    root = str(client.base_url).removesuffix("v1/")

    def post(path: str, **body: Any) -> Any:
        return client.post(root + path, body=body, cast_to=object)

    ids = post("tokenize", prompt=PROMPT)["tokens"]
    assert post("detokenize", tokens=ids[1:])["prompt"] == PROMPT
    assert post("detokenize", tokens=ids)["prompt"] == "<|begin|>" + PROMPT
    texts = post("v1/completions/render", prompt=[PROMPT, "So"])
    assert [one["prompt"] for one in texts] == [PROMPT, "So"]
    assert texts[0]["token_ids"] == ids
    ran: Any = client.completions.create(
        model="demo", prompt=[PROMPT, "So"], max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert [one.prompt_token_ids for one in ran.choices] == [one["token_ids"] for one in texts]
    (of_ids,) = post("v1/completions/render", prompt=ids)
    assert (of_ids["prompt"], of_ids["token_ids"], of_ids["count"]) == (None, ids, len(ids))


@pytest.mark.parametrize("of", [ChatRequest, CompletionRequest, SampledRequest])
def test_no_parameter_is_left_out(of: type[msgspec.Struct]) -> None:
    assert set(of.__struct_fields__) - set(SAMPLING) - set(FURTHER) == set()


def test_no_parameter_of_embeddings_is_left_out() -> None:
    names = {"input", "model", "encoding_format", "dimensions", "pooling", "normalize", "user"}
    assert set(EmbeddingRequest.__struct_fields__) == names, "`embeds` must know the others too"


def test_log_probabilities_are_those_of_one_stage(client: Client, llm: LLM) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, logprobs=5, temperature=0, max_tokens=40)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    (output,) = llm.generate(PROMPT, SamplingParams(logprobs=5, temperature=0, max_tokens=40))
    (want,) = output.outputs
    assert want.logprobs is not None
    told = [places[token].logprob for places, token in zip(want.logprobs, want.token_ids, strict=True)]
    assert logprobs.token_logprobs == pytest.approx(told, abs=1e-5)
