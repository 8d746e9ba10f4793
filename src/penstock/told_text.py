"""Makes text from another process or host safe to print on the terminal and to write to the log.

Names, errors and descriptions of a worker are shown at the head in many places. All of them pass here once:
when `hosts.remote_host` takes a message of its agent, and `executor.rank_sense` one of its ranks. Log lines
have a way of their own (`hosts.logs.head_log`). Names in headers of weight files pass `printable`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

MAX_LINE_CHARS = 500
MAX_TEXT_CHARS = 2000  # of one text; a child cuts its messages to fewer
MAX_TRACE_LINES = 60
_TRACE = "trace"  # the only field that has several lines

Message = TypeVar("Message")


def cleaned(message: Message) -> Message:
    """Return a message whose text has no control characters and is not too long.

    Args:
        message: a struct, or what stands in one.
    """
    clean: Any = message
    if isinstance(message, str):
        clean = shown_line(message, MAX_TEXT_CHARS)
    elif isinstance(message, list | tuple):
        clean = type(message)(cleaned(entry) for entry in message)
    elif isinstance(message, dict):
        clean = {cleaned(key): cleaned(value) for key, value in message.items()}
    elif isinstance(message, msgspec.Struct):
        clean = _cleaned_struct(message)
    return clean  # type: ignore[no-any-return]


def _cleaned_struct(message: msgspec.Struct) -> msgspec.Struct:
    """Return the struct itself where its text is clean, as almost always."""
    changed = {}
    for name in message.__struct_fields__:
        value = getattr(message, name)
        clean = _cleaned_trace(value) if name == _TRACE else cleaned(value)
        if clean != value:
            changed[name] = clean
    return msgspec.structs.replace(message, **changed) if changed else message


def _cleaned_trace(trace: str) -> str:
    """Return the end of a stack trace, line by line."""
    lines = trace.splitlines()[-MAX_TRACE_LINES:]
    return "".join(f"{shown_line(line)}\n" for line in lines)


def shown_line(line: str, max_chars: int = MAX_LINE_CHARS) -> str:
    """Return a line of another process as it may be shown: not too long, control characters made visible."""
    if len(line) > max_chars:
        line = f"{line[:max_chars]}… ({len(line) - max_chars} characters more)"
    return "".join(
        char if char.isprintable() else " " if char == "\t" else char.encode("unicode_escape").decode("ascii")
        for char in line
    )


def printable(text: str) -> str:
    """Return untrusted text of a file as it may be shown: printable, at most 120 characters."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= 120 else f"{shown[:117]}..."
