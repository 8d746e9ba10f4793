"""Calls of tools in text: each family's form, every way of cutting it, and text that is no call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tokenizer.call_reader import CallReader
from penstock.tokenizer.form_table import TOOL_FORMATS
from penstock.tokenizer.pieces import Piece
from penstock.tokenizer.tool_calls import MarkerFinder, ToolCallParser
from penstock.tokenizer.tool_formats import ToolFormat

FORMS = {form.name: form for form in TOOL_FORMATS}
NAMES = frozenset({"look", "add"})

Pieces = list[tuple[str, str]]


def parse(form: str, chunks: Sequence[str]) -> tuple[Pieces, int]:
    """What the chunks bring, runs of the same kind joined, and the number of sound calls."""
    parser = ToolCallParser(FORMS[form], NAMES)
    pieces: list[Piece] = []
    for chunk in chunks:
        pieces += parser.feed(chunk)
    pieces += parser.finish()
    joined: Pieces = []
    for piece in pieces:
        if joined and joined[-1][0] == piece.kind in ("content", "arguments"):
            joined[-1] = (piece.kind, joined[-1][1] + piece.text)
        else:
            joined.append((piece.kind, piece.text))
    return joined, parser.num_sound


def call(name: str, arguments: str) -> Pieces:
    return [("call", name), ("arguments", arguments)]


def content(text: str) -> Pieces:
    return [("content", text)]


CALLS: list[tuple[str, str, Pieces]] = [
    # as each family writes one
    (
        "hermes",
        '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>',
        call("look", '{"a": 1}'),
    ),
    ("llama3_json", '{"name": "look", "parameters": {"a": 1}}', call("look", '{"a": 1}')),
    ("llama3_json", '<|python_tag|>{"name": "look", "parameters": {}}', call("look", "{}")),
    ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {"a": [1]}}]', call("look", '{"a": [1]}')),
    ("mistral_args", '[TOOL_CALLS]look[ARGS]{"a": {"b": 2}}', call("look", '{"a": {"b": 2}}')),
    ("json", '{"name": "look", "arguments": {"a": null}}', call("look", '{"a": null}')),
    (
        "minimax_m1",
        '<tool_calls>\n{"name": "look", "arguments": {}}\n{"name": "now", "arguments": {}}\n</tool_calls>',
        [*call("look", "{}"), *call("now", "{}")],
    ),
    # several
    (
        "hermes",
        'I look.\n\n<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
        [*content("I look."), *call("look", '{"q": "x"}'), *call("add", "{}")],
    ),
    (
        "mistral",
        'Yes.[TOOL_CALLS][{"name": "look", "arguments": {}, "id": "abcdefghi"},'
        ' {"name": "add", "arguments": {}}]',
        [*content("Yes."), *call("look", "{}"), *call("add", "{}")],
    ),
    (
        "mistral_args",
        "[TOOL_CALLS]look[ARGS]{}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{}",
        [*call("look", "{}"), *call("add", "{}")],
    ),
    (
        "llama3_json",
        '{"name": "look", "parameters": {}}; {"name": "add", "parameters": {}}',
        [*call("look", "{}"), *call("add", "{}")],
    ),
    (
        "json",
        ' [{"name": "look", "arguments": {}},\n{"name": "add", "arguments": {}}]\n',
        [*call("look", "{}"), *call("add", "{}")],
    ),
    # what models do besides
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "look"}</tool_call>', call("look", '{"a": 1}')),
    (
        "hermes",
        '<tool_call>{"name": "look", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call("look", '{"a": 1}'),
    ),
    ("hermes", '<tool_call>{"name": "look"}</tool_call>', call("look", "{}")),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"a": 1}</tool_call>', call("look", '{"a": 1}')),
    ("hermes", '<tool_call>\n{"name": "look", "arguments": {}}', call("look", "{}")),
    (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {}}\n<tool_call>{"name": "add", "arguments": {}}',
        [*call("look", "{}"), *call("add", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "look", "arguments": {}}\n</tool', call("look", "{}")),
    (
        "llama3_json",
        'Sure. <|python_tag|>{"type": "function", "name": "look", "parameters": {}}',
        [*content("Sure."), *call("look", "{}")],
    ),
    ("mistral_args", '[TOOL_CALLS]look{"a": 1}', call("look", '{"a": 1}')),
    ("mistral", "[TOOL_CALLS]look[ARGS]{}", call("look", "{}")),
    # markers and brackets within strings are text
    (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"a": "}\\"</tool_call>]\\\\"}}</tool_call> end',
        [*call("look", '{"a": "}\\"</tool_call>]\\\\"}'), *content("end")],
    ),
    # behind a marker any name is a call: the client can say that there is no such tool
    ("hermes", '<tool_call>{"name": "no-tool", "arguments": {}}</tool_call>', call("no-tool", "{}")),
]

NO_CALLS = [
    ("hermes", "Nothing here, 1 < 2 and <tool> and <tool_cal l>"),
    ("hermes", "cut <tool_cal"),
    ("hermes", "a closing </tool_call> alone"),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call> I would call it like this </tool_call>"),
    ("hermes", '<tool_call>{"name": "look", "argum'),
    ("hermes", '<tool_call>{"name": "bad name", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": 7}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": "seven"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "why": "x", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"na\nme": "look"}</tool_call>'),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", '{"name": "look", "arguments": {}}'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] [look]"),
    ("mistral_args", "[TOOL_CALLS]look at this"),
    ("mistral_args", "[TOOL_CALLS]look[ARGS"),
    ("mistral_args", '[TOOL_CALLS] [{"name": "look", "arguments": {}}]'),
    ("mistral_args", "[TOOL_CALLS]" + "x" * 65 + "[ARGS]{}"),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3_json", '{"name": "Anna", "parameters": {}}'),
    ("llama3_json", '{"name": "Anna", "age": 7}'),
    ("llama3_json", 'It is {"name": "look", "parameters": {}}'),
    ("json", '{"answer": [1, 2]}'),
    ("json", "[1, 2]"),
    ("json", ' {"name": "look"'),
    ("json", "[link](x)"),
]

BROKEN = [
    ("hermes", '<tool_call>{"name": "look", "arguments": {"a": "b'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"a": yes}'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"a": yes}}'),
    ("hermes", '<tool_call>\n{"name": "look", "arguments": {"a": yes}}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"a": yes} </tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"a": yes}, "id": "x" }\n\n</tool_c'),
    ("hermes", '<tool_call>[{"name": "look", "arguments": {"a": yes}} ]</tool_call>'),
    ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {"a": yes}}]'),
    ("mistral_args", "[TOOL_CALLS]look[ARGS]{'a': 1}"),
    ("json", ' {"name": "look", "arguments": {'),
]


@pytest.mark.parametrize(("form", "text", "expected"), CALLS)
def test_calls_are_found_in_each_familys_form(form: str, text: str, expected: Pieces) -> None:
    found, num_sound = parse(form, [text])
    assert found == expected
    assert num_sound == sum(kind == "call" for kind, _ in expected)


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_text_that_is_no_call_is_content_word_for_word(form: str, text: str) -> None:
    assert parse(form, [text]) == (content(text), 0)


@pytest.mark.parametrize(("form", "text"), BROKEN)
def test_a_call_that_is_not_sound_can_be_given_as_its_text(form: str, text: str) -> None:
    found, num_sound = parse(form, [text])
    assert [kind for kind, _ in found] == ["call", "arguments", "broken"]
    assert found[-1][1] == text
    assert found[1][1] in text
    assert num_sound == 0


def whole_text(pieces: Pieces) -> str:
    """What who shows nothing as it comes makes of them; calls that are sound are left out."""
    shown: list[str] = []
    for kind, text in pieces:
        if kind == "broken":
            shown = shown[: len(shown) - 1 - shown[::-1].index("\0")]
        shown.append("\0" if kind == "call" else "" if kind == "arguments" else text)
    return "".join(shown)


BAD = '{"name": "look", "arguments": {"a": yes}}'
GOOD = '{"name": "add", "arguments": {"n": 1}}'


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *BROKEN,
        ("hermes", f"So:\n<tool_call>\n{BAD}\n</tool_call>\n\nI am done.\n"),
        ("hermes", f"<tool_call>{BAD} and {BAD}</tool_call> </tool_call>"),
        ("hermes", f"<tool_call>{BAD}}}</tool_call>  <tool_call>{BAD}</tool_call>"),
        ("hermes", f"<tool_call>{BAD}\n</tool\n</tool_call>"),
        ("mistral", f"[TOOL_CALLS] [{BAD}, {BAD}] ok"),
        ("mistral", f"[TOOL_CALLS] [{BAD}, {{no}}] ok"),
        ("json", f" [{BAD}, {BAD} ] ok"),
        ("json", f"{BAD}; {BAD}; ok"),
        ("json", f"{BAD} \n ok"),
        ("llama3_json", "<|python_tag|>" + BAD.replace("arguments", "parameters") + " \n"),
        ("mistral_args", "[TOOL_CALLS]look[ARGS]{yes}[TOOL_CALLS]look[ARGS]{no} ok"),
    ],
)
def test_all_of_a_text_without_a_sound_call_is_content_however_it_is_cut(form: str, text: str) -> None:
    expected, num_sound = parse(form, [text])
    assert (whole_text(expected), num_sound) == (text, 0)
    assert parse(form, list(text))[0] == expected
    for at in range(len(text)):
        assert parse(form, [text[:at], text[at:]])[0] == expected


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (
            "hermes",
            f"<tool_call>{BAD}</tool_call>\n<tool_call>{GOOD}</tool_call>",
            [
                *call("look", '{"a": yes}'),
                ("broken", f"<tool_call>{BAD}</tool_call>"),
                *call("add", '{"n": 1}'),
            ],
        ),
        (
            "mistral",
            f"[TOOL_CALLS] [{BAD}, {GOOD}]",
            [*call("look", '{"a": yes}'), ("broken", f"[TOOL_CALLS] [{BAD}, "), *call("add", '{"n": 1}')],
        ),
        (
            "json",
            f"[{GOOD}, {BAD}] ok",
            [*call("add", '{"n": 1}'), *call("look", '{"a": yes}'), ("broken", f", {BAD}]"), *content(" ok")],
        ),
    ],
)
def test_a_call_that_is_not_sound_beside_one_that_is(form: str, text: str, expected: Pieces) -> None:
    for chunks in ([text], list(text)):
        assert parse(form, chunks) == (expected, 1)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        # the rest of a call whose arguments are done
        ("hermes", '<tool_call>{"name": "look"}}</tool_call> ok', [*call("look", "{}"), *content("}ok")]),
        (
            "json",
            '{"name": "look", "arguments": {}}, and so on',
            [*call("look", "{}"), *content(", and so on")],
        ),
        ("json", '[{"name": "look", "arguments": {}}, {"na', [*call("look", "{}"), *content(', {"na')]),
        # a call behind what was none
        (
            "hermes",
            '<tool_call><tool_call>{"name": "add", "arguments": {}}</tool_call>',
            [*content("<tool_call>"), *call("add", "{}")],
        ),
        (
            "llama3_json",
            '{"a": 1}<|python_tag|>{"name": "x", "parameters": {}}',
            [*content('{"a": 1}'), *call("x", "{}")],
        ),
    ],
)
def test_calls_beside_text(form: str, text: str, expected: Pieces) -> None:
    assert parse(form, [text])[0] == expected


ALL = [(form, text) for form, text, _ in CALLS] + NO_CALLS + BROKEN


@pytest.mark.parametrize(("form", "text"), ALL)
def test_no_cut_changes_what_is_found(form: str, text: str) -> None:
    expected = parse(form, [text])
    assert parse(form, list(text)) == expected
    for at in range(len(text)):
        assert parse(form, [text[:at], text[at:]]) == expected


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[CALL_ID]"),
        *(
            '{"name": "look", ',
            '"arguments": ',
            '"parameters": ',
            '{"a": 1}',
            "}",
            "{",
            "[",
            "]",
            ",",
            ";",
            '"',
        ),
        *("look", " ", "\n", "\\", ":", "text", "<", "é👋"),
    ]
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FORMS)), st.lists(FRAGMENTS, max_size=14), st.data())
def test_any_text_in_any_pieces_is_the_same_and_nothing_of_it_is_lost(
    form: str, fragments: list[str], data: st.DataObject
) -> None:
    text = "".join(fragments)
    whole = parse(form, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(form, chunks) == whole
    if not any(kind == "call" for kind, _ in whole[0]):
        assert whole[0] == (content(text) if text else [])


def test_arguments_are_given_as_they_come() -> None:
    parser = ToolCallParser(FORMS["hermes"], NAMES)
    assert parser.feed('Hm <tool_call>{"name": "look", "arguments":') == [Piece("content", "Hm")]
    assert parser.feed(' {"a') == [Piece("call", "look"), Piece("arguments", '{"a')]
    assert parser.feed('": 1') == [Piece("arguments", '": 1')]
    assert parser.feed("}}") == [Piece("arguments", "}")]
    assert parser.feed("\n</tool_call>") == []
    assert parser.finish() == []


def test_json_that_is_no_call_is_not_held_back() -> None:
    parser = ToolCallParser(FORMS["json"], NAMES)
    assert parser.feed('{"answer": ') == []  # it may be a call up to its first key
    assert parser.feed("7") == [Piece("content", '{"answer": 7')]
    assert parser.feed(", 8") == [Piece("content", ", 8", 12)]


def test_long_hostile_text_takes_time_in_proportion() -> None:
    """Each character is looked at a bounded number of times, whatever is repeated."""
    for form, unit in (
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "'),
        ("mistral_args", "[TOOL_CALLS]x["),
    ):
        parser = CountingParser(FORMS[form], NAMES)
        text = unit * 2000
        for at in range(0, len(text), 7):
            parser.feed(text[at : at + 7])
        parser.finish()
        assert parser.num_read <= 2 * len(text)


@pytest.mark.parametrize(
    ("form", "unit"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "</tool_call>"),
        ("hermes", "<tool_call></tool_call> "),
        ("hermes", f"<tool_call>{BAD}"),
        ("hermes", f"<tool_call>{GOOD}</tool_call>\n"),
        ("hermes", "\n"),
        ("hermes", "<tool_"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral_args", "[TOOL_CALLS]x"),
        ("llama3_json", "<|python_tag|>"),
        ("json", " "),
    ],
)
def test_markers_are_found_by_work_in_proportion_to_the_text(form: str, unit: str) -> None:
    """In one piece, and in pieces that end within markers. Who looks at each marker through the rest of the
    text, or through what was held back, has four times the work for twice the text."""
    for count in (1500, 3000):
        for size in (len(unit) * count, 13):
            parser, text = CountingParser(FORMS[form], NAMES), unit * count
            for at in range(0, len(text), size):
                parser.feed(text[at : at + size])
            parser.finish()
            assert parser.num_scanned <= 6 * len(text)
            assert parser.num_read <= len(text)


class CountingParser(ToolCallParser):
    num_read = 0

    def __init__(self, form: ToolFormat, names: frozenset[str]) -> None:
        super().__init__(form, names)
        self._finders: list[MarkerFinder] = []

    @property
    def num_scanned(self) -> int:
        return sum(finder.num_scanned for finder in self._finders)

    def _markers_in(self, text: str) -> MarkerFinder:
        self._finders.append(super()._markers_in(text))
        return self._finders[-1]

    def _read(self, reader: CallReader, text: str, pos: int) -> int:
        end = super()._read(reader, text, pos)
        self.num_read += end - pos
        return end
