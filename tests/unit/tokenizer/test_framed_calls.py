"""Calls whose arguments stand between marks: each form, typed by schemas, whole and in any pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tokenizer.argument_types import ArgumentTypes, json_argument
from penstock.tokenizer.call_writer import written_calls
from penstock.tokenizer.form_table import TOOL_FORMATS
from penstock.tokenizer.literals import json_of_literal
from penstock.tokenizer.model_syntax import ModelSyntax
from penstock.tokenizer.pieces import Piece
from penstock.tokenizer.tool_calls import ToolCallParser
from penstock.tokenizer.tool_grammar import CallTask, call_grammar

FORMS = {form.name: form for form in TOOL_FORMATS}
FRAMED = [form.name for form in TOOL_FORMATS if form.frame is not None]
SCHEMAS: dict[str, Any] = {
    "look": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "b": {"type": "boolean"},
            "o": {"type": "object"},
            "l": {"type": "array"},
            "m": {"type": ["string", "null"]},
            "r": {"$ref": "#/$defs/kind"},
        },
        "$defs": {"kind": {"enum": ["1", "2"]}},
    },
    "now": None,
}

Found = tuple[str, list[tuple[str, str, str]], list[str]]


def parse(form: str, chunks: Sequence[str]) -> Found:
    """The content, each call's name, arguments and id, and what is broken."""
    parser = ToolCallParser(FORMS[form], frozenset(SCHEMAS), SCHEMAS)
    pieces: list[Piece] = [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish()
    content, calls, broken = "", [], []
    for piece in pieces:
        if piece.kind == "content":
            content += piece.text
        elif piece.kind == "call":
            calls.append((piece.text, "", piece.id))
        elif piece.kind == "arguments":
            name, arguments, id_ = calls[-1]
            calls[-1] = (name, arguments + piece.text, id_)
        else:
            broken.append(piece.text)
    assert parser.num_sound == len(calls) - len(broken)
    return content, calls, broken


def arguments_in(form: str, text: str) -> list[Any]:
    content, calls, broken = parse(form, [text])
    assert (content, broken) == ("", []), text
    return [json.loads(arguments) for _, arguments, _ in calls]


XML = "<tool_call>\n<function=look>\n{}</function>\n</tool_call>"
ELEMENTS = "".join(
    f"]<]minimax[>[{part}"
    for part in (
        *("<tool_call>\n", '<invoke name="look">', "<o>", "<x>1.5", "</x>", "<l>", "<item><b>", "</item>"),
        *("<item>2", "</item>", "</l>", "</o>", "<l>", "</l>", "<s>&lt; <a>", "</s>", "</invoke>\n"),
        "</tool_call>",
    )
)
TEXTS = [
    ("qwen3_coder", XML.format("<parameter=s>\n5\n</parameter>\n<parameter=n>\n5\n</parameter>\n")),
    ("qwen3_coder", "<function=look>\n<parameter=s>\n<a></para\n\n</parameter>\n</function>"),
    (
        "qwen3_coder",
        "So.\n" + XML.format("") + "\n<tool_call>\n<function=now>\n</function>\n</tool_call> then",
    ),
    ("qwen3_coder", XML.format("<parameter=s>\nno end")),
    ("qwen3_coder", XML.format("<parameter=s>\nx\n</parameter>\n but text")),
    ("seed_oss", "<seed:tool_call><function=look><parameter=s>\n5\n</parameter></function></seed:tool_call>"),
    (
        "glm45",
        "<tool_call>look<arg_key>s</arg_key><arg_value>a</arg_value></tool_call><tool_call>now</tool_call>",
    ),
    ("glm45", "<tool_call>look at this</tool_call>"),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="b">True</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="look">'
        '<｜DSML｜parameter name="z" string="true">5</｜DSML｜parameter>'
        '<｜DSML｜parameter name="y" string="false">5</｜DSML｜parameter></｜DSML｜invoke>'
        "</｜DSML｜function_calls>",
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"s": "`"}\n```\n'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"s": oops}<｜tool▁call▁end｜>',
    ),
    (
        "kimi_k2",
        "I.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:3<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>look<|tool_call_argument_begin|>{}<|tool_c"),
    ("harmony", '<|channel|>commentary to=functions.look<|message|>{"s": "<"}<|call|>'),
    ("gemma4", '<|tool_call>call:look{s:<|"|>"<|<|"|>,o:{k:[1,-2.5,null,<|"|><|"|>]},b:true}<tool_call|>'),
    ("gemma4", "<|tool_call>call:look{s:<|x"),
    ("lfm2", """<|tool_call_start|>[look(s='it\\'s', o={"a":0}), now()]<|tool_call_end|>"""),
    ("lfm2", "<|tool_call_start|>[look(s=oops)]<|tool_call_end|>"),
    ("olmo3", '<function_calls>\nlook(s="\\u00e9\\n", l=[True, (1, 2)])\nnow()\n</function_calls>'),
    ("functionary_v3", '<function=look>{"s": "x"}</function><function=now>{}</function>'),
    ("minimax_m3", ELEMENTS),
    ("minimax_m3", ELEMENTS.partition("]<]minimax[>[</x>")[0]),
    (
        "minicpm5",
        '<function name="look"><param name="s"><![CDATA[a[0]]]></param><param name="m"><![CDATA</param>'
        '<param name="b">True</param></function>\n<function name="now"></function>',
    ),
    (
        "hunyuan",
        "<tool_calls:opensource>\n<tool_call:opensource>look<tool_sep:opensource>\n<arg_key:opensource>n"
        "</arg_key:opensource>\n<arg_value:opensource>4</arg_value:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
    ),
    (
        "kimi_k3",
        'So.<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="z" '
        'type="string"<|sep|>5<|close|>argument<|sep|><|open|>argument key="y" type="number"<|sep|>5'
        '<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    (
        "solar",
        '<|tool_calls|><|tool_call:begin|>ab-1<|tool_call:name|>look<|tool_call:args|>{"n": 1}'
        "<|tool_call:end|><|tool_call:begin|>ab-2<|tool_call:name|>now<|tool_call:args|>{}"
        "<|tool_call:end|><|calls|>",
    ),
    ("apertus", '<|tools_prefix|>[{"look": {"o": {"a": 1}}}, {"now": {}}]<|tools_suffix|>'),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    ),
    (
        "muse",
        '<atem:function_calls>\n<atem:invoke name="look">\n<atem:parameter name="n">4</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>",
    ),
    ("pythonic", """[look(s='[1]', n=2), now()]"""),
    ("pythonic", "[other(s=1)]"),
    ("pythonic", "[1] says so."),
    ("pythonic", "<|python_start|>[now()]<|python_end|>"),
]


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_no_cut_changes_what_is_found(form: str, text: str) -> None:
    whole = parse(form, [text])
    assert parse(form, list(text)) == whole
    for at in range(len(text)):
        assert parse(form, [text[:at], text[at:]]) == whole


@pytest.mark.parametrize("form", FRAMED)
def test_what_is_written_is_read(form: str) -> None:
    arguments = {
        "s": ' a\n"b" \\ <c> é',
        "n": 3,
        "x": 0.5,
        "b": False,
        "o": {"k": [1, None]},
        "l": [],
        "r": "2",
    }
    calls = [("look", arguments), ("now", {})]
    text = written_calls(FORMS[form], calls)
    before = "" if FORMS[form].is_bare else "Well."
    content, found, broken = parse(form, list(f"{before} {text}\nThen."))
    assert [(name, json.loads(given)) for name, given, _ in found] == calls
    assert (content, broken) == (f"{before}Then.", [])


@pytest.mark.parametrize(
    ("value", "types", "expected"),
    [
        ("5", {"string"}, "5"),
        ("5", {"integer"}, 5),
        ("5.0", {"integer"}, 5.0),
        (" 5 ", {"number"}, 5),
        ("five", {"integer"}, "five"),
        ("True", {"boolean"}, True),
        ("1", {"boolean"}, "1"),
        ("None", {"string", "null"}, None),
        ("no", {"string", "null"}, "no"),
        ("5", {"string", "null"}, "5"),
        ('{"a": 1}', {"object"}, {"a": 1}),
        ("{'a': [1, True]}", {"object"}, {"a": [1, True]}),
        ("{'a': oops}", {"object"}, "{'a': oops}"),
        ("[1", {"array"}, "[1"),
        ('{"a": 1}', {"string"}, '{"a": 1}'),
        ("[1]", set(), [1]),
        ("00501", set(), "00501"),
        ("", {"integer"}, ""),
        ('"x"', set(), '"x"'),
    ],
)
def test_text_becomes_what_its_schema_says(value: str, types: set[str], expected: Any) -> None:
    assert json.loads(json_argument(value, frozenset(types))) == expected
    assert type(json.loads(json_argument(value, frozenset(types)))) is type(expected)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}, {"string", "integer"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"allOf": [{"description": "x"}, {"type": "array"}]}, {"array"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/$defs/none"}, set()),
        ({"$ref": "elsewhere.json"}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_types_are_those_that_a_schema_declares(schema: Any, types: set[str]) -> None:
    root = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert ArgumentTypes(root).of(schema) == types


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("1e999", {"number"}),
        ("-1e999", {"integer", "null"}),
        ("[1e999]", {"array"}),
        ("['\\ud800']", {"array"}),
        ("{'a': 1e999}", set()),
    ],
)
def test_a_value_that_no_decoder_takes_stays_the_text_that_it_is(text: str, types: set[str]) -> None:
    assert json.loads(json_argument(text, frozenset(types))) == text


class CountedDefinitions(dict[str, Any]):
    """Definitions that count how often one of them is looked up."""

    num_lookups = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.num_lookups += 1
        return super().get(key, default)


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_definitions_that_name_each_other_often_are_read_once_each(keyword: str) -> None:
    definitions = CountedDefinitions(
        {f"d{depth}": {keyword: [{"$ref": f"#/$defs/d{depth + 1}"} for _ in range(9)]} for depth in range(3)}
    )
    definitions["d3"] = {"type": "string"}
    assert ArgumentTypes({"$defs": definitions}).of({"$ref": "#/$defs/d0"}) == {"string"}
    assert definitions.num_lookups <= 1 + 3 * 9, "and not 9 * 9 * 9"


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "minimax_m3", "gemma4", "lfm2"])
def test_a_definition_that_many_arguments_refer_to_is_read_once(form: str) -> None:
    """For the grammar of a call, and for a call in which each argument has a value."""
    definitions = CountedDefinitions(
        any={"anyOf": [{"$ref": "#/$defs/part"} for _ in range(40)]}, part={"type": "integer"}
    )
    properties = {f"a{number}": {"$ref": "#/$defs/any"} for number in range(40)}
    schemas = {"look": {"$defs": definitions, "properties": properties}}
    call_grammar(CallTask(schemas=schemas), ModelSyntax(tools=FORMS[form]))
    assert 0 < definitions.num_lookups <= 40 + 40, "and not 40 * 40"
    definitions.num_lookups = 0
    values = {key: number for number, key in enumerate(properties)}
    parser = ToolCallParser(FORMS[form], frozenset(schemas), schemas)
    pieces = [*parser.feed(written_calls(FORMS[form], [("look", values)])), *parser.finish()]
    assert json.loads("".join(piece.text for piece in pieces if piece.kind == "arguments")) == values
    assert definitions.num_lookups <= 40 + 40


def test_arguments_between_tags_are_typed() -> None:
    text = "<tool_call>look" + "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in (("s", "7"), ("n", "7"), ("m", "null"), ("r", "1"), ("b", "true"), ("else", "7"))
    )
    assert arguments_in("glm45", text + "</tool_call>") == [
        {"s": "7", "n": 7, "m": None, "r": "1", "b": True, "else": 7}
    ]
    by_tag = dict(TEXTS)["deepseek_v32"]
    assert arguments_in("deepseek_v32", by_tag) == [{"z": "5", "y": 5}]


def test_objects_and_lists_are_tags_within_tags() -> None:
    assert arguments_in("minimax_m3", ELEMENTS) == [
        {"o": {"x": 1.5, "l": ["<b>", 2]}, "l": [], "s": "&lt; <a>"}
    ]


def test_marks_around_a_text_are_no_part_of_it() -> None:
    text = dict(TEXTS)["minicpm5"]
    assert arguments_in("minicpm5", text) == [{"s": "a[0]", "m": "<![CDATA", "b": True}, {}]


def test_ids_numbers_and_types_that_stand_in_marks_are_read() -> None:
    content, calls, _ = parse("solar", [dict(TEXTS)["solar"]])
    assert [id_ for _, _, id_ in calls] == ["ab-1", "ab-2"]
    content, calls, _ = parse("kimi_k3", [dict(TEXTS)["kimi_k3"]])
    assert (content, [json.loads(arguments) for _, arguments, _ in calls]) == (
        "So.",
        [{"z": "5", "y": 5}, {}],
    )


def test_calls_without_a_marker_are_those_of_the_tools_at_the_start() -> None:
    assert arguments_in("pythonic", """[look(s='[1]', n=2), now()]""") == [{"s": "[1]", "n": 2}, {}]
    assert arguments_in("pythonic", "<|python_start|>[now()]<|python_end|>") == [{}]
    for text in ("[other(s=1)]", "[1] says so.", "See [now()]."):
        assert parse("pythonic", [text]) == (text, [], [])


def test_ends_that_are_missing_are_forgiven() -> None:
    for form in FRAMED:
        frame = FORMS[form].frame
        assert frame is not None
        end = frame.section_end or (frame.call_end if frame.body == "json" else "")
        text = written_calls(FORMS[form], [("look", {"n": 1})]).removesuffix(end)
        assert arguments_in(form, text) == [{"n": 1}]
        content, calls, broken = parse(form, [f"{text}Then." if end else text])
        assert (content, len(calls), broken) == ("Then." if end else "", 1, [])


def test_a_call_that_breaks_off_is_broken_and_what_is_none_is_content() -> None:
    assert parse("glm45", ["<tool_call>look at this</tool_call>"])[0] == "<tool_call>look at this</tool_call>"
    text = XML.format("<parameter=s>\nx\n</parameter>\n but text")
    content, calls, broken = parse("qwen3_coder", [text])
    assert broken == [text[: text.index("but")].rstrip()] or broken == [text[: text.index("but")]]
    assert len(calls) == 1
    assert content.startswith("but text")
    for form, cut in (
        ("gemma4", "<|tool_call>call:look{s:<|x"),
        ("qwen3_coder", XML.split("{", maxsplit=1)[0]),
    ):
        content, calls, broken = parse(form, [cut])
        assert "".join([*broken, content]) == cut


def test_strings_are_given_as_they_come() -> None:
    parser = ToolCallParser(FORMS["qwen3_coder"], frozenset(SCHEMAS), SCHEMAS)
    assert parser.feed("<tool_call>\n<function=look>\n<parameter=s") == [Piece("call", "look")]
    assert parser.feed(">\nline") == [Piece("arguments", '{"s": "line')]
    assert parser.feed("\n</par") == []
    assert parser.feed("ty\n") == [Piece("arguments", "\\n</party")]
    assert parser.feed("</parameter>\n</function>\n</tool_call>") == [Piece("arguments", '"}')]


WORDS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=", "look", ">", "<parameter=", "s", "n", "</parameter>"),
        *("</function>", "\n", "5", "{", "}", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", " "),
        *(
            "<|tool_call_start|>[",
            "(",
            ")",
            "=",
            "'",
            '"',
            ",",
            "]<|tool_call_end|>",
            "<|tool_call>call:",
            ":",
        ),
        *(
            '<|"|>',
            "<tool_call|>",
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
        ),
        *("<|tool_call_argument_begin|>", "{}", "\\", "[", "é", "\0"),
    ]
)
DRAWN = ["qwen3_coder", "glm45", "kimi_k2", "gemma4", "lfm2", "minicpm5"]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.sampled_from(DRAWN), st.lists(WORDS, max_size=16), st.data())
def test_any_text_in_any_pieces_is_the_same_and_nothing_of_it_is_lost(
    form: str, words: list[str], data: st.DataObject
) -> None:
    text = FORMS[form].opening + "".join(words)
    whole = parse(form, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert parse(form, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    if not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize(
    "value", [1, -2.5, 'it\'s "x" \\ \n é \x01', [1, [None, True]], {"a": {"b": [""]}}, []]
)
def test_literals_of_python_become_json(value: Any) -> None:
    assert json.loads(json_of_literal(repr(value))) == value


@pytest.mark.parametrize(
    "text", ["", "{", "oops", "[1", "[1] 2", "{'a'}", "'x", "[1,,2]", "[" * 100, "nan", "'\\xzz'"]
)
def test_what_is_no_literal_is_none(text: str) -> None:
    assert json_of_literal(text) == ""
