"""The fields of one row in the table of call forms: marks around a call, and the form of its arguments.

A mark is a fixed text that a family writes around a part of an answer. A marker is a mark by which a call or
the reasoning is found.

The readers serve all rows: `call_reader` reads calls that are JSON, `framed_calls` reads calls whose name and
arguments stand between marks, and `reasoning` with `answer_messages` reads what a model thinks.
`tool_grammar` writes a grammar of any row. The rows are in `form_table`; `model_syntax` chooses a model's.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Literal

import msgspec

_TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # what may be one token among the marks of a row


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """The form of arguments that are bare text, each between tags.

    Attributes:
        key_open: before the name of an argument.
        key_end: between that name and its value.
        value_end: behind the value; `{key}` in it stands for the name of the argument.
        padding: between tags and value.
        type_attribute: stands within `key_end`, behind its first character; `{}` in it stands for the type of
            the value. As in ` string="{}"` that is "true" for a string and "false" for any other type; see
            `tells_names`. "": tags do not give the type.
        tells_names: `{}` stands for the JSON name of the type instead.
        quotes: marks that may stand around the text of a value; `value_end` within them is plain text.
        is_nested: the entries of objects and lists are written as further tags within the value.
    """

    key_open: str
    key_end: str
    value_end: str
    padding: str = ""
    type_attribute: str = ""
    tells_names: bool = False
    quotes: tuple[str, str] = ("", "")
    is_nested: bool = False

    def end_of(self, key: str) -> str:
        """Return the mark behind the value of an argument."""
        return self.value_end.replace("{key}", key)

    def key_end_of(self, types: Set[str]) -> str:
        """Return the mark between a name and a value of these types; no types mean a string."""
        if not self.type_attribute:
            return self.key_end
        is_text = not types or "string" in types
        told = "true" if is_text else "false"
        if self.tells_names:
            told = "string" if is_text else "number" if types & {"integer", "number"} else min(types)
        return with_attribute(self.key_end, self.type_attribute.format(told))


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The frame around the name and the arguments of a call that is not one JSON object.

    Line ends in these texts are the family's; a reader takes any white space in their place.

    Attributes:
        call_open: before the name.
        call_written: what the model writes in place of the opening and `call_open`, if readers are given less
            of it (`answer_messages` takes headers away). `{name}` in it stands for the name.
        prefix: stands right before the name; some models leave it out.
        id_end: between the call's id, which then stands before the name, and the name; "": there is no id.
        has_index: a colon and a number follow the name. The call's id is prefix, name, colon and number.
        number_attribute: stands within `name_end`, behind its first character; `{}` in it stands for the
            number of the call, from 1 on. "": calls have no such number.
        name_end: between name and arguments.
        name_end_written: what the model writes in place of `name_end`, if readers are given another spelling.
        body: how the arguments are written: as JSON, as text between `tags`, or as literals of Python or of
            Gemma, whose strings stand between two `quote`.
        call_end: behind the arguments.
        separator: between two calls.
        section_open: before the first call, behind the opening. It is too common in texts to be a marker.
        section_end: behind the last call of an opening; "" if there is no such mark.
        is_section: the family writes one opening for all calls of a section; else one for each call.
    """

    call_open: str = ""
    call_written: str = ""
    prefix: str = ""
    id_end: str = ""
    has_index: bool = False
    number_attribute: str = ""
    name_end: str = ""
    name_end_written: str = ""
    body: Literal["json", "tags", "python", "gemma"] = "json"
    tags: Tags | None = None
    quote: str = ""
    call_end: str = ""
    separator: str = ""
    section_open: str = ""
    section_end: str = ""
    is_section: bool = False


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which models write calls of tools.

    Attributes:
        opening: the marker before a call, or before several calls; "" if there is none.
        also: further markers at which a call may begin.
        closing: the marker behind a call; "" if there is none, or if the `frame` has it.
        padding: what the family writes between markers and call.
        is_bare: a call may also be the beginning of the answer, without the marker.
        is_list: the family writes its calls as one JSON list.
        is_lines: the family writes its calls one behind the other between the markers, each on a line.
        is_named: the name stands before the arguments, and not in JSON with them: `NAME[ARGS]{...}`.
        frame: the marks of calls that are not JSON objects; None: calls are JSON objects, or `is_named`.
        messages: templates show a call as a message in this dialect of `answer_messages`, which turns the
            message into a call in the `frame`. "": templates show calls in the frame itself.
        name_key: the key of the name in a JSON object.
        arguments: the key of the arguments.
        index_key: the key of a call's number, which stands first; "": there is no such key.
        is_opened: prompts end with the opening, so that the first call of an answer has none.
        is_single: the family makes one call in an answer.
        has_short_ids: templates of the family want ids of nine letters and digits.
        tokens: texts that may be special tokens, beside those that `markers` finds in the marks.
        signs: texts of which all stand in chat templates of the family.
        foreign: texts of which none stands there.
    """

    name: str
    opening: str = ""
    also: tuple[str, ...] = ()
    closing: str = ""
    padding: str = ""
    is_bare: bool = False
    is_list: bool = False
    is_lines: bool = False
    is_named: bool = False
    frame: Frame | None = None
    messages: str = ""
    name_key: str = "name"
    arguments: str = "arguments"
    index_key: str = ""
    is_opened: bool = False
    is_single: bool = False
    has_short_ids: bool = False
    tokens: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        """The markers at which a call may begin."""
        return (self.opening, *self.also) if self.opening else self.also

    @property
    def markers(self) -> tuple[str, ...]:
        """The marks, or parts of marks, that may each be one special token."""
        named = (NAME_END, CALL_ID) if self.opening == MISTRAL else ()
        return _tokens(self.opening, self.closing, *named, *_texts_of(self.frame), more=self.tokens)


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which models mark what they think.

    Attributes:
        opening, closing: around the reasoning, which is the beginning of an answer.
        is_open: an answer begins inside, even where neither the prompt nor the answer has the opening marker.
        around: marks that some models write around what they say; they are not shown.
        ending: a mark behind the whole answer, its calls included, that is not shown either.
        messages: the answer is a sequence of messages in this dialect of `answer_messages`; "" if it is not.
        resumes: what stands between reasoning and answer.
        answers: what stands before the text of an answer.
        remarks: what stands before a text behind which calls may follow; "" if a text ends the answer.
        tokens, signs, foreign: as in `ToolFormat`.
    """

    name: str
    opening: str
    closing: str
    is_open: bool = False
    around: tuple[str, str] = ("", "")
    ending: str = ""
    messages: str = ""
    resumes: str = ""
    answers: str = ""
    remarks: str = ""
    tokens: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return _tokens(self.opening, self.closing, *self.around, more=self.tokens)


def with_attribute(mark: str, attribute: str) -> str:
    """Return a mark with an attribute behind its first character."""
    return f"{mark[0]}{attribute}{mark[1:]}"


def _texts_of(frame: Frame | None) -> tuple[str, ...]:
    """Return the marks of a frame in which special tokens may be."""
    if frame is None:
        return ()
    tags = frame.tags
    texts = (tags.key_open, tags.key_end, tags.value_end) if tags is not None else ()
    marks = (frame.call_open, frame.id_end, frame.name_end, frame.call_end, frame.section_end)
    return (*marks, *texts, frame.quote)


def _tokens(*texts: str, more: tuple[str, ...]) -> tuple[str, ...]:
    """Return what may be tokens, each once: these texts, parts of them that look like tokens, and `more`."""
    found = [token for text in texts if text for token in (text, *_TOKEN.findall(text))]
    whole = [token for token in found if not any(token in other and token != other for other in more)]
    return tuple(dict.fromkeys([*whole, *more]))


MISTRAL = "[TOOL_CALLS]"
NAME_END = "[ARGS]"  # between a name and its arguments
CALL_ID = "[CALL_ID]"  # some models write the call's id behind the name
