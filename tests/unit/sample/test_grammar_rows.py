"""Grammars of a rank's rows: masks for the head, beside other constraints; ends, errors and new owners."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from penstock.batch import GREEDY, NO_GRAMMAR, GrammarsBuilt, NewRow, RowSampling
from penstock.errors import InvalidRequestError, ProtocolError, WaitTimeoutError
from penstock.families.registry import resolve_model_directory
from penstock.grammar.matcher import Matcher, Vocabulary, load_vocabulary
from penstock.kernels.candidates import NO_ID, HeadRequest, SparseBias
from penstock.request import StructuredOutputs
from penstock.sample import grammar_rows
from penstock.sample.grammar_rows import NOTHING_LEFT, GrammarRows, NoGrammars
from penstock.tokenizer.tokenizer import load_tokenizer

DEMO = resolve_model_directory("demo")
EOS, VOCAB_SIZE = 1, 1024
TOKENIZER = load_tokenizer(DEMO)
PROMPT = [0, 5, 6]
NUMBERS: dict[bytes, int] = {}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def number_of(structured: StructuredOutputs | None) -> int:
    """As the core gives them; a number for each that is ever asked for."""
    if structured is None:
        return NO_GRAMMAR
    return NUMBERS.setdefault(msgspec.msgpack.encode(structured), len(NUMBERS))


def new_row(row: int, structured: StructuredOutputs | None, outputs: list[int] | None = None) -> NewRow:
    values = {name: getattr(GREEDY, name) for name in RowSampling.__struct_fields__}
    sampling = RowSampling(**values | {"structured": structured})
    tokens = [*PROMPT, *(outputs or [])]
    return NewRow(row, 1, f"r{row}", len(PROMPT), tokens, sampling, grammar=number_of(structured))


def told(grammars: GrammarRows) -> GrammarsBuilt:
    """Once all has been built that is being built."""
    found = GrammarsBuilt(built=[], failed={}, unable={})
    while grammars.is_building:
        for grammar in grammars._untold.values():
            if not grammar.is_dropped:
                grammar.built.result(60)
        answers = grammars.collect()
        assert answers is not None
        found.built.extend(answers.built)
        found.failed.update(answers.failed)
        found.unable.update(answers.unable)
    return found


def head_request(num_rows: int, allowed: np.ndarray | None = None) -> HeadRequest:
    return HeadRequest(
        num_candidates=np.ones(num_rows, dtype=np.int64),
        wants_logits=np.zeros(num_rows, dtype=np.bool_),
        bias=SparseBias.none(num_rows),
        allowed=allowed,
    )


def masks(grammars: NoGrammars, rows: list[int], before: np.ndarray | None = None) -> list[list[int]]:
    """Allowed ids of each row, once all is built."""
    if isinstance(grammars, GrammarRows):
        told(grammars)
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
        grammars.accept(rows, [[token_id], [7]])
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
    grammars.accept(np.array([0]), [ids("x")[:1]])
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
    assert not grammars.is_building, "what was asked for before is nobody's"


def test_d11_what_comes_behind_the_end_is_taken_and_means_nothing(grammars: GrammarRows) -> None:
    """Steps that are in flight when a request ends go on sampling its row."""
    grammars.add(new_row(0, AB))
    masks(grammars, [0])
    for token_id in [*ids("ab"), EOS, EOS, 700, NO_ID, EOS]:
        grammars.accept(np.array([0]), [[token_id]])
        masks(grammars, [0])
    assert grammars.reason(0) == NOTHING_LEFT


def test_a_token_that_the_grammar_forbids_ends_the_row_with_a_reason(grammars: GrammarRows) -> None:
    grammars.add(new_row(0, AB))
    masks(grammars, [0])
    grammars.accept(np.array([0]), [[700]])
    assert masks(grammars, [0]) == [[]]
    assert grammars.reason(0) not in ("", NOTHING_LEFT)


def test_r10_a_grammar_that_fails_on_the_rank_is_told_and_no_other(grammars: GrammarRows) -> None:
    bad = StructuredOutputs(regex="[")
    grammars.add(new_row(0, bad))
    grammars.add(new_row(1, AB))
    answers = told(grammars)
    assert answers.built == [number_of(AB)]
    assert list(answers.failed) == [number_of(bad)]
    assert "regex" in answers.failed[number_of(bad)]
    assert masks(grammars, [1])[0]


def test_a_vocabulary_that_cannot_be_opened_fails_grammars_and_not_the_rank() -> None:
    def fail() -> Vocabulary:
        raise InvalidRequestError("no tokens here.")

    grammars = GrammarRows(VOCAB_SIZE, fail)
    grammars.open()
    grammars.add(new_row(0, AB))
    assert told(grammars).failed == {number_of(AB): "no tokens here"}
    grammars.close()


@pytest.mark.parametrize("lacking", ["grammar-build", "grammar-mask"])
def test_a_thread_that_cannot_start_fails_its_grammar_and_not_the_rank(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(lacking):
            raise RuntimeError("can't start new thread")
        start(thread)

    grammars = GrammarRows(VOCAB_SIZE, lambda: vocabulary)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        grammars.add(new_row(0, AB))
        found = told(grammars)
        assert (found.built, found.failed) == ([], {})
        assert found.unable == {number_of(AB): "no thread can be started for it (can't start new thread)"}
        grammars.add(new_row(1, AB))  # of a plan that the core had sent before it heard of the failure
    grammars.drop([number_of(AB)])
    for row in (0, 1):
        grammars.free(row)
    grammars.add(new_row(0, AB))  # the next request tries again
    assert told(grammars).built == [number_of(AB)]
    assert masks(grammars, [0])[0]
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
    grammars.accept(np.array([0, 1]), [first, first])
    after = masks(grammars, [0, 1])
    assert after[0] == after[1] != expected[0]
    assert grammars._rows[0]._matcher is not spoilt


def test_what_is_built_is_told_once_and_kept_until_it_is_dropped(
    grammars: GrammarRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[StructuredOutputs] = []

    def counted(vocabulary: Vocabulary, structured: StructuredOutputs) -> Matcher:
        built.append(structured)
        return Matcher(vocabulary, structured)

    monkeypatch.setattr(grammar_rows, "new_matcher", counted)
    grammars.add(new_row(0, AB))
    grammars.add(new_row(1, AB))
    assert told(grammars) == GrammarsBuilt(built=[number_of(AB)], failed={})
    expected = masks(grammars, [0])
    grammars.free(0)
    grammars.free(1)
    grammars.add(new_row(2, AB))
    assert not grammars.is_building
    assert grammars.collect() is None
    assert masks(grammars, [2]) == expected
    assert built == [AB]
    grammars.drop([number_of(AB)])
    assert masks(grammars, [2]) == expected, "the row has its own"
    grammars.add(new_row(0, AB))
    assert grammars.is_building
    assert masks(grammars, [0]) == expected
    assert built == [AB, AB]


def test_nothing_is_told_and_nothing_sampled_before_it_is_built(vocabulary: Vocabulary) -> None:
    """And whoever has no grammar, or one that is there, does not wait."""
    hold = threading.Event()
    other = StructuredOutputs(regex="[0-9]")

    def wait() -> Vocabulary:
        assert hold.wait(60)
        return vocabulary

    grammars = GrammarRows(VOCAB_SIZE, wait)
    grammars.add(new_row(0, AB))
    grammars.add(new_row(1, other))
    assert grammars.is_building
    assert grammars.collect() is None
    assert grammars.constrained(head_request(1), np.array([5])).allowed is None
    with pytest.raises(ProtocolError, match=r"row 1 .* not built"):
        grammars.constrained(head_request(1), np.array([1]))
    hold.set()
    assert sorted(told(grammars).built) == sorted(map(number_of, (AB, other)))
    assert len(masks(grammars, [1])[0]) == 10
    grammars.close()


def test_what_is_dropped_before_it_was_built_is_told_of_and_not_built(vocabulary: Vocabulary) -> None:
    hold, begun = threading.Event(), threading.Event()

    def wait() -> Vocabulary:
        begun.set()
        assert hold.wait(60)
        return vocabulary

    grammars = GrammarRows(VOCAB_SIZE, wait)
    grammars.add(new_row(0, AB))
    assert begun.wait(60)
    other = StructuredOutputs(regex="[0-9]")
    grammars.add(new_row(1, other))
    waiting = grammars._untold[number_of(other)].built
    grammars.free(1)
    grammars.drop([number_of(other), 10**6])
    assert waiting.cancelled()
    assert grammars.collect() == GrammarsBuilt(
        built=[], failed={}, unable={number_of(other): "it was dropped"}
    )
    grammars.reset()
    assert not grammars.is_building
    grammars.add(new_row(1, AB))  # of the next epoch
    hold.set()
    assert told(grammars).built == [number_of(AB)]
    assert masks(grammars, [1])
    grammars.close()


def test_a_grammar_that_is_not_built_in_time_fails(vocabulary: Vocabulary) -> None:
    hold, now = threading.Event(), 100.0

    def wait() -> Vocabulary:
        assert hold.wait(60)
        return vocabulary

    grammars = GrammarRows(VOCAB_SIZE, wait, timeout_s=5.0, clock=lambda: now)
    grammars.add(new_row(0, AB))
    now = 104.9
    assert grammars.collect() is None
    now = 105.0
    late = {number_of(AB): "it was not ready within 5 s"}
    assert grammars.collect() == GrammarsBuilt(built=[], failed={}, unable=late)
    assert not grammars.is_building
    hold.set()
    grammars.close()


@pytest.mark.parametrize(
    ("error", "may_be_good"),
    [
        (MemoryError("no room"), True),
        (OSError(5, "bad disk"), True),
        (InvalidRequestError("no text can match it."), False),
        (BaseException("a panic"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_r10_what_the_rank_lacks_is_not_told_of_the_grammar(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, error: BaseException, may_be_good: bool
) -> None:
    def build(*_: object) -> Matcher:
        raise error

    monkeypatch.setattr(grammar_rows, "new_matcher", build)
    grammars = GrammarRows(VOCAB_SIZE, lambda: vocabulary)
    grammars.add(new_row(0, AB))
    found = told(grammars)
    assert found.built == []
    assert (list(found.failed), list(found.unable)) == (
        ([], [number_of(AB)]) if may_be_good else ([number_of(AB)], [])
    )
    grammars.close()


def test_a_mask_that_does_not_come_is_an_error_after_a_time(vocabulary: Vocabulary) -> None:
    hold = threading.Event()
    grammars = GrammarRows(VOCAB_SIZE, lambda: vocabulary, timeout_s=0.01)
    grammars.add(new_row(0, AB))
    told(grammars)
    masking = grammars._masking.submit(hold.wait, 60)
    grammars._rows[0].pending = masking  # type: ignore[assignment]
    with pytest.raises(WaitTimeoutError, match="mask"):
        grammars.constrained(head_request(1), np.array([0]))
    hold.set()
    grammars.close()


def test_d7_masks_behind_drafts_are_those_of_the_drafts_one_by_one(grammars: GrammarRows) -> None:
    """Beside a row without drafts, one whose drafts are right, and then one by one without any."""
    numbers = StructuredOutputs(regex="[0-9]{1,3}(,[0-9]{1,3})*")
    grammars.add(new_row(0, numbers))
    grammars.add(new_row(1, numbers))
    drafts = ids("12,7")
    assert len(drafts) > 1
    alone = masks(grammars, [1])[0]
    grammars.expect({0: drafts})
    window = masks(grammars, [0] * (1 + len(drafts)) + [1])
    assert grammars.reach(np.array([0, 1]), [len(drafts), 0]) == [len(drafts), 0]
    assert window[0] == window[-1] == alone
    for depth, token_id in enumerate(drafts, 1):
        grammars.accept(np.array([1]), [[token_id]])
        assert masks(grammars, [1])[0] == window[depth]
    grammars.accept(np.array([0]), [[*drafts[:1], ids("5")[0]]])  # the second draft was wrong
    assert masks(grammars, [0])[0] == masks(grammars, [0])[0] != window[0]
    assert grammars.reach(np.array([0]), [3]) == [0]  # without new drafts there are no masks behind any


def test_a_window_ends_where_its_grammar_does(grammars: GrammarRows) -> None:
    grammars.add(new_row(0, StructuredOutputs(regex="[0-9]{2}")))
    told(grammars)
    three, letter = ids("3")[0], ids("b")[0]
    cases = {
        (three, letter, three): 1,  # forbidden behind the first
        (letter, three): 0,
        (three, three, EOS, three): 2,  # nothing comes behind the end
    }
    for drafts, num_usable in cases.items():
        grammars.expect({0: drafts})
        behind = masks(grammars, [0] * (1 + len(drafts)))
        assert grammars.reach(np.array([0]), [len(drafts)]) == [num_usable]
        assert [bool(mask) for mask in behind] == [place <= num_usable for place in range(len(behind))]


def test_a_matcher_that_fails_behind_a_draft_ends_the_window_alone(
    grammars: GrammarRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.add(new_row(0, StructuredOutputs(regex="[0-9]{5}")))
    first = masks(grammars, [0])[0]
    monkeypatch.setattr(Matcher, "copy", lambda own: 1 / 0)
    grammars.expect({0: ids("1")})
    assert masks(grammars, [0, 0]) == [first, []]
    assert grammars.reach(np.array([0]), [1]) == [0]
    assert grammars.reason(0) == NOTHING_LEFT
    grammars.accept(np.array([0]), [ids("7")[:1]])
    assert masks(grammars, [0])[0]
