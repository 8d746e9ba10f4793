"""What a request must satisfy before it goes to the core."""

from __future__ import annotations

import pytest

from penstock.engine.request_check import RequestLimits
from penstock.errors import InvalidRequestError
from penstock.request import SamplingParams

LIMITS = RequestLimits(max_model_len=20, vocab_size=100)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("max_tokens", SamplingParams(max_tokens=11)),
        ("min_tokens", SamplingParams(max_tokens=None, min_tokens=11)),
    ],
)
def test_output_that_cannot_fit_is_refused_with_the_numbers(name: str, sampling: SamplingParams) -> None:
    LIMITS.check_length([1] * 9, sampling)
    told = rf"10 tokens and {name} is 11, together 21; the limit is 20"
    with pytest.raises(InvalidRequestError, match=told) as raised:
        LIMITS.check_length([1] * 10, sampling)
    assert (raised.value.param, raised.value.code) == (name, "context_length_exceeded")


def test_a_request_that_asks_for_no_length_fits() -> None:
    LIMITS.check_length([1] * 19, SamplingParams(max_tokens=None))


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "empty_prompt"),
        ([100], "out_of_range"),
        ([5, -1], "out_of_range"),
        ([2**70], "out_of_range"),
        ([1] * 20, "context_length_exceeded"),
    ],
)
def test_prompts_are_checked_against_the_model(prompt: list[int], code: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        LIMITS.check(prompt, SamplingParams())
    assert (raised.value.param, raised.value.code) == ("prompt", code)
