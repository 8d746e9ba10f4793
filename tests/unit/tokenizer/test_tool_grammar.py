"""Grammars of calls, by the library that enforces them: what they let through is what the parser reads."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.errors import InvalidRequestError
from penstock.request import StructuredOutputs
from penstock.tokenizer import tool_grammar
from penstock.tokenizer.call_writer import written_calls
from penstock.tokenizer.detokenizer import byte_level_alphabet
from penstock.tokenizer.form_table import REASONING_FORMATS, TOOL_FORMATS
from penstock.tokenizer.model_syntax import ModelSyntax
from penstock.tokenizer.pieces import Piece
from penstock.tokenizer.reasoning import ReasoningSplitter
from penstock.tokenizer.tool_calls import ToolCallParser
from penstock.tokenizer.tool_grammar import CallTask, call_grammar

EOS = "<|eos|>"
TOKEN = re.compile(r"<[^<>\s=]+>|\[[A-Z_]+\]|｜DSML｜")
MARKERS = tuple(
    dict.fromkeys(
        marker
        for form in (*TOOL_FORMATS, *REASONING_FORMATS)
        for marker in form.markers
        if (TOKEN.fullmatch(marker) and marker not in ("</parameter>", "</function>", "</invoke>"))
        or marker in form.tokens
    )
)
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "look": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    },
    "now": None,
}
# What stands before a text, and before and behind one that a call follows.
SAID = {"harmony": "<|channel|>final<|message|>", "functionary_v32": "all\n", "muse": "<|message|>"}
BEFORE = {
    "harmony": ("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
    "functionary_v32": ("all\n", ">>>"),
    "muse": (" to=self<|message|>", "<|eom|><|start|>assistant"),
}
OWN_REASONING = {"harmony": "harmony", "functionary_v32": "functionary", "muse": "muse"}
# The vocabulary has the markers as tokens, or not; those of harmony and Muse have them always.
WITH_AND_WITHOUT = [
    (form.name, with_markers)
    for form in TOOL_FORMATS
    for with_markers in (True, False)
    if with_markers or form.name not in ("harmony", "muse")
]
FORMS = {form.name: form for form in TOOL_FORMATS}
QWEN = next(form for form in REASONING_FORMATS if form.name == "qwen3")
# One form of each kind, for what takes long.
KINDS = ["mistral_args", "mistral", "hermes", "llama3_json", "json", "qwen3_coder", "kimi_k2", "gemma4"]
BOUND = ["mistral", "hermes", "llama3_json", "json", "qwen3_coder"]
DRAWN = [
    *("mistral_args", "llama3_json", "json", "qwen3_coder", "glm45", "kimi_k2", "gemma4", "lfm2"),
    *("kimi_k3", "solar", "minimax_m1", "minimax_m3", "pythonic"),
]


@cache
def byte_tokenizer(with_markers: bool) -> Tokenizer:
    """A token for each byte, and one for each marker."""
    alphabet = byte_level_alphabet()
    made = Tokenizer(models.BPE(vocab=dict(alphabet), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([EOS])
    if with_markers:
        made.add_tokens([AddedToken(marker, special="[" in marker, normalized=False) for marker in MARKERS])
    return made


class Model:
    """A tokenizer and the forms in which a model with it writes."""

    def __init__(self, tools: str, reasoning: str = "none", *, with_markers: bool = True) -> None:
        self.tokenizer = byte_tokenizer(with_markers)
        self.inner = llguidance.LLTokenizer(self.tokenizer.to_str(), eos_token=256)
        added = {token.content: at for at, token in self.tokenizer.get_added_tokens_decoder().items()}
        reasoning = OWN_REASONING.get(tools, reasoning)
        self.syntax = ModelSyntax(
            tools=FORMS[tools],
            reasoning=next((form for form in REASONING_FORMATS if form.name == reasoning), None),
            marker_ids={marker: added[marker] for marker in MARKERS if marker in added},
        )

    def matcher(self, task: CallTask) -> llguidance.LLMatcher:
        lark = call_grammar(task, self.syntax)
        matcher = llguidance.LLMatcher(self.inner, llguidance.LLMatcher.grammar_from_lark(lark))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, task: CallTask, text: str) -> bool:
        matcher = self.matcher(task)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        num_taken = matcher.try_consume_tokens(ids)
        return num_taken == len(ids) and matcher.is_accepting()

    def sample(self, task: CallTask, seed: int) -> str:
        """A random text of the grammar; it ends where it may, more often than not."""
        matcher, random_, ids = self.matcher(task), random.Random(seed), []
        while not matcher.is_stopped() and len(ids) < 600:
            possible = allowed_ids(matcher)
            allowed = [i for i in possible if self.likes(i)] or possible
            end = 256 in allowed and (len(allowed) == 1 or random_.random() < 0.9)
            chosen = 256 if end else random_.choice([i for i in allowed if i != 256])
            assert matcher.consume_token(chosen)
            if chosen == 256:
                break
            ids.append(chosen)
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    @staticmethod
    def likes(token_id: int) -> bool:
        """Plain text mostly, so that strings end within a reasonable time."""
        return token_id >= 256 or chr(token_id) in ' abe"{}[]:,0123456789\n<>/_;\\'


def allowed_ids(matcher: llguidance.LLMatcher) -> list[int]:
    mask = matcher.compute_bitmask()
    return [i for i in range(len(mask) * 8) if mask[i // 8] >> (i % 8) & 1]


def task(**changes: Any) -> CallTask:
    return CallTask(**({"schemas": SCHEMAS} | changes))


def written(form: str, *calls: tuple[str, str]) -> str:
    """Calls as the family writes them."""
    text = written_calls(FORMS[form], [(name, json.loads(arguments)) for name, arguments in calls])
    if form == "muse":
        return f" to={calls[0][0]}<|message|>{text}"
    if FORMS[form].is_opened:
        return text.removeprefix(FORMS[form].opening)
    if form == "mistral":
        return text.replace("[TOOL_CALLS]", "[TOOL_CALLS] ")
    return text.replace("<|message|>", " <|constrain|>json<|message|>") if form == "harmony" else text


def has_bare_text(form: str) -> bool:
    """Whether a string looks like any other value, so that each text is one."""
    frame = FORMS[form].frame
    return frame is not None and frame.tags is not None and not frame.tags.type_attribute


ONE = ("look", '{"city": "Rome", "days": 3}')
TWO = ("now", "{}")


@pytest.mark.parametrize(("form", "with_markers"), WITH_AND_WITHOUT)
def test_forced_calls_are_those_of_the_tools_and_fit_their_schemas(form: str, with_markers: bool) -> None:
    model = Model(form, with_markers=with_markers)
    assert model.accepts(task(), written(form, ONE))
    assert model.accepts(task(), written(form, TWO))
    for wrong in (
        "",
        "Let me see.",
        "Let me see. " + written(form, ONE),
        written(form, ONE) + " done",
        written(form, ONE)[:-1],
        written(form, ("look", "{}")),
        written(form, ("look", '{"city": "Rome", "days": 10}')),
        *([] if has_bare_text(form) else [written(form, ("look", '{"city": 7}'))]),
        written(form, ("now", '{"city": "Rome"}')),
        written(form, ("other", "{}")),
    ):
        assert not model.accepts(task(), wrong), wrong


@pytest.mark.parametrize("form", FORMS)
def test_several_calls_where_the_family_and_the_request_have_them(form: str) -> None:
    model, both = Model(form), written(form, ONE, TWO)
    assert model.accepts(task(), both) == (not FORMS[form].is_single)
    assert not model.accepts(task(is_single=True), both)
    assert model.accepts(task(is_single=True), written(form, TWO))
    assert not model.accepts(task(schemas={"now": None}), written(form, ONE))


@pytest.mark.parametrize(("form", "with_markers"), WITH_AND_WITHOUT)
def test_calls_that_are_not_forced_leave_text_as_it_is(form: str, with_markers: bool) -> None:
    model = Model(form, with_markers=with_markers)
    free = task(is_forced=False)
    for text in ("", "Let me see.\nRome?"):
        assert model.accepts(free, SAID.get(form, "") + text), text
    assert model.accepts(free, written(form, ONE))
    assert not model.accepts(free, written(form, ("look", "{}")))
    if not FORMS[form].is_bare:
        before, behind = BEFORE.get(form, ("", ""))
        assert model.accepts(free, f"{before}Let me see. {behind}{written(form, ONE)}")


@pytest.mark.parametrize("with_markers", [True, False])
@pytest.mark.parametrize("thinks", ["maybe", "opened"])
def test_reasoning_may_come_before_forced_calls(thinks: str, with_markers: bool) -> None:
    model = Model("hermes", "qwen3", with_markers=with_markers)
    thinking, calls = task(thinks=thinks), written("hermes", ONE)
    thought = 'I look, 1 < 2 {"a"\n</think>\n\n' + calls
    assert model.accepts(thinking, thought if thinks == "opened" else "<think>\n" + thought)
    assert model.accepts(thinking, calls) == (thinks == "maybe")
    assert not model.accepts(thinking, "I look." if thinks == "maybe" else "I look.</think> no")
    assert not model.accepts(task(), "<think>\n" + thought)


OBJECT = StructuredOutputs(json_object=True)
LOOSE = StructuredOutputs(json_object=True, whitespace=True)
PERSON = StructuredOutputs(
    json='{"type":"object","properties":{"name":{"type":"string"},"n":{"type":"integer"}},'
    '"required":["name"],"additionalProperties":false}'
)
LIST = StructuredOutputs(
    json='{"type":"array","items":{"type":"object","properties":{"na":{"type":"integer"}},"required":["na"],'
    '"additionalProperties":false}}'
)
WORDS = StructuredOutputs(choice=["yes", "{x}", "[no]"])
# What fits, and what does not; of an answer in place of calls. Some begin as calls without a marker do.
ANSWERS = [
    (
        OBJECT,
        ["{}", '{"name":3}', '{"name":"look"}', '{"nope":"look","name":1}'],
        ["", "x", "[]", '{"a": 1}'],
    ),
    (PERSON, ['{"name":"look"}', '{"name":"lo","n":3}', '{"name":"lookup"}'], ["{}", '{"name": "lo"}']),
    (LIST, ["[]", '[{"na":3}]', '[{"na":3},{"na":4}]'], ["{}", '[{"name":3}]', '{"na":3}']),
    (WORDS, ["yes", "{x}", "[no]"], ["", "y", '"yes"', "yesyes"]),
    (LOOSE, ["{}", '{ "name":\n"look"}', '{"name": "look", "args": 3}'], ["[]", "{" + " " * 33 + "}"]),
]


def with_spaces_of(text: StructuredOutputs, form: str, calls: str) -> str:
    """Calls without markers have the spaces of the answers that begin as they do."""
    return (
        calls.replace(": ", ":").replace(", ", ",") if FORMS[form].is_bare and not text.whitespace else calls
    )


@pytest.mark.parametrize("with_markers", [True, False])
@pytest.mark.parametrize(("text", "fitting", "others"), ANSWERS)
@pytest.mark.parametrize("form", KINDS)
def test_d12_an_answer_is_calls_or_what_was_asked_for(
    form: str, text: StructuredOutputs, fitting: list[str], others: list[str], with_markers: bool
) -> None:
    model, either = Model(form, with_markers=with_markers), task(is_forced=False, text=text)
    one, both, wrong = (
        with_spaces_of(text, form, written(form, *calls)) for calls in ([ONE], [ONE, TWO], [("look", "{}")])
    )
    for answer in (*fitting, one):
        assert model.accepts(either, answer), answer
    for answer in (*others, "Let me see. " + one, one + " done", one[:-1], fitting[0] + one):
        assert not model.accepts(either, answer), answer
    assert model.accepts(either, both) == (not FORMS[form].is_single)
    assert not model.accepts(task(is_forced=False, text=text, is_single=True), both)
    may_be_anything = FORMS[form].is_bare and text.json_object  # an object that is no call is an object
    assert model.accepts(either, wrong) == may_be_anything


@pytest.mark.parametrize("with_markers", [True, False])
@pytest.mark.parametrize("form", KINDS)
def test_d12_reasoning_may_come_before_either(form: str, with_markers: bool) -> None:
    model = Model(form, "qwen3", with_markers=with_markers)
    either = task(is_forced=False, text=PERSON, thinks="maybe")
    calls = with_spaces_of(PERSON, form, written(form, ONE))
    for answer in ('{"name":"lo"}', calls):
        assert model.accepts(either, answer)
        assert model.accepts(either, "<think>\nSo {1}.\n</think>\n\n" + answer)
        opened = task(is_forced=False, text=PERSON, thinks="opened")
        assert model.accepts(opened, "So {1}.\n</think>\n\n" + answer)
        assert not model.accepts(opened, answer)
    assert not model.accepts(either, "<think>\nSo.\n</think>\n\nRome")


@pytest.mark.parametrize("form", BOUND)
def test_d12_the_parser_reads_calls_or_gives_the_answer_whole(form: str) -> None:
    names = {"type": "object", "properties": {"name": {"enum": ["a", "e"]}}, "required": ["name"]}
    text_of_names = StructuredOutputs(json=json.dumps(names | {"additionalProperties": False}))
    model, seen, tools = Model(form), set(), {"a": SCHEMAS["look"], "b": None}
    either = task(is_forced=False, text=text_of_names, schemas=tools)
    for seed in range(20):
        text = model.sample(either, seed)
        parser = ToolCallParser(FORMS[form], frozenset(tools), tools)
        found = parser.feed(text) + parser.finish()
        kinds = {piece.kind for piece in found}
        if parser.num_sound and kinds == {"call", "arguments"}:
            seen.add("calls")
        elif kinds == {"content"} and model.accepts(either, text):
            seen.add("answer")
            assert "".join(piece.text for piece in found) == text
            assert not (FORMS[form].is_bare and json.loads(text)["name"] in tools)
    assert seen == {"calls", "answer"}


def arguments_in(pieces: list[Piece]) -> list[str]:
    """The arguments of each call."""
    calls: list[str] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append("")
        elif piece.kind == "arguments":
            calls[-1] += piece.text
    return calls


@pytest.mark.parametrize("form", DRAWN)
def test_whatever_the_grammar_lets_through_the_parser_reads_as_calls(form: str) -> None:
    model = Model(form, "qwen3")
    wanted = task(schemas=SCHEMAS | {"free": {}}, thinks="maybe")
    num_whole = 0
    for seed in range(15):
        text = model.sample(wanted, seed)
        splitter = ReasoningSplitter(QWEN, is_open=False)
        pieces = splitter.feed(text) + splitter.finish()
        answer = "".join(piece.text for piece in pieces if piece.kind == "content")
        parser = ToolCallParser(FORMS[form], frozenset(wanted.schemas), wanted.schemas)
        found = parser.feed(answer) + parser.finish()
        kinds = {piece.kind for piece in found}
        if kinds == {"call", "arguments"}:
            num_whole += 1
            assert parser.num_sound == sum(piece.kind == "call" for piece in found)
            assert {piece.text for piece in found if piece.kind == "call"} <= set(wanted.schemas)
            assert all(isinstance(json.loads(arguments), dict) for arguments in arguments_in(found))
        else:  # it was cut at its longest
            assert "broken" in kinds or not kinds or "<think>" in text, text
    assert num_whole >= 4


def test_definitions_are_repeated_only_for_arguments_that_refer_to_something() -> None:
    large = {"days": {"type": "integer"}, "other": {"description": "d" * 4096}}
    few = {"a": {"$ref": "#/$defs/days"}, **{f"b{number}": {"type": "integer"} for number in range(16)}}
    task = CallTask(schemas={"look": {"properties": few, "$defs": large}})
    for name in ("qwen3_coder", "lfm2"):
        form = next(form for form in TOOL_FORMATS if form.name == name)
        assert call_grammar(task, ModelSyntax(tools=form)).count("d" * 4096) == 1


def test_a_grammar_that_repeats_definitions_without_end_is_refused_before_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tool_grammar, "MAX_CHARACTERS", 1 << 16)
    many = {f"a{number}": {"$ref": "#/$defs/days"} for number in range(64)}
    definitions = {"days": {"type": "integer", "description": "d" * 2048}}
    form = next(form for form in TOOL_FORMATS if form.name == "qwen3_coder")
    task = CallTask(schemas={"look": {"properties": many, "$defs": definitions}})
    with pytest.raises(InvalidRequestError, match="more than 65536 characters") as caught:
        call_grammar(task, ModelSyntax(tools=form))
    assert (caught.value.param, caught.value.code) == ("tools", "grammar_too_complex")
