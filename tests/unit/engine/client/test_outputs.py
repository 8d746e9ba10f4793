"""Updates to text: stop strings cut text and usage, ids that end a request have no text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.client.outputs import (
    CompletionOutput,
    OutputAssembler,
    TextDelta,
    completion_output,
    merge_deltas,
    output_assembler,
    position_logprobs,
)
from penstock.request import FinishReason, RequestUpdate, SamplingParams, TokenLogprobs
from penstock.tokenizer.detokenizer import ByteDetokenizer, Detokenizer, PieceTable
from penstock.tokenizer.tokenizer import AbsentTokenizer

PIECES = PieceTable(lambda token_id: bytes([token_id]))


class ByteTokenizer(AbsentTokenizer):
    """Each byte is a token."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def detokenizer(
        self, prompt_token_ids: list[int], *, skip_special_tokens: bool = True, shown: Sequence[str] = ()
    ) -> Detokenizer:
        return ByteDetokenizer(PIECES)


def assembler(**sampling: object) -> OutputAssembler:
    return output_assembler(ByteTokenizer(), [1], SamplingParams(max_tokens=None, **sampling))


def update(
    ids: Iterable[int],
    finish: FinishReason | None = None,
    stop_id: int | None = None,
    logprobs: list[TokenLogprobs] | None = None,
) -> RequestUpdate:
    return RequestUpdate(
        request_id="r", token_ids=list(ids), finish_reason=finish, stop_token_id=stop_id, logprobs=logprobs
    )


def feed(made: OutputAssembler, *updates: RequestUpdate) -> list[TextDelta]:
    return [made.append(entry) for entry in updates]


def test_text_and_ids_of_each_update_come_at_once() -> None:
    made = assembler()
    deltas = feed(made, update(b"ab"), update(b"c", "length"))
    assert deltas == [TextDelta("ab", [97, 98]), TextDelta("c", [99], None, "length")]
    assert made.num_tokens == 3


def test_d11_a_stop_string_over_several_tokens_cuts_text_and_usage() -> None:
    made = assembler(stop=["END"])
    deltas = feed(made, update(b"xE"), update(b"N"), update(b"D!?", None))
    assert [delta.text for delta in deltas] == ["x", "", ""]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason == "END"
    assert deltas[-1].token_ids == [68], (
        "tokens after the one that completed the stop string are not the answer"
    )
    assert made.num_tokens == 4


def test_text_within_a_token_after_the_stop_string_is_cut() -> None:
    pieces = PieceTable({1: b"a st", 2: b"op me"}.__getitem__)
    made = OutputAssembler(SamplingParams(stop="stop"), ByteDetokenizer(pieces))
    assert [delta.text for delta in feed(made, update([1]), update([2]))] == ["a ", ""]
    made = OutputAssembler(
        SamplingParams(stop="stop", include_stop_str_in_output=True), ByteDetokenizer(pieces)
    )
    assert [delta.text for delta in feed(made, update([1]), update([2]))] == ["a ", "stop"]


def test_a_false_beginning_of_a_stop_string_is_given_out_at_the_end() -> None:
    made = assembler(stop=["END"])
    deltas = feed(made, update(b"xEN"), update(b"", "length"))
    assert [delta.text for delta in deltas] == ["x", "EN"]
    assert deltas[-1].stop_reason is None


def test_a_stop_string_wins_over_a_length_that_the_same_token_reaches() -> None:
    (delta,) = feed(assembler(stop=["ND"]), update(b"END", "length"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("E", "stop", "ND")


def test_an_unfinished_character_comes_with_the_last_delta() -> None:
    deltas = feed(assembler(), update(b"a\xf0\x9f"), update(b"\x98", "length"))
    assert [delta.text for delta in deltas] == ["a", "\ufffd"]


def test_the_id_that_ended_a_request_has_no_text_but_counts() -> None:
    made = assembler(stop_token_ids=[66])
    (delta,) = feed(made, update(b"AB", "stop", 66))
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("A", [65, 66], 66)
    assert made.num_tokens == 2
    (delta,) = feed(
        assembler(stop_token_ids=[66], include_stop_str_in_output=True), update(b"AB", "stop", 66)
    )
    assert delta.text == "AB"


def test_an_end_of_sequence_id_is_no_stop_reason() -> None:
    (delta,) = feed(assembler(), update(b"AB", "stop", 66))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("A", "stop", None)


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    made = assembler(stop=["a"], min_tokens=2)
    deltas = feed(made, update(b"a"), update(b"aba"))
    assert [delta.text for delta in deltas] == ["a", "ab"]
    assert made.num_tokens == 4


def test_logprobs_are_cut_with_the_tokens() -> None:
    entries = [TokenLogprobs(-float(i), 1, [], []) for i in range(3)]
    (delta,) = feed(assembler(stop=["b"]), update(b"abc", logprobs=entries))
    assert delta.logprobs == entries[:2]


def test_without_detokenization_there_is_no_text() -> None:
    (delta,) = feed(assembler(detokenize=False), update(b"abc", "length"))
    assert (delta.text, delta.token_ids) == ("", [97, 98, 99])


@given(
    st.text("abé", max_size=12), st.lists(st.integers(1, 20), max_size=5), st.sampled_from(["ab", "éa", "b"])
)
def test_the_text_does_not_depend_on_how_tokens_are_grouped(text: str, cuts: list[int], stop: str) -> None:
    data = text.encode()
    edges = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    made, shown = assembler(stop=[stop]), []
    for index in range(1, len(edges)):
        last = index == len(edges) - 1
        delta = made.append(update(data[edges[index - 1] : edges[index]], "length" if last else None))
        shown.append(delta)
        if delta.finish_reason is not None:
            break
    expected = text.partition(stop)[0]
    assert merge_deltas(shown).text == expected
    if stop in text:
        assert made.num_tokens == len((expected + stop).encode())


def test_merging_keeps_everything_in_order() -> None:
    entry = TokenLogprobs(-1.0, 1, [], [])
    first = TextDelta("a", [1], [entry])
    last = TextDelta("b", [2], [entry], "stop", "x")
    assert merge_deltas([first]) is first
    assert merge_deltas([first, last]) == TextDelta("ab", [1, 2], [entry, entry], "stop", "x")
    assert merge_deltas([TextDelta("a", [1]), TextDelta("", [])]).logprobs is None
    with_vector = TextDelta("", [], None, "stop", vector=bytes(8))
    assert merge_deltas([TextDelta("", []), with_vector]) == with_vector


def test_a_whole_completion_has_vllms_shape() -> None:
    entry = TokenLogprobs(-0.5, 2, [66, 65], [-0.25, -0.5])
    found = completion_output([TextDelta("A", [65], [entry], "length")], ByteTokenizer())
    assert isinstance(found, CompletionOutput)
    assert (found.text, found.token_ids, found.finish_reason) == ("A", [65], "length")
    assert found.finished()
    assert found.cumulative_logprob == pytest.approx(-0.5)
    assert found.logprobs is not None
    (position,) = found.logprobs
    assert list(position) == [65, 66], "the chosen token first"
    assert (position[65].rank, position[65].decoded_token) == (2, "A")
    assert (position[66].rank, position[66].logprob) == (1, -0.25)


def test_the_chosen_token_is_listed_even_if_it_is_not_among_the_likeliest() -> None:
    found = position_logprobs(70, TokenLogprobs(-9.0, 40, [65], [-0.1]), ByteTokenizer())
    assert {token: entry.rank for token, entry in found.items()} == {70: 40, 65: 1}
