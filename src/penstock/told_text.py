"""Makes text from another process or host safe to print on the terminal and to write to the log.

The head shows names, errors and descriptions of workers in many places. All of them are cleaned once, when
they arrive: in `hosts.remote_host` from the agent of a worker, and in `executor.rank_sense` from a rank. Log
lines are cleaned by `hosts.logs.head_log`. `printable` cleans names from the headers of weight files.
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
    """Return a message in which every text has a bounded length and no control characters.

    Args:
        message: a struct, or a value of one of its fields.
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
    """Return a struct with clean text: the struct itself if its text is clean already, as it mostly is."""
    changed = {}
    for name in message.__struct_fields__:
        value = getattr(message, name)
        clean = _cleaned_trace(value) if name == _TRACE else cleaned(value)
        if clean != value:
            changed[name] = clean
    return msgspec.structs.replace(message, **changed) if changed else message


def _cleaned_trace(trace: str) -> str:
    """Return the last `MAX_TRACE_LINES` lines of a stack trace, each cleaned."""
    lines = trace.splitlines()[-MAX_TRACE_LINES:]
    return "".join(f"{shown_line(line)}\n" for line in lines)


def shown_line(line: str, max_chars: int = MAX_LINE_CHARS) -> str:
    """Return a line from another process as it may be shown: cut, and with control characters escaped.

    A tab becomes a space.
    """
    if len(line) > max_chars:
        line = f"{line[:max_chars]}… ({len(line) - max_chars} characters more)"
    return "".join(
        char if char.isprintable() else " " if char == "\t" else char.encode("unicode_escape").decode("ascii")
        for char in line
    )


def printable(text: str) -> str:
    """Return untrusted text of a file as it may be shown: printable, and cut to 120 characters."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= 120 else f"{shown[:117]}..."
