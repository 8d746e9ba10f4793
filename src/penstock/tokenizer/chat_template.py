"""Renders a conversation by the model's own chat template, in a sandbox that runs a limited number of steps.

The template is Jinja text that `template_files` has found. minijinja runs it (`jinja_environment`): the
template reaches no Python object, and it fails once it has used up its fuel, a number of instructions.
Filters and functions are those that templates for Hugging Face models expect.

Special tokens count only where the *template* wrote them. Before rendering, each special token in a message
is broken by a mark, a private-use character that no message has. After rendering, the text is cut at the
special tokens that are whole, which are the template's own, and the marks are removed. Tools and all other
values that a client may hand to the template are treated in the same way.

Templates differ in how they take the arguments of former calls of tools: as an object or as JSON text. Which
one a template takes is found out by trying (`CallForm`). The form in which the model itself writes calls and
thoughts is found in a similar way: a call is rendered, and `form_detection` sees which reader can read it.

`template_files` makes the templates; `llm` and the server's routes that take conversations call them.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import minijinja
import msgspec

from penstock.errors import InvalidRequestError, ModelConfigError
from penstock.tokenizer.call_writer import written_calls, written_tools
from penstock.tokenizer.form_detection import PROBE_SIGN, Probe, shown_reasoning_format, shown_tool_format
from penstock.tokenizer.form_table import TOOL_FORMATS
from penstock.tokenizer.jinja_environment import Clock, TemplateRefusal, adapted_source, jinja_environment
from penstock.tokenizer.model_syntax import format_by_signs
from penstock.tokenizer.tokenizer import Tokenizer, special_pattern
from penstock.tokenizer.tool_formats import ToolFormat

MAX_RENDERED_CHARACTERS = 16 * 2**20
_PRIVATE_USE = range(0xE000, 0xF900)
_TAG = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_TEXT_IN_TAG = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_VARIABLE = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
_TOOLS_IN_MESSAGE = re.compile(r"['\"]tools['\"] in message|message\[['\"]tools['\"]\]|message\.tools\b")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form in which a template takes former calls of tools.

    Attributes:
        is_text: arguments are JSON text, and not an object.
        content: the `content` of a message that has calls and no text.
    """

    is_text: bool = False
    content: str | None = ""


class ChatTemplate(Protocol):
    """Turns messages into a prompt. Several threads may call it at once.

    Both methods have the same options:

    - `add_generation_prompt`: the template may end the prompt with the beginning of an answer.
    - `continue_final_message`: the prompt ends with the text of the last message; the answer continues it.
    - `extra`: variables for the template, `tools` among them.
    """

    @property
    def source(self) -> str:
        """The template's text; "" if there is no template."""
        ...

    @property
    def reads(self) -> frozenset[str]:
        """The variables that the template looks at, and `tools` if the model sees them in any way."""
        ...

    @property
    def tool_format(self) -> str:
        """The name of the row of `form_table` that reads the calls which the template shows; "" for none."""
        ...

    @property
    def reasoning_format(self) -> str:
        """The name of the row of `form_table` by which the template shows reasoning; "" for none."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """Return the prompt as text."""
        ...

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> list[int]:
        """Return the prompt as token ids.

        Both methods raise `InvalidRequestError` if the template refuses the messages.
        """
        ...


class AbsentChatTemplate:
    """The `ChatTemplate` of a model that has none: it refuses all messages."""

    source = ""
    reads: frozenset[str] = frozenset()
    tool_format = ""
    reasoning_format = ""

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        raise InvalidRequestError(
            "this model has no chat template.",
            remedy="Use completions, or add a chat_template.jinja next to its tokenizer.json.",
            param="messages",
        )

    def encode(self, messages: Sequence[Message], **options: Any) -> list[int]:
        self.render(messages, **options)
        return []


class JinjaChatTemplate:
    """Renders one Jinja template.

    Args:
        source: the template.
        special_tokens: texts of special tokens by their variables in templates: `bos_token`, `eos_token`, ...
        tokenizer: encodes the rendered text.
        tool_source: another template, for requests with tools; "" where there is none.
        name: what errors call the template: its file.
        clock: gives templates that ask for it the time.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tokenizer: Tokenizer,
        tool_source: str = "",
        *,
        name: str = "the chat template",
        clock: Clock = datetime.datetime.now,
    ) -> None:
        self.source = source + tool_source
        self._variables = _variables(self.source)
        self._tools_as: _ToolsAs = _tools_as(self.source, self._variables)
        self._clock = clock
        self._special_tokens = dict(special_tokens)
        self._tokenizer = tokenizer
        self._special = special_pattern(tokenizer)
        self._environment = jinja_environment(clock)
        try:
            self._environment.add_template("chat", adapted_source(source))
            self._environment.add_template("tools", adapted_source(tool_source or source))
        except minijinja.TemplateError as error:
            raise ModelConfigError(
                f"{name} cannot be parsed: {_first_line(error)}.",
                remedy="Correct the template, or give another file with --chat-template.",
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        plain = [self._plain(message) for message in messages]
        if continue_final_message:
            return self._run_to_end(plain, extra, _unused_characters([*plain, extra])[1])
        return self._run(self._told(plain, extra), add_generation_prompt, extra)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> list[int]:
        plain = [self._plain(message) for message in messages]
        mark, end = _unused_characters([*plain, extra])
        marked, marked_extra = self._marked(plain, mark), self._marked(extra, mark)
        if continue_final_message:
            rendered = self._run_to_end(marked, marked_extra, end)
        else:
            rendered = self._run(self._told(marked, marked_extra), add_generation_prompt, marked_extra)
        rendered = rendered.replace(f"\\u{ord(mark):04x}", mark)  # a template may have escaped it
        if mark not in rendered:
            return self._tokenizer.encode_trusted(rendered, add_special_tokens=False)
        return self._encode_marked(rendered, mark)

    @cached_property
    def call_form(self) -> CallForm:
        """The form in which the template is given calls.

        Arguments are given as text if the template takes them so, since that keeps the client's spelling. But
        a template that writes the arguments of an object otherwise than as JSON is given an object.
        """
        text, text_form = self._shown_with(is_text=True)
        shown, form = self._shown_with(is_text=False)
        is_own_way = bool(shown) and not _ARGUMENTS_AS_JSON.search(shown)
        return text_form if text and not is_own_way else form

    def _shown_with(self, *, is_text: bool) -> tuple[str, CallForm]:
        """Return a conversation with a call, and the form of the call; "" if its arguments are not shown."""
        form, form_alone = (CallForm(is_text=is_text, content=content) for content in ("", None))
        shown, shown_alone = self._try(form), self._try(form_alone)
        # A template that writes more for an empty text than for none is given none.
        if shown_alone and (not shown or len(shown_alone) < len(shown)):
            return shown_alone, form_alone
        return shown, form if shown else CallForm()

    def _try(self, form: CallForm) -> str:
        """Return a conversation with a call, given in this form; "" if its arguments are not shown."""
        messages = [_with_call_form(message, form) for message in Probe.conversation()]
        try:
            rendered = self._run(messages, True, {"tools": Probe.tools()})
        except InvalidRequestError:
            return ""
        return rendered if PROBE_SIGN.search(rendered) else ""

    @cached_property
    def reads(self) -> frozenset[str]:
        is_told = self._tools_as is not _no_change or bool(self._told_form)
        return self._variables | {"tools"} if is_told else self._variables

    @cached_property
    def _told_form(self) -> ToolFormat | None:
        """The form in which Penstock describes tools; None unless the template shows calls and no tools."""
        is_shown = "tools" in self._variables or self._tools_as is not _no_change
        return None if is_shown else _row_named(self.tool_format)

    @cached_property
    def _written_form(self) -> ToolFormat | None:
        """The form in which Penstock writes former calls; None if unknown or the template shows them."""
        return None if "tool_calls" in self.source else format_by_signs(self.source)

    def _told(self, messages: list[dict[str, Any]], extra: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages with the tools and calls in their text that the template does not show."""
        if self._written_form is not None:
            messages = [_with_written_calls(message, self._written_form) for message in messages]
        if not extra.get("tools") or self._told_form is None:
            return messages
        text = written_tools(self._told_form, extra["tools"])
        if messages and messages[0].get("role") == "system":
            return [messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    @cached_property
    def tool_format(self) -> str:
        return shown_tool_format(self._probed)

    @cached_property
    def reasoning_format(self) -> str:
        return shown_reasoning_format(self._probed)

    def _probed(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **extra: Any) -> str:
        """Return what the template makes of a conversation; "" if it refuses the messages or fails."""
        try:
            return self._run([self._plain(message) for message in messages], add_generation_prompt, extra)
        except InvalidRequestError:
            return ""

    def _plain(self, message: Message) -> dict[str, Any]:
        plain = _plain(message)
        if plain.get("role") == "developer" and "developer" not in self.source:
            # `developer` is the newer name of `system`. Templates leave out roles that they do not know.
            plain["role"] = "system"
        if "thinking" in self.source:
            plain = _with_reasoning_names(plain)
        return _with_call_form(plain, self.call_form) if plain.get("tool_calls") else plain

    def _run_to_end(self, messages: list[dict[str, Any]], extra: dict[str, Any], end: str) -> str:
        """Return the prompt up to the end of the last message's text; `end` is a character to mark it."""
        *others, last = messages or [{}]
        content = last.get("content")
        if not isinstance(content, str):
            raise _not_continued("has no text")
        # A space behind the mark shows whether the template trims texts; if so, this one is trimmed too.
        whole = self._told([*others, last | {"content": f"{content}{end} "}], extra)
        rendered = self._run(whole, False, extra)
        before, separator, after = rendered.rpartition(end)
        if not separator:
            raise _not_continued("is changed by the chat template")
        return before if after.startswith(" ") else before.rstrip()

    def _run(self, messages: list[dict[str, Any]], add_generation_prompt: bool, extra: dict[str, Any]) -> str:
        variables = {"tools": None, "documents": None} | self._special_tokens | extra
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        variables = self._tools_as(variables, self._clock)
        try:
            rendered = self._environment.render_template(
                "tools" if extra.get("tools") else "chat", **variables
            )
        except TemplateRefusal as error:
            reason = str(error).rstrip(".")
            raise InvalidRequestError(f"the chat template refuses: {reason}.", param="messages") from error
        except minijinja.TemplateError as error:
            raise InvalidRequestError(
                f"the chat template cannot render these messages: {_first_line(error)}.", param="messages"
            ) from error
        if len(rendered) > MAX_RENDERED_CHARACTERS:
            raise InvalidRequestError(
                f"the rendered prompt has {len(rendered)} characters, more than {MAX_RENDERED_CHARACTERS}.",
                param="messages",
            )
        return rendered

    def _marked(self, value: Any, mark: str) -> Any:
        """Return the value with every special token in its strings broken after the first character."""
        if isinstance(value, str):
            while self._special.search(value):
                value = self._special.sub(lambda match: match[0][0] + mark + match[0][1:], value)
            return value
        if isinstance(value, dict):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        if isinstance(value, list):
            return [self._marked(item, mark) for item in value]
        return value

    def _encode_marked(self, rendered: str, mark: str) -> list[int]:
        token_ids: list[int] = []
        end = 0
        for match in self._special.finditer(rendered):
            token_ids += self._encode_text(rendered[end : match.start()], mark)
            token_ids += self._tokenizer.encode_trusted(match[0], add_special_tokens=False)
            end = match.end()
        return token_ids + self._encode_text(rendered[end:], mark)

    def _encode_text(self, text: str, mark: str) -> list[int]:
        plain = text.replace(mark, "")
        return self._tokenizer.encode(plain, add_special_tokens=False) if plain else []


def _plain(message: Message) -> dict[str, Any]:
    """Return a message whose content is text: parts of type `text` are joined by line ends."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list | tuple):
        plain["content"] = "\n".join(_text_of(part) for part in content)
    return plain


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(f"content parts must be text, got {kind!r}.", param="messages")


def _with_call_form(message: Message, form: CallForm) -> dict[str, Any]:
    """Return a message whose calls are in the form that a template takes."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = [_with_arguments(call, form) for call in message["tool_calls"]]
    return {**message, "content": message.get("content") or form.content, "tool_calls": calls}


def _with_written_calls(message: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    """Return a message with its calls in its text; as it is if one of them has no object of arguments."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
            return message
        calls.append((str(function.get("name")), function["arguments"]))
    if not calls:
        return message
    return message | {"content": (message.get("content") or "") + written_calls(form, calls)}


def _row_named(name: str) -> ToolFormat | None:
    return next((form for form in TOOL_FORMATS if form.name == name), None)


def _with_arguments(call: Any, form: CallForm) -> Any:
    """Return a call with its arguments in this form. Text that is not a JSON object stays as it is."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments") or {}
    if form.is_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not form.is_text and isinstance(arguments, str):
        arguments = _object_in(arguments)
    return {**call, "function": function | {"arguments": arguments}}


def _object_in(text: str) -> Any:
    try:
        decoded = msgspec.json.decode(text.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    return decoded if isinstance(decoded, dict) and not _is_deep(decoded) else text


def _is_deep(value: Any) -> bool:
    """Return whether brackets are nested deeper than a template could go through."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for part in inner for item in part if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under the names that templates read.

    `thinking` is not among them if the message has text and calls: there templates refuse it.
    """
    reasoning = next((message[key] for key in _REASONING_FIELDS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    named = message | {"reasoning_content": reasoning}
    return named if message.get("content") and message.get("tool_calls") else {"thinking": reasoning} | named


_ToolsAs = Callable[[dict[str, Any], Clock], dict[str, Any]]


def _tools_as(source: str, variables: frozenset[str]) -> _ToolsAs:
    """Return what changes the variables for a template that takes tools otherwise than as `tools`."""
    if "tools" in variables:
        return _no_change
    if "functions" in variables:
        return _as_functions
    return _in_system_message if _TOOLS_IN_MESSAGE.search(source) else _no_change


def _no_change(variables: dict[str, Any], clock: Clock) -> dict[str, Any]:
    return variables


def _as_functions(variables: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Return the variables with the tools as text in `functions`, and the time as text in `datetime`."""
    functions = [tool["function"] for tool in variables["tools"] or []]
    now = clock().strftime("%Y-%m-%d %H:%M:%S")
    return {"functions": json.dumps(functions, indent=4, ensure_ascii=False), "datetime": now} | variables


def _in_system_message(variables: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """Return the variables with the tools as text in the system message."""
    if not variables["tools"]:
        return variables
    tools = json.dumps([tool["function"] for tool in variables["tools"]], ensure_ascii=False)
    messages = list(variables["messages"])
    if not messages or messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": "You are a helpful assistant with some tools."})
    return variables | {"messages": [messages[0] | {"tools": tools}, *messages[1:]]}


_MAX_DEPTH = 64  # of arguments that are handed on as an object
_ARGUMENTS_AS_JSON = re.compile(r"""['"]where['"]\s*:\s*['"]there""")


def _not_continued(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The last message cannot be continued: it {why}.",
        remedy="Leave continue_final_message out.",
        param="continue_final_message",
    )


def _variables(source: str) -> frozenset[str]:
    """Return the names that stand in the tags of a template, keywords of Jinja among them."""
    tags = _TAG.findall(_COMMENT.sub("", source))
    return frozenset(name for tag in tags for name in _VARIABLE.findall(_TEXT_IN_TAG.sub('""', tag)))


def _unused_characters(values: list[Any]) -> tuple[str, str]:
    """Return two private-use characters that stand in none of the values."""
    text, characters = str(values), []
    for code in _PRIVATE_USE:
        if chr(code) not in text and f"\\u{code:04x}" not in text:
            characters.append(chr(code))
            if len(characters) == 2:
                return characters[0], characters[1]
    raise InvalidRequestError("the messages use all private-use characters.", param="messages")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
