"""Turns decoded JSON into a request type: wrong types and unsupported features are refused, each by name.

A field that a client may know from another server, and that this route does not support, is refused, unless
its value asks for nothing. A field that no server is known to have is ignored, and a header of the answer
names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from penstock.errors import InvalidRequestError
from penstock.server.openai.openai_types import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerateRequest,
    StreamOptions,
)
from penstock.server.openai.responses_types import ResponsesRequest, ResponsesStreamOptions

R = TypeVar("R", bound=msgspec.Struct)

WARNING_HEADER = "x-penstock-warning"
MAX_NAMED_FIELDS = 16
MAX_FIELD_CHARACTERS = 64

# Names under which other servers take a bound on the reasoning alone.
REASONING_BUDGETS = (
    "thinking",
    "thinking_budget",
    "thinking_budget_tokens",
    "thinking_token_budget",
    "reasoning_budget",
)
# Known fields, which a route refuses if its requests do not have them, and the values that ask for nothing
# and are accepted all the same (null always is).
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "session_id": (),
    "session_params": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "detokenize": (True,),
} | dict.fromkeys(REASONING_BUDGETS, ())

_NO_BUDGET = (
    "Leave it out: max_tokens limits reasoning and answer together; reasoning_effort or "
    "chat_template_kwargs shorten reasoning if the model's template supports them."
)

# What to do instead, for fields that will not be supported or that have another name.
_IN_PLACE: Mapping[str, str] = {
    "best_of": "Leave it out, because it has no bound on cost; use n with logprobs, and choose.",
    **dict.fromkeys(REASONING_BUDGETS, _NO_BUDGET),
    "functions": "Leave it out and use tools.",
    "session_params": "Leave it out and use session_id.",
    "function_call": "Leave it out and use tool_choice.",
} | {
    f"guided_{kind}": f'Leave it out and use structured_outputs: {{"{kind}": ...}}.'
    for kind in ("json", "regex", "choice", "grammar")
}

# Fields of other routes that would change the answer of these routes: the values that ask for nothing, and
# what to do instead of giving another value. `responses_input` and `messages_input` have those for theirs.
_ADDED = "Send token ids in prompt, such as those of /tokenize; they are used unchanged."
_WRITTEN = "The chat template writes the special tokens."
OF_OTHER_ROUTES: Mapping[type[msgspec.Struct], Mapping[str, tuple[tuple[object, ...], str]]] = {
    ChatRequest: {
        "max_output_tokens": ((), "Use max_completion_tokens instead."),
        "add_special_tokens": ((False,), _WRITTEN),
    },
    CompletionRequest: {
        "max_completion_tokens": ((), "Use max_tokens instead."),
        "max_output_tokens": ((), "Use max_tokens instead."),
        "top_logprobs": ((), "Use logprobs, a number, instead."),
        "add_special_tokens": ((True,), _ADDED),
    },
    EmbeddingRequest: {
        "add_special_tokens": ((True,), _ADDED.replace("prompt", "input")),
    },
}

_NOT_IN_HEADERS = re.compile(r"[^!-+\--~]")  # printable ASCII but the comma, which separates names
_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_GOT_FLOAT = "got `float`"  # in msgspec's message
_MOST_EXACT = 1 << 53  # up to here, every whole number is a float of its own


def convert(body: dict[str, Any], request_type: type[R]) -> R:
    """Return the request in `body`. Raises `InvalidRequestError` naming the field at fault.

    JSON has one kind of number, and some languages write 5 as 5.0: it is accepted where 5 is.
    """
    _refuse_unsupported(body, request_type)
    try:
        return _converted(body, request_type)
    except msgspec.ValidationError as error:
        if _GOT_FLOAT not in str(error):
            raise refused_field(str(error), request_type) from None
    try:
        return _converted(_with_whole_numbers(body), request_type)
    except msgspec.ValidationError as error:
        raise refused_field(str(error), request_type) from None


def _converted(body: Any, request_type: type[R]) -> R:
    return msgspec.convert(body, request_type, strict=True, str_keys=True)  # keys of logit_bias are ids


def _with_whole_numbers(value: Any) -> Any:
    """Return a decoded JSON value in which every whole number is an int."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(inner) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MOST_EXACT:
        return int(value)
    return value


def refuse_asked(
    names: Mapping[str, tuple[tuple[object, ...], str]], value_of: Callable[[str], object]
) -> None:
    """Raise `InvalidRequestError` for the first field that asks for something this server does not do.

    Args:
        names: for each field the values that ask for nothing, and what to do instead of giving another value.
        value_of: returns the value of a field; None if it is not given.
    """
    for name, (neutral, remedy) in names.items():
        if value_of(name) not in neutral:
            raise InvalidRequestError(
                f"{name} is not supported by this version of Penstock.",
                remedy=remedy,
                param=name,
                code="unsupported_parameter",
            )


def _refuse_unsupported(body: dict[str, Any], request_type: type[R]) -> None:
    known = request_type.__struct_fields__
    elsewhere = OF_OTHER_ROUTES.get(request_type, {})
    for name, value in body.items():
        if value is None or name in known:
            continue
        if name in elsewhere:
            neutral, remedy = elsewhere[name]
        elif name in NEUTRAL_VALUES:
            neutral = NEUTRAL_VALUES[name]
            remedy = _IN_PLACE.get(name, f"Leave it out or set it to {_alternatives(neutral)}.")
        else:
            continue
        if not any(_is_same(value, neutral_value) for neutral_value in neutral):
            raise InvalidRequestError(
                f"{name} is not supported by this version of Penstock.",
                remedy=remedy,
                param=name,
                code="unsupported_parameter",
            )


def _is_same(value: object, neutral: object) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _alternatives(neutral: tuple[object, ...]) -> str:
    return " or ".join(msgspec.json.encode(value).decode() for value in (*neutral, None))


def refused_field(message: str, request_type: type[msgspec.Struct]) -> InvalidRequestError:
    """Return the error that names the field which msgspec's `message` complains about."""
    location = _AT.search(message)
    text = _AT.sub("", message)
    missing = re.fullmatch(r"Object missing required field `(.*)`", text)
    path = location[1] if location else ""
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequestError(f"{param} is required.", param=param, code="missing_required_parameter")
    param = path or None
    code = "out_of_range" if text == "Number out of range" else "invalid_type"
    words = _words_at(request_type, path) if text.startswith("Invalid enum value") else []
    remedy = f"Give one of: {', '.join(map(str, words))}." if words else ""
    return InvalidRequestError(
        f"{path}: {text}{'.' if remedy else ''}" if path else text, remedy=remedy, param=param, code=code
    )


def _words_at(request_type: type[msgspec.Struct], path: str) -> list[object]:
    """Return the values that the field at `path`, such as `messages[0].role`, may have.

    Return no values if the field's type does not list them.
    """
    kinds = [inspect.type_info(request_type)]
    for step in _STEP.findall(path):
        kinds = [inside for kind in kinds for inside in _inside(kind, step)]
    return [
        word
        for kind in kinds
        for alternative in alternatives(kind)
        if isinstance(alternative, inspect.LiteralType)
        for word in alternative.values
    ]


def _inside(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    for alternative in alternatives(kind):
        if isinstance(alternative, inspect.StructType):
            yield from (field.type for field in alternative.fields if field.encode_name == step)
        elif isinstance(alternative, inspect.ListType | inspect.VarTupleType):
            yield alternative.item_type
        elif isinstance(alternative, inspect.DictType):
            yield alternative.value_type


def alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """Return the members of a union, or `kind` alone, without the metadata of types."""
    inner = kind.type if isinstance(kind, inspect.Metadata) else kind
    members = inner.types if isinstance(inner, inspect.UnionType) else (inner,)
    return [member.type if isinstance(member, inspect.Metadata) else member for member in members]


def unknown_fields(body: Mapping[str, Any], request_type: type[msgspec.Struct]) -> list[str]:
    """Return the names of fields in a body that no server is known to have, and that are ignored.

    A field whose value is null counts as not given.
    """
    known = {*request_type.__struct_fields__, *NEUTRAL_VALUES, *OF_OTHER_ROUTES.get(request_type, ())}
    names = [name for name, value in body.items() if name not in known and value is not None]
    return names + _unknown_options(body, request_type)


def _unknown_options(body: Mapping[str, Any], request_type: type[msgspec.Struct]) -> list[str]:
    is_generating = issubclass(request_type, GenerateRequest | ResponsesRequest)
    options = (body.get("stream_options") or {}) if is_generating else {}
    of = ResponsesStreamOptions if request_type is ResponsesRequest else StreamOptions
    return [f"stream_options.{name}" for name in options if name not in of.__struct_fields__]


def warning_headers(
    unknown: Sequence[str], unused: Sequence[str] = (), skipped: Sequence[str] = ()
) -> dict[str, str]:
    """Return the header that warns of ignored fields, or no header if there are none.

    Characters that a header cannot carry safely become `?`, and long lists are cut.

    Args:
        unknown: fields that are ignored, as they are unknown.
        unused: fields that have no effect on this model.
        skipped: tools that the API would run itself, and that this server does not have.
    """
    parts = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("ignored unknown field(s)", unknown),
            ("without effect on this model", unused),
            ("skipped tool(s) that this server does not run", skipped),
        )
        if names
    ]
    return {WARNING_HEADER: "; ".join(parts)} if parts else {}


def _listed(names: Sequence[str]) -> str:
    shown = [_NOT_IN_HEADERS.sub("?", name[:MAX_FIELD_CHARACTERS]) for name in names[:MAX_NAMED_FIELDS]]
    more = len(names) - len(shown)
    tail = f" and {more} more" if more > 0 else ""
    return f"{', '.join(shown)}{tail}"
