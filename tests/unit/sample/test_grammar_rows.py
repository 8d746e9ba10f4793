"""Grammars of a rank's rows: masks for the head, beside other constraints; ends, errors and new owners."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.batch import GREEDY, NewRow, RowSampling
from penstock.errors import InvalidRequestError, WaitTimeoutError
from penstock.grammar.matcher import Vocabulary, load_vocabulary
from penstock.kernels.candidates import NO_ID, HeadRequest, SparseBias
from penstock.models.registry import resolve_model_directory
from penstock.request import StructuredOutputs
from penstock.sample.grammar_rows import KEPT_GRAMMARS, NOTHING_LEFT, GrammarRows, NoGrammars
from penstock.tokenizer.tokenizer import load_tokenizer

DEMO = resolve_model_directory("demo")
EOS, VOCAB_SIZE = 1, 1024
TOKENIZER = load_tokenizer(DEMO)
PROMPT = [0, 5, 6]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def new_row(row: int, structured: StructuredOutputs | None, outputs: list[int] | None = None) -> NewRow:
    values = {name: getattr(GREEDY, name) for name in RowSampling.__struct_fields__}
    sampling = RowSampling(**values | {"structured": structured})
    return NewRow(row, 1, f"r{row}", len(PROMPT), [*PROMPT, *(outputs or [])], sampling)


def head_request(num_rows: int, allowed: np.ndarray | None = None) -> HeadRequest:
    return HeadRequest(
        num_candidates=np.ones(num_rows, dtype=np.int64),
        wants_logits=np.zeros(num_rows, dtype=np.bool_),
        bias=SparseBias.none(num_rows),
        allowed=allowed,
    )


def masks(grammars: NoGrammars, rows: list[int], before: np.ndarray | None = None) -> list[list[int]]:
    """Allowed ids of each row."""
    found = grammars.constrained(head_request(len(rows), before), np.array(rows)).allowed
    assert found is not None
    bits = np.unpackbits(found.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(DEMO, [EOS])


@pytest.fixture
def grammars(vocabulary: Vocabulary) -> Iterator[GrammarRows]:
    grammars = GrammarRows(VOCAB_SIZE, lambda: vocabulary)
    yield grammars
    grammars.close()


AB = StructuredOutputs(choice=["ab", "xy"])


def test_rows_without_a_grammar_cost_nothing(grammars: GrammarRows) -> None:
    grammars.add(new_row(0, None))
    request = head_request(1)
    assert grammars.constrained(request, np.array([0])) is request
    assert NoGrammars().constrained(request, np.array([0])) is request


def test_each_row_gets_its_own_mask_and_others_all(grammars: GrammarRows) -> None:
    grammars.add(new_row(3, AB))
    grammars.add(new_row(1, StructuredOutputs(regex="[0-9]")))
    grammars.add(new_row(2, None))
    first, free, digits = masks(grammars, [3, 2, 1])
    assert len(free) == VOCAB_SIZE
    assert {TOKENIZER.token_bytes(i) for i in digits} == {str(digit).encode() for digit in range(10)}
    assert {TOKENIZER.token_bytes(i)[:1] for i in first} == {b"a", b"x"}


def test_masks_follow_what_is_drawn(grammars: GrammarRows) -> None:
    rows = np.array([0, 1])
    grammars.add(new_row(0, AB))
    grammars.add(new_row(1, None))
    tokens = ids("xy")
    for token_id in tokens:
        assert token_id in masks(grammars, [0])[0]
        masks(grammars, [0, 1])
        grammars.accept(rows, [token_id, 7])
    assert masks(grammars, [0]) == [[EOS]]


def test_other_constraints_hold_as_well(grammars: GrammarRows) -> None:
    grammars.add(new_row(0, StructuredOutputs(regex="[0-9]")))
    bits = np.zeros((2, VOCAB_SIZE), dtype=np.uint8)
    three = ids("3")[0]
    bits[:, [three, 700]] = 1
    before = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    kept = before.copy()
    assert masks(grammars, [0, 1], before) == [[three], [three, 700]]
    assert (before == kept).all()


@pytest.mark.parametrize("vocab_size", [1000, 1024, 1031, 1100])
def test_ids_that_the_tokenizer_or_the_head_does_not_have_are_forbidden(
    vocabulary: Vocabulary, vocab_size: int
) -> None:
    """Models pad their vocabulary; some tokenizers have more ids than the model."""
    grammars = GrammarRows(vocab_size, lambda: vocabulary)
    grammars.add(new_row(0, StructuredOutputs(regex="(?s:.*)")))
    (found,) = masks(grammars, [0])
    assert EOS in found
    assert max(found) < min(vocab_size, 1024)
    assert len(found) > 900
    grammars.close()


def test_d12_a_resumed_row_goes_on_where_it_was(grammars: GrammarRows) -> None:
    grammars.add(new_row(0, AB))
    masks(grammars, [0])
    grammars.accept(np.array([0]), ids("x")[:1])
    expected = masks(grammars, [0])
    grammars.free(0)
    grammars.add(new_row(5, AB, ids("x")[:1]))
    assert masks(grammars, [5]) == expected


def test_a_rows_new_owner_inherits_nothing(grammars: GrammarRows) -> None:
    grammars.add(new_row(0, AB))
    grammars.free(0)
    assert len(head := [grammars.constrained(head_request(1), np.array([0]))]) == 1
    assert head[0].allowed is None
    grammars.add(new_row(0, AB))
    grammars.add(new_row(0, None))
    assert grammars.constrained(head_request(1), np.array([0])).allowed is None
    grammars.add(new_row(0, AB))
    grammars.reset()
    assert grammars.constrained(head_request(1), np.array([0])).allowed is None


def test_d11_what_comes_behind_the_end_is_taken_and_means_nothing(grammars: GrammarRows) -> None:
    """Steps that are in flight when a request ends go on sampling its row."""
    grammars.add(new_row(0, AB))
    masks(grammars, [0])
    for token_id in [*ids("ab"), EOS, EOS, 700, NO_ID, EOS]:
        grammars.accept(np.array([0]), [token_id])
        masks(grammars, [0])
    assert grammars.reason(0) == NOTHING_LEFT


def test_a_token_that_the_grammar_forbids_ends_the_row_with_a_reason(grammars: GrammarRows) -> None:
    grammars.add(new_row(0, AB))
    masks(grammars, [0])
    grammars.accept(np.array([0]), [700])
    assert masks(grammars, [0]) == [[]]
    assert grammars.reason(0) not in ("", NOTHING_LEFT)


def test_r10_a_grammar_that_fails_on_the_rank_forbids_all_to_its_row_alone(grammars: GrammarRows) -> None:
    grammars.add(new_row(0, StructuredOutputs(regex="[")))
    grammars.add(new_row(1, AB))
    bad, good = masks(grammars, [0, 1])
    assert bad == []
    assert good
    assert "regex" in grammars.reason(0)


def test_a_vocabulary_that_cannot_be_opened_ends_rows_and_not_the_rank() -> None:
    def fail() -> Vocabulary:
        raise InvalidRequestError("no tokens here.")

    grammars = GrammarRows(VOCAB_SIZE, fail)
    grammars.open()
    grammars.add(new_row(0, AB))
    assert masks(grammars, [0]) == [[]]
    assert grammars.reason(0) == "no tokens here"
    grammars.close()


def test_a_limit_that_others_have_used_up_is_nobody_elses(
    vocabulary: Vocabulary, grammars: GrammarRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matcher that fails is built anew for its row, which goes on if that one does not fail."""
    from penstock.grammar import matcher

    for row in (0, 1):
        grammars.add(new_row(row, AB))
    expected = masks(grammars, [0, 1])
    spoilt = grammars._rows[0]._matcher
    real = matcher.Matcher.error.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        matcher.Matcher, "error", property(lambda own: "limit" if own is spoilt else real(own))
    )
    first = ids("x")[:1]
    grammars.accept(np.array([0, 1]), first * 2)
    after = masks(grammars, [0, 1])
    assert after[0] == after[1] != expected[0]
    assert grammars._rows[0]._matcher is not spoilt


def test_grammars_that_are_kept_for_others_are_bounded(grammars: GrammarRows) -> None:
    for number in range(KEPT_GRAMMARS + 5):
        grammars.add(new_row(0, StructuredOutputs(choice=[f"a{number}"])))
        masks(grammars, [0])
    assert len(grammars._builder._unused) == KEPT_GRAMMARS


def test_grammars_of_rows_that_have_ended_are_not_built(vocabulary: Vocabulary) -> None:
    hold, begun = threading.Event(), threading.Event()

    def wait() -> Vocabulary:
        begun.set()
        assert hold.wait(60)
        return vocabulary

    grammars = GrammarRows(VOCAB_SIZE, wait)
    grammars.add(new_row(0, AB))
    assert begun.wait(60)
    for number in range(9):  # one leaves, one is followed by another, and all are forgotten
        grammars.add(new_row(1 + number % 3, StructuredOutputs(choice=[f"a{number}"])))
        if number % 3 == 2:
            grammars.free(3)
    grammars.reset()
    grammars.add(new_row(1, AB))
    hold.set()
    assert masks(grammars, [1])
    assert len(grammars._builder._unused) == 1
    grammars.close()


def test_a_mask_that_does_not_come_is_an_error_after_a_time(vocabulary: Vocabulary) -> None:
    hold = threading.Event()

    def wait() -> Vocabulary:
        assert hold.wait(60)
        return vocabulary

    grammars = GrammarRows(VOCAB_SIZE, wait, timeout_s=0.01)
    grammars.add(new_row(0, AB))
    with pytest.raises(WaitTimeoutError, match="mask"):
        masks(grammars, [0])
    hold.set()
    grammars.close()
