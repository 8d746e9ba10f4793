"""Long answers as JSON: what one call encodes is bounded, and the bytes are those of a single call (issue 25,
point 18)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.server.answers import encoding
from penstock.server.answers.encoding import SLICE, EncodedLists, encode_in_slices
from penstock.server.openai.openai_types import (
    AssistantMessage,
    ChatChoice,
    ChatLogprobs,
    ChatResponse,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    Embedding,
    EmbeddingResponse,
    EmbeddingUsage,
    PromptLogprob,
    PromptTokensDetails,
    TopLogprob,
    Usage,
)

USAGE = Usage(
    prompt_tokens=1, completion_tokens=2, total_tokens=3, prompt_tokens_details=PromptTokensDetails(0)
)


def chat(num_tokens: int, num_choices: int) -> ChatResponse:
    entry = ChatTokenLogprob("a", -1.0, [97], [TopLogprob("b", -2.0, [98])] * 20)
    prompt = [None, *({7: PromptLogprob(logprob=-1.0, rank=1, decoded_token="ü")} for _ in range(num_tokens))]
    choices = [
        ChatChoice(
            index=index,
            message=AssistantMessage(content="a\0b" * num_tokens),
            logprobs=ChatLogprobs([entry] * num_tokens),
            finish_reason="stop",
            stop_reason=None,
        )
        for index in range(num_choices)
    ]
    return ChatResponse(
        id="x", object="o", created=1, model="m", choices=choices, usage=USAGE, prompt_logprobs=prompt
    )


def completion(num_tokens: int, num_choices: int) -> CompletionResponse:
    logprobs = CompletionLogprobs(
        text_offset=list(range(num_tokens)),
        token_logprobs=[None, *[-1.0] * (num_tokens - 1)],
        tokens=["a"] * num_tokens,
        top_logprobs=[None, *({"a": -1.0, "ß": -2.0} for _ in range(num_tokens - 1))],
    )
    choices = [
        CompletionChoice(
            index=index, text="a" * num_tokens, logprobs=logprobs, finish_reason="stop", stop_reason=None
        )
        for index in range(num_choices)
    ]
    return CompletionResponse(id="x", object="o", created=1, model="m", choices=choices, usage=USAGE)


def embeddings(num_inputs: int) -> EmbeddingResponse:
    data = [Embedding(index=index, embedding=[0.5] * 64) for index in range(num_inputs)]
    return EmbeddingResponse(data=data, model="m", usage=EmbeddingUsage(prompt_tokens=1, total_tokens=1))


@pytest.mark.parametrize(
    "answer",
    [
        *(chat(count, 1) for count in (0, 1, SLICE, SLICE + 1, 200)),
        chat(40, 128),
        chat(2, 300),
        *(completion(count, 2) for count in (1, SLICE, 200)),
        *(embeddings(count) for count in (1, SLICE + 1, 2048)),
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_the_bytes_are_those_of_one_call_and_no_call_has_many_entries(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def encode(value: Any) -> bytes:
        sizes.append(num_entries(value))
        return msgspec.json.encode(value)

    monkeypatch.setattr(encoding, "encode", encode)
    assert encode_in_slices(answer) == msgspec.json.encode(answer)
    assert max(sizes) < 1500


def num_entries(value: Any) -> int:
    """Entries of all lists in it."""
    if isinstance(value, msgspec.Struct):
        return sum(num_entries(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, dict):
        return sum(map(num_entries, value.values()))
    return sum(1 + num_entries(entry) for entry in value) if isinstance(value, list) else 0


def test_lists_that_are_encoded_already_stand_where_they_belong() -> None:
    lists = EncodedLists()
    first, second, empty = (lists.new_list() for _ in range(3))
    for entries in ([1, 2], [], ["\0", "ü"]):
        first.extend(msgspec.json.encode(entries))
    second.extend(b"[{}]")
    value = {"a": second.placeholder, "text": "\0" + "0", "b": [first.placeholder, empty.placeholder]}
    wanted = {"a": [{}], "text": "\0" + "0", "b": [[1, 2, "\0", "ü"], []]}
    assert lists.encode(value) == msgspec.json.encode(wanted)
    assert lists.encode({"c": second.placeholder}) == b'{"c":[{}]}', "as often as it is wanted"
    assert lists.encode([1]) == b"[1]"
