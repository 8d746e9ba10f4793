"""The template options of a chat request besides messages and tools, and how its answers are to be read.

Called by `chat_reader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.config.limits import Limits
from penstock.errors import InvalidRequestError
from penstock.server.engine_port import ServedModel
from penstock.server.openai.message_reader import Reading
from penstock.server.openai.openai_types import ChatRequest
from penstock.server.openai.prompts import text_of
from penstock.server.openai.tools import ToolUse
from penstock.tokenizer.model_syntax import ModelSyntax

# Variables of templates that a request may not set; the ends are those of special tokens and of templates.
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_OURS_ENDS = ("_token", "template")
_MAX_NAME = 64
_TAIL = 32  # so many ids at the end of a prompt are searched for the marker that opens the reasoning


def template_options(
    request: ChatRequest, syntax: ModelSyntax, limits: Limits
) -> tuple[dict[str, Any], list[str]]:
    """Return options for `ChatTemplate.encode`, and the fields that have no effect on this model's template.

    Raises:
        InvalidRequestError: the fields contradict each other, are too many, or set a reserved variable.
    """
    options: dict[str, Any] = {}
    given: dict[str, tuple[str, Any]] = {}
    if request.reasoning_effort is not None:
        given["reasoning_effort"] = ("reasoning_effort", request.reasoning_effort)
    for name, value in _checked_kwargs(request, limits).items():
        given[name] = (f"chat_template_kwargs.{name}", value)
    for name, (_field, value) in given.items():
        if name in syntax.reads:
            options[name] = value
    if request.add_generation_prompt is not None:
        options["add_generation_prompt"] = request.add_generation_prompt
    if request.continue_final_message:
        _check_continued(request)
        options["continue_final_message"] = True
    return options, [field for name, (field, _value) in given.items() if name not in syntax.reads]


def _checked_kwargs(request: ChatRequest, limits: Limits) -> dict[str, Any]:
    given = request.chat_template_kwargs or {}
    if len(given) > limits.max_template_kwargs:
        raise InvalidRequestError(
            f"chat_template_kwargs has {len(given)} entries, more than {limits.max_template_kwargs}.",
            remedy="Give fewer entries, or raise --max-template-kwargs.",
            param="chat_template_kwargs",
            code="out_of_range",
        )
    for name in given:
        is_ours = name in _OURS or name.endswith(_OURS_ENDS)
        if is_ours or not name.isidentifier() or len(name) > _MAX_NAME:
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {name[:_MAX_NAME]!r}.",
                remedy="It sets only the template's own variables, such as enable_thinking.",
                param="chat_template_kwargs",
            )
    return given


def _check_continued(request: ChatRequest) -> None:
    if request.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot both be true.",
            remedy="The first continues the last message, the second begins a new one.",
            param="continue_final_message",
        )
    if not request.messages or request.messages[-1].role != "assistant" or request.messages[-1].tool_calls:
        raise InvalidRequestError(
            "continue_final_message needs a last message of the assistant, with text and without tool_calls.",
            param="continue_final_message",
        )


def opens_reasoning(request: ChatRequest, prompt: Sequence[int], model: ServedModel) -> bool:
    """Return whether the answer to this prompt begins inside the reasoning."""
    form = model.syntax.reasoning
    if form is None:
        return False
    if request.continue_final_message:
        text = text_of(request.messages[-1])
        return text.rfind(form.opening) > text.rfind(form.closing)
    tail = b"".join(map(model.codec.token_bytes, prompt[-_TAIL:])).decode(errors="ignore").rstrip()
    return tail.endswith(form.opening) or (form.is_open and not tail.endswith(form.closing))


def reading_of(request: ChatRequest, use: ToolUse, syntax: ModelSyntax, *, is_open: bool) -> Reading | None:
    """Return how the answers are read, or None if all of their text is content.

    Args:
        is_open: the answer begins inside the reasoning.
    """
    tools = syntax.tools if use.choice != "none" else None
    reasoning = syntax.reasoning
    if tools is None and reasoning is None:
        return None
    return Reading(
        tools=tools,
        names=use.names,
        schemas={tool["function"]["name"]: tool["function"].get("parameters") for tool in use.tools},
        is_parallel=use.is_parallel,
        reasoning=reasoning,
        is_open=is_open,
        shows_reasoning=request.include_reasoning is not False,
        reasoning_end=None if reasoning is None else syntax.marker_ids.get(reasoning.closing),
    )


def shown_markers(reading: Reading | None, syntax: ModelSyntax) -> list[str]:
    """Return the special tokens that must stay in the text, since they mark its parts."""
    forms = (reading.tools, reading.reasoning) if reading is not None else ()
    markers = [marker for form in forms if form is not None for marker in form.markers]
    return [marker for marker in markers if marker in syntax.marker_ids]
