"""Log-probabilities of completions (row G8): where in the text each token begins."""

from __future__ import annotations

import pytest

from penstock.families.registry import resolve_model_directory
from penstock.request import TokenLogprobs
from penstock.server.openai.logprobs import CompletionLogprobsWriter
from penstock.tokenizer.tokenizer import load_tokenizer

DEMO = load_tokenizer(resolve_model_directory("demo"))
SPECIAL = DEMO.added_token_ids[DEMO.special_tokens[0]]
TEXT = "Grüße, 世界 👋\N{REPLACEMENT CHARACTER} my lord"
IDS = DEMO.encode(TEXT, add_special_tokens=False)


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(-1.5, 2, [7, token_id], [-0.5, -1.5])


def writer(*, skip: bool = True, **options: int) -> CompletionLogprobsWriter:
    detokenizer = DEMO.detokenizer([], skip_special_tokens=skip)
    return CompletionLogprobsWriter(DEMO.token_bytes, detokenizer, **options)


def test_g8_each_token_begins_where_its_first_character_does() -> None:
    assert len(IDS) > len(TEXT.split()), "characters of several tokens are among them"
    told = writer(begin=100).write(IDS, [entry(token_id) for token_id in IDS])
    before = b""
    for token_id, offset in zip(IDS, told.text_offset, strict=True):
        whole = before.decode(errors="ignore")  # without what is begun of a character
        assert offset == 100 + len(whole)
        before += DEMO.token_bytes(token_id)
    assert before.decode() == TEXT
    assert any(name.startswith("bytes:") for name in told.tokens)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_cut_changes_what_is_told(size: int) -> None:
    whole = writer().write(IDS, [entry(token_id) for token_id in IDS])
    pieces = writer()
    found = [
        pieces.write(IDS[at : at + size], [entry(token_id) for token_id in IDS[at : at + size]])
        for at in range(0, len(IDS), size)
    ]
    for name in ("text_offset", "tokens", "token_logprobs", "top_logprobs"):
        assert [value for piece in found for value in getattr(piece, name)] == getattr(whole, name)


def test_a_token_behind_bytes_that_become_no_character_begins_behind_their_mark() -> None:
    begun, line = (
        DEMO.encode("世", add_special_tokens=False)[0],
        DEMO.encode("\n", add_special_tokens=False)[0],
    )
    ids = [line, begun, line, begun, begun, line]
    told = writer().write(ids, [entry(token_id) for token_id in ids])
    text = DEMO.decode(ids)
    assert text == "\n\ufffd\n\ufffd\ufffd\n"
    assert told.text_offset == [0, 1, 2, 3, 3, 5]
    assert all(
        text[at] == "\n" for at, name in zip(told.text_offset, told.tokens, strict=True) if name == "\n"
    )


@pytest.mark.parametrize(("skip", "room"), [(True, 0), (False, len(DEMO.token_bytes(SPECIAL)))])
def test_a_token_takes_as_much_room_as_it_has_text(skip: bool, room: int) -> None:
    first, second = IDS[0], IDS[1]
    told = writer(skip=skip).write([first, SPECIAL, second], [None, entry(SPECIAL), entry(second)])
    length = len(DEMO.token_bytes(first).decode())
    assert told.text_offset == [0, length, length + room]
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)


def test_no_token_of_an_echo_begins_behind_it() -> None:
    told = writer(end=3).write(IDS, [entry(token_id) for token_id in IDS])
    assert max(told.text_offset) == 3


def test_as_many_likeliest_are_told_as_were_asked_for_and_the_tokens_own() -> None:
    own = DEMO.token_bytes(IDS[0]).decode()
    assert writer(num_top=0).write(IDS[:1], [entry(IDS[0])]).top_logprobs == [{own: -1.5}]
    other = next(iter(writer(num_top=1).write(IDS[:1], [entry(IDS[0])]).top_logprobs[0] or {}))
    assert other != own
    assert writer().write(IDS[:1], [entry(IDS[0])]).top_logprobs == [{other: -0.5, own: -1.5}]
