"""What a request must satisfy before it goes to the core."""

from __future__ import annotations

import pytest

from penstock.engine.client.request_check import RequestLimits
from penstock.errors import InvalidRequestError
from penstock.request import PoolingParams, SamplingParams, VectorShape

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
    told = rf"10 tokens and {name} is 11, 21 together; the limit is 20"
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


def test_nothing_needs_to_follow_a_prompt_that_is_pooled() -> None:
    LIMITS.check_pooled([1] * 20, PoolingParams())
    with pytest.raises(InvalidRequestError) as raised:
        LIMITS.check_pooled([1] * 21, PoolingParams())
    assert (raised.value.param, raised.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(InvalidRequestError, match="empty"):
        LIMITS.check_pooled([], PoolingParams())


@pytest.mark.parametrize(
    ("shape", "good", "bad", "code"),
    [
        (VectorShape(size=8), [None, 8], [1, 4, 7, 9, 0, -1], "unsupported_parameter"),
        (VectorShape(size=8, cuts=(2, 4)), [None, 2, 4, 8], [1, 3, 9, 0], "out_of_range"),
        (VectorShape(size=8, any_cut=True), [None, 1, 5, 8], [9, 0, -1], "out_of_range"),
    ],
)
def test_vectors_have_the_lengths_that_the_model_was_trained_for(
    shape: VectorShape, good: list[int | None], bad: list[int], code: str
) -> None:
    for dimensions in good:
        shape.check(dimensions)
    for dimensions in bad:
        with pytest.raises(InvalidRequestError, match=f"dimensions is {dimensions};") as raised:
            shape.check(dimensions)
        assert (raised.value.param, raised.value.code) == ("dimensions", code)


@pytest.mark.parametrize(("asked", "given"), [(None, None), (3, 3), (10, 10), (16, 11)])
def test_a_default_is_shortened_to_what_fits(asked: int | None, given: int | None) -> None:
    assert LIMITS.shortened(SamplingParams(max_tokens=asked), 9).max_tokens == given
