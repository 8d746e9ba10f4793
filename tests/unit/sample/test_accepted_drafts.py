"""Which drafts are accepted, and what of a window fails (D5, D6)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from penstock.request import TokenLogprobs
from penstock.sample.sampler import NO_TOKEN, SampleOutput
from penstock.sample.windows import AcceptedTokens
from penstock.sample.windows import accept_drafts as accept_some


def accept_drafts(drawn: SampleOutput, drafts: Sequence[Sequence[int]]) -> AcceptedTokens:
    return accept_some(drawn, drafts, list(map(len, drafts)))


def output(token_ids: list[int], *, has_logprobs: bool = False) -> SampleOutput:
    entries = [
        TokenLogprobs(-float(place), 1, [], []) if has_logprobs and token_id != NO_TOKEN else None
        for place, token_id in enumerate(token_ids)
    ]
    failed = [place for place, token_id in enumerate(token_ids) if token_id == NO_TOKEN]
    return SampleOutput(token_ids=token_ids, logprobs=entries, failed=failed)


def test_a_window_ends_with_the_first_token_that_was_not_guessed() -> None:
    accepted = accept_drafts(output([5, 6, 7, 8, 1, 9, 4]), [[5, 6, 9], [], [2]])
    assert accepted.token_ids == [[5, 6, 7], [1], [9]]
    assert accepted.num_rejected == [1, 0, 1]
    assert accepted.failed == {}


def test_rows_without_drafts_get_what_was_sampled() -> None:
    accepted = accept_drafts(output([3, NO_TOKEN, 4]), [(), (), ()])
    assert accepted.token_ids == [[3], [NO_TOKEN], [4]]
    assert accepted.num_rejected == [0, 0, 0]
    assert accepted.failed == {1: 1}
    assert accepted.logprobs == [None, None, None]


def test_a_failure_counts_only_where_the_window_comes_to_it() -> None:
    accepted = accept_drafts(output([5, NO_TOKEN, 7, 8, NO_TOKEN]), [[5, 6], [9]])
    assert accepted.token_ids == [[5, NO_TOKEN], [8]]
    assert accepted.num_rejected == [1, 1]
    assert accepted.failed == {0: 1}  # behind the rejected draft of the other row nothing means anything


def test_each_token_has_its_own_log_probability() -> None:
    accepted = accept_drafts(output([5, 6, 7, 8], has_logprobs=True), [[5, 1], []])
    assert [[entry.logprob for entry in entries or ()] for entries in accepted.logprobs] == [
        [0.0, -1.0],
        [-3.0],
    ]


@pytest.mark.parametrize("seed", range(20))
def test_windows_against_a_loop(seed: int) -> None:
    chance = random.Random(seed)
    drafts = [[chance.randrange(2) for _ in range(chance.randint(0, 4))] for _ in range(6)]
    drawn = [[chance.randrange(2) for _ in range(len(own) + 1)] for own in drafts]
    accepted = accept_drafts(output([token_id for own in drawn for token_id in own]), drafts)
    for index, (own, sampled) in enumerate(zip(drafts, drawn, strict=True)):
        expected = []
        for place, token_id in enumerate(sampled):
            expected.append(token_id)
            if place == len(own) or own[place] != token_id:
                break
        assert accepted.token_ids[index] == expected
        assert accepted.num_rejected[index] == len(own) + 1 - len(expected)


def test_a_window_ends_where_it_may_go_no_further() -> None:
    accepted = accept_some(output([5, 6, 7, 8]), [[5, 6, 7]], [1])
    assert accepted.token_ids == [[5, 6]]
    assert accepted.num_rejected == [2]
