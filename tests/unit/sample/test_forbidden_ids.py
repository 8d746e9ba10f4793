"""Which ids complete a bad word (row G8), against a search in plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.sample.bad_words import BadWords


def searched(words: list[list[int]], output: list[int]) -> set[int]:
    """Every id that would make some word the end of the output."""
    return {
        token_id
        for token_id in range(20)
        for word in words
        if [*output, token_id][-len(word) :] == word and len(word) <= len(output) + 1
    }


@pytest.mark.parametrize("seed", range(20))
def test_g8_the_ids_that_complete_a_word_are_those_of_a_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = [rng.integers(0, 4, rng.integers(1, 5)).tolist() for _ in range(int(rng.integers(1, 12)))]
    bad, output, hits = BadWords(words), [], 0
    for _ in range(60):
        found = bad.forbidden(np.array(output, dtype=np.int64)).tolist()
        assert set(found) == searched(words, output)
        assert set(found) <= set(bad.last_ids)
        hits += len(found)
        output.append(int(rng.integers(0, 4)))
    assert hits


def test_a_word_that_begins_with_its_own_end_is_found() -> None:
    bad = BadWords([[1, 1, 2], [1, 2, 1, 2]])
    assert bad.forbidden(np.array([1, 1, 1])).tolist() == [2]
    assert bad.forbidden(np.array([1, 2, 1])).tolist() == [2]
    assert bad.forbidden(np.array([2, 1])).tolist() == []


def test_no_words_forbid_nothing() -> None:
    assert BadWords([]).forbidden(np.array([1, 2, 3])).tolist() == []
    assert BadWords([]).last_ids == []
