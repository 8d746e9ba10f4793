"""Grammars for texts in a string of JSON: they take the same texts as the grammars that they are made of."""

from __future__ import annotations

import json

import pytest

from fake_engine import DEMO
from penstock.errors import InvalidRequestError
from penstock.grammar.matcher import Matcher, Vocabulary, load_vocabulary
from penstock.request import StructuredOutputs
from penstock.server.openai.quoted_lark import lark_of_regex, quoted_lark
from penstock.tokenizer.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(DEMO.directory)
PATCH = r"""
start: begin hunk+ end_patch  // as a tool for patches has it
begin: "*** Begin" LF
end_patch: "*** End" LF?
hunk: "*** File: " filename LF line+
filename: /(.+)/
line: ("+" | "-" | " ") /(.*)/ LF -> change
%import common.LF
"""
SUM = r"""
?start: sum
sum: product ("+" product)*
product: factor | product "*" factor
factor: NUMBER | "(" sum ")"
%import common.NUMBER
%import common.WS -> SPACE
%ignore SPACE
"""
WORDS = r"""
start: "SELECT"i " " (NAME~2..3 | [QUOTED])
NAME: /[a-z]/ "\\"
QUOTED: "\"" /[^"]*/ "\"" | /\s\x7B\u{e9}/
"""
CASES = [
    (PATCH, '*** Begin\n*** File: a"b\n+print("\\n")\n-\té\n*** End', True),
    (PATCH, "*** Begin\n*** File: a\n+b\n*** File: c\n d\n*** End\n", True),
    (PATCH, "*** Begin\n*** File: a\n*** End", False),
    (PATCH, "*** Begin *** File: a\n+b\n*** End", False),
    (SUM, "(1 +\n2)\t* 3", True),
    (SUM, "(1 + 2", False),
    (WORDS, "SeLect a\\b\\", True),
    (WORDS, 'select "a\nb"', True),
    (WORDS, "select \n{é", True),
    (WORDS, "select a\\", False),
    (lark_of_regex(r'a/[^"\n]+\S"?\d'), 'a/b\\c"1', True),
    (lark_of_regex(r'a/[^"\n]+\S"?\d'), "a/b\nc1", False),
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(DEMO.directory, DEMO.eos_token_ids)


def takes(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    """Whether the text, and no less of it, is one of the grammar."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    matcher = Matcher(vocabulary, StructuredOutputs(grammar=grammar))
    assert not matcher.error
    return matcher.num_allowed([*tokens, DEMO.eos_token_ids[0]]) == len(tokens) + 1


@pytest.mark.parametrize(("grammar", "text", "fits"), CASES, ids=lambda value: repr(value)[:24])
def test_a_text_fits_as_it_is_and_in_a_string_of_json(
    vocabulary: Vocabulary, grammar: str, text: str, fits: bool
) -> None:
    assert takes(vocabulary, f"start: inner\ninner: %lark {{\n{grammar}\n}}", text) == fits
    quoted = f'start: "\\"" inner "\\""\ninner: %lark {{\n{quoted_lark(grammar)}\n}}'
    assert takes(vocabulary, quoted, json.dumps(text, ensure_ascii=False)) == fits


@pytest.mark.parametrize(
    ("grammar", "what"),
    [
        ('start: "(" start ")" | /[^)]+/', "a rule that contains itself"),
        ('start: "a"\n%ignore /\\n/', "%ignore"),
        ('begin: "a"', "another first rule"),
        ('start: %json {"type": "object"}', "%json"),
        ("start: <|end|>", "<"),
        ("start: /a/i", "the flags i"),
        ("start: /(?=a)/", "(?"),
        (r"start: /\ba/", r"\b"),
        (r"start: /\p{L}/", r"\p"),
        ("start: /[a&&b]/", "[a&&b]"),
        ("start: /[z-a]/", "[z-a]"),
        (r"start: /\x01/", "the control character"),
        ('start: "a"\nUNUSED: /\\x{FFFFFF}/', r"\x{FFFFFF}, which is not a character"),
        ('start: "a"\nUNUSED: /\\uD800/', r"\uD800, which is not a character"),
        ("start: /" + "[" * 20_000 + "/", "the class [["),
        (r'start: "\q"', "the text"),
        ("start: ESCAPED_STRING\n%import common.ESCAPED_STRING", "%import common.ESCAPED_STRING"),
        ("start: 'a'", "'"),
    ],
)
def test_what_cannot_be_written_anew_is_refused_by_name(grammar: str, what: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        quoted_lark(grammar)
    assert what in refused.value.message
