"""The tools of a chat request: what it may ask for, what the template gets, and the grammar of the calls.

`tool_use` checks the fields against each other, the limits and the model. If the model's chat template does
not support tools, they are refused, unless the server was started with `--tool-parser json`. A text of ours
then describes the tools to the model. Called by `chat_reader`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.config.limits import Limits
from penstock.errors import InvalidRequestError
from penstock.request import StructuredOutputs
from penstock.server.openai.openai_types import ChatRequest, Function, NamedTool, Tool
from penstock.tokenizer.call_reader import NAME
from penstock.tokenizer.model_syntax import ModelSyntax
from penstock.tokenizer.tool_grammar import CallTask, Thinks, call_grammar

_OWN_TEXT = """You can call these functions:
{tools}
To call one, answer with one JSON object and nothing else: {{"name": its name, "arguments": an object that \
fits its parameters}}. To call several, answer with a JSON list of such objects. Otherwise answer in plain \
text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that a request asks for.

    Attributes:
        tools: the tools as templates get them.
        strict: names of the tools whose calls must fit their schema even if no call is required.
        choice: "none", "auto", "required" or "named".
        named: the tool that must be called, if `choice` is "named"; else empty.
        is_parallel: whether an answer may have several calls.
    """

    tools: list[dict[str, Any]]
    strict: frozenset[str]
    choice: str
    named: str
    is_parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    def binds(self, name: str) -> bool:
        """Return whether a grammar makes the arguments of this tool's calls fit its schema."""
        if self.choice == "auto":
            return name in self.strict
        return self.named in ("", name)


NO_TOOLS = ToolUse(tools=[], strict=frozenset(), choice="none", named="", is_parallel=True)


def tool_use(request: ChatRequest, syntax: ModelSyntax, limits: Limits) -> ToolUse:
    """Return what `tools`, `tool_choice` and `parallel_tool_calls` mean. Raises `InvalidRequestError`."""
    tools, choice = request.tools or [], request.tool_choice or "auto"
    named = choice.function.name if isinstance(choice, NamedTool) else ""
    kind = choice if isinstance(choice, str) else "named"
    if not tools:
        if kind in ("required", "named"):
            asks = f"names {named[:64]!r}" if kind == "named" else "is required"
            raise _refused(
                f"tool_choice {asks}, but there are no tools.", "tool_choice", "Give some in tools."
            )
        return NO_TOOLS
    _check_tools(tools, limits)
    if kind == "none":
        return NO_TOOLS
    _check_model(kind, syntax)
    names = [tool.function.name for tool in tools]
    if named and named not in names:
        raise _refused(f"tool_choice names {named[:64]!r}, which is not in tools.", "tool_choice", "")
    return ToolUse(
        tools=[_shown(tool) for tool in tools],
        strict=frozenset(tool.function.name for tool in tools if tool.function.strict),
        choice=kind,
        named=named,
        is_parallel=request.parallel_tool_calls is not False,
    )


def _check_tools(tools: Sequence[Tool], limits: Limits) -> None:
    size = len(msgspec.json.encode(tools))
    for what, value, most, flag in (
        ("The number of tools", len(tools), limits.max_tools, "--max-tools"),
        ("The size of all tools in bytes", size, limits.max_tool_bytes, "--max-tool-bytes"),
    ):
        if value > most:
            raise _refused(
                f"{what} is {value}; this server allows {most}.",
                "tools",
                f"Give fewer tools, or raise {flag}.",
                code="out_of_range",
            )
    for index, tool in enumerate(tools):
        _check_function(tool.function, f"tools[{index}].function")
    name, times = Counter(tool.function.name for tool in tools).most_common(1)[0]
    if times > 1:
        raise _refused(f"{times} tools have the name {name!r}.", "tools", "Give each tool a different name.")


def _check_function(function: Function, where: str) -> None:
    if not NAME.fullmatch(function.name):
        raise _refused(
            f"{where}.name is {function.name[:80]!r}.",
            f"{where}.name",
            "Use 1 to 64 ASCII letters, digits, _ and -.",
        )
    kind = (function.parameters or {}).get("type", "object")
    if kind != "object":
        raise _refused(
            f"{where}.parameters has the type {str(kind)[:32]!r}.",
            f"{where}.parameters",
            "Give a JSON schema of type object.",
        )


def _check_model(kind: str, syntax: ModelSyntax) -> None:
    form = syntax.tools
    if not syntax.template_knows_tools and (form is None or form.name != "json"):
        raise _refused(
            "The chat template of this model does not support tools.",
            "tools",
            "Use a model that was trained for them, or start the server with --tool-parser json.",
            code="unsupported_parameter",
        )
    if form is None and not (syntax.is_tool_parser_off and kind == "auto"):
        param = "tools" if kind == "auto" else "tool_choice"
        raise _refused(
            "This server does not know the model's tool-call format.",
            param,
            "Start it with a --tool-parser that fits the model.",
            code="unsupported_parameter",
        )


def _shown(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates get it: without `strict`, which concerns only this server."""
    function = msgspec.structs.replace(tool.function, strict=None)
    return {"type": "function", "function": msgspec.to_builtins(function)}


def grammar_of(
    use: ToolUse, syntax: ModelSyntax, *, is_open: bool, text: StructuredOutputs | None = None
) -> str | None:
    """Return the grammar that the answer must follow; None if the tools require no grammar.

    Args:
        is_open: the answer begins inside the reasoning.
        text: what the answer must be if the model makes no call, which it may only with the choice "auto";
            None: any text.
    """
    if use.choice == "none" or syntax.tools is None:
        return None
    if use.choice == "auto" and not use.strict and text is None:
        return None
    given = {tool["function"]["name"]: tool["function"].get("parameters") for tool in use.tools}
    schemas = {
        name: given[name] if use.choice != "auto" or use.binds(name) else {} for name in callable_names(use)
    }
    thinks: Thinks = "no" if syntax.reasoning is None else "opened" if is_open else "maybe"
    task = CallTask(
        schemas=schemas,
        is_forced=use.choice != "auto",
        text=text,
        is_single=use.choice == "named" or not use.is_parallel,
        thinks=thinks,
    )
    return call_grammar(task, syntax)


def callable_names(use: ToolUse) -> list[str]:
    """Return the names of the tools that an answer may call, in the order of its grammar."""
    names = [tool["function"]["name"] for tool in use.tools]
    return [name for name in names if use.choice == "auto" or use.binds(name)]


def bound_schemas(use: ToolUse) -> dict[str, str]:
    """Return the schemas that arguments must fit by a grammar: as JSON text, by the field that gave each."""
    schemas = {}
    for index, tool in enumerate(use.tools):
        name, schema = tool["function"]["name"], tool["function"].get("parameters")
        if schema and use.binds(name):
            schemas[f"tools[{index}].function.parameters"] = msgspec.json.encode(schema).decode()
    return schemas


def with_own_text(messages: list[dict[str, Any]], use: ToolUse) -> list[dict[str, Any]]:
    """Return messages for a template without tools, in which tools, calls and results are text.

    The tools stand in the system's message, a call in the message of the assistant that made it. Results are
    added to the user's message before them, or become one.
    """
    plain: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    user_texts: list[str] = []  # of the user's message that results are being added to
    for message in messages:
        if message["role"] == "tool":
            if not user_texts and (not plain or plain[-1]["role"] != "user"):
                plain.append({"role": "user", "content": ""})
            user_texts = user_texts or [*filter(None, [plain[-1]["content"]])]
            user_texts.append(_result_text(message, names))
            continue
        _tell(plain, user_texts)
        calls = message.get("tool_calls") or []
        names |= {call["id"]: call["function"]["name"] for call in calls if call.get("id")}
        text = "\n".join([*filter(None, [message["content"]]), *map(_call_text, calls)])
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        plain.append(others | {"content": text})
    _tell(plain, user_texts)
    if not use.tools:
        return plain
    shown = "\n".join(msgspec.json.encode(tool["function"]).decode() for tool in use.tools)
    text = _OWN_TEXT.format(tools=shown)
    if plain and plain[0]["role"] in ("system", "developer"):
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _tell(plain: list[dict[str, Any]], user_texts: list[str]) -> None:
    """Put the collected texts, if any, into the last message and clear them."""
    if user_texts:
        plain[-1] = plain[-1] | {"content": "\n\n".join(user_texts)}
        user_texts.clear()


def _result_text(message: dict[str, Any], names: dict[str, str]) -> str:
    name = message.get("name") or names.get(message.get("tool_call_id", ""), "the call")
    return f"Result of {name}:\n{message['content']}"


def _call_text(call: dict[str, Any]) -> str:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return f'{{"name": {msgspec.json.encode(function["name"]).decode()}, "arguments": {arguments}}}'


def _refused(message: str, param: str, remedy: str, *, code: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(message, remedy=remedy, param=param, code=code)
