"""Sampling parameters: defaults, ranges, and the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.errors import InvalidRequestError
from penstock.request import (
    MAX_STOP_STRING_BYTES,
    GenerationRequest,
    RequestUpdate,
    SamplingParams,
    TokenLogprobs,
)

VOCAB = 100


@pytest.mark.parametrize(
    "accepted",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": VOCAB},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": 1},
        {"max_tokens": None, "min_tokens": 5},
        {"max_tokens": 5, "min_tokens": 5},
        {"logprobs": 0},
        {"logprobs": 20},
        {"stop": "a"},
        {"stop": ["a"] * 16},
        {"stop": "x" * MAX_STOP_STRING_BYTES},
        {"stop_token_ids": [0, VOCAB - 1]},
        {"stop_token_ids": [3] * 64},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 10.0},
        {"logit_bias": {0: -100.0, VOCAB - 1: 100.0}},
        {"allowed_token_ids": [0, VOCAB - 1]},
        {"allowed_token_ids": [3] * 1024},
        {"bad_words": ["x" * 128] * 128},
        {"bad_word_ids": [[0] * 256, *([[VOCAB - 1]] * 255)]},
    ],
)
def test_values_in_range_are_accepted(accepted: dict[str, Any]) -> None:
    SamplingParams(**accepted).validate(VOCAB)


@pytest.mark.parametrize(
    ("refused", "param", "message"),
    [
        ({"temperature": -0.1}, "temperature", "temperature must be between 0.0 and 2.0, got -0.1."),
        ({"temperature": 2.1}, "temperature", "got 2.1"),
        ({"temperature": float("nan")}, "temperature", "got nan"),
        ({"temperature": float("inf")}, "temperature", "got inf"),
        ({"top_p": 0.0}, "top_p", "top_p must be above 0.0 and at most 1.0, got 0.0."),
        ({"top_p": 1.1}, "top_p", "got 1.1"),
        ({"top_p": float("nan")}, "top_p", "got nan"),
        ({"min_p": -0.1}, "min_p", "got -0.1"),
        ({"top_k": -2}, "top_k", "between -1 and 100, got -2"),
        ({"top_k": VOCAB + 1}, "top_k", "got 101"),
        ({"seed": 2**63}, "seed", "got 9223372036854775808"),
        ({"max_tokens": -1}, "max_tokens", "between 0 and 2147483647, got -1"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens", "between 0 and 0, got 1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20, got 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "got -1"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "between 0 and 4, got 5"),
        ({"max_tokens": None, "min_tokens": -1}, "min_tokens", "got -1"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20, got 21"),
        ({"stop": ["a"] * 17}, "stop", "number of stop strings must be between 0 and 16, got 17"),
        ({"stop": ""}, "stop", "length of a stop string in bytes must be between 1 and 256, got 0"),
        ({"stop": "é" * 129}, "stop", "got 258"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "number of stop_token_ids"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids", "a stop token id must be between 0 and 99, got 100"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "got -1"),
        ({"n": 0}, "n", "n must be between 1 and 128, got 0."),
        ({"n": 10**6}, "n", "n must be between 1 and 128, got 1000000."),
        ({"presence_penalty": 2.1}, "presence_penalty", "between -2.0 and 2.0, got 2.1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty", "got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "above 0.0 and at most 10.0, got 0.0"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias", "a token id of logit_bias must be between 0 and 99"),
        ({"logit_bias": {1: float("-inf")}}, "logit_bias", "a value of logit_bias must be between -100.0"),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "logit_bias",
            "number of logit_bias entries must be between 0 and 1024, got 1025",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids", "must be between 1 and 1024, got 0"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids", "got 1025"),
        ({"bad_words": ["a"] * 129}, "bad_words", "number of bad_words must be between 0 and 128, got 129"),
        ({"bad_words": ["a", ""]}, "bad_words", "length of a bad word in bytes must be between 1 and 128"),
        ({"bad_words": ["é" * 65]}, "bad_words", "got 130"),
        ({"bad_word_ids": [[1]] * 257}, "bad_word_ids", "between 0 and 256, got 257"),
        ({"bad_word_ids": [[]]}, "bad_word_ids", "number of tokens of a bad word must be between 1 and 256"),
        ({"bad_word_ids": [[0] * 257]}, "bad_word_ids", "got 257"),
        ({"bad_word_ids": [[VOCAB]]}, "bad_word_ids", "a token id of a bad word must be between 0 and 99"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "an allowed token id must be between 0 and 99"),
    ],
)
def test_values_out_of_range_name_field_bound_and_value(
    refused: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**refused).validate(VOCAB)
    assert message in str(caught.value)
    assert (caught.value.param, caught.value.code) == (param, "out_of_range")


def test_logprobs_are_bounded_by_a_small_vocabulary() -> None:
    with pytest.raises(InvalidRequestError, match="between 0 and 5, got 6"):
        SamplingParams(logprobs=6).validate(5)


def test_a_lone_surrogate_in_a_stop_string_is_measured_not_fatal() -> None:
    SamplingParams(stop="\ud800").validate(VOCAB)


@pytest.mark.parametrize(("stop", "strings"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([], [])])
def test_stop_is_one_string_or_several(stop: str | list[str], strings: list[str]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


def test_sampling_params_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.0  # type: ignore[misc]


def test_requests_and_updates_survive_the_wire() -> None:
    request = GenerationRequest(
        request_id="r", prompt_token_ids=[1, 2], sampling=SamplingParams(stop=["x"], seed=3)
    )
    update = RequestUpdate(
        request_id="r",
        token_ids=[7],
        logprobs=[TokenLogprobs(-0.5, 1, [7], [-0.5])],
        finish_reason="stop",
        stop_token_id=7,
    )
    for value in (request, update):
        frame = msgspec.msgpack.encode(value)
        assert msgspec.msgpack.decode(frame, type=type(value)) == value
    assert len(msgspec.msgpack.encode(RequestUpdate(request_id="r", token_ids=[7]))) < 32, (
        "defaults are left out"
    )
