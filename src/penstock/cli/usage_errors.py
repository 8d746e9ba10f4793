"""The errors of a command line in our own words: no text of the command-line library reaches a user.

Called by `cli.program` for an error of the library. For a flag of vLLM, SGLang or llama.cpp the error comes
from `config.foreign_flags`; only for other flags it names a flag of ours that is spelled alike.
"""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from cyclopts import CoercionError, CycloptsError, MissingArgumentError, UnknownOptionError
from cyclopts.exceptions import UnusedCliTokensError

from penstock.cli.help import COMMANDS
from penstock.cli.sources import nearest
from penstock.config.foreign_flags import FOREIGN_FLAGS
from penstock.errors import UsageError

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection

_ENGINE_FLAG = "--pipeline-parallel-size"  # commands that have it take the settings of an engine
_FRACTION = re.compile(r"[+-]?\d*\.0*[1-9]\d*")
_NAMES_OF_TYPES = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}


def usage_error(
    error: CycloptsError, command: tuple[str, ...], words: Sequence[str], flags: Collection[str]
) -> UsageError:
    """Return our error for an error of the library: what is wrong with the command line, and what to do.

    Args:
        command: words of the command's name.
        words: the command line.
        flags: all names of all flags of the command.
    """
    called = f"penstock {' '.join(command)}"
    title, page = f"`{called}`", f"`{called} --help all` lists the flags."
    if (foreign := _foreign_flag(words, flags)) is not None:
        return foreign
    match error:
        case UnknownOptionError():
            name = (error.token.keyword or error.token.value).partition("=")[0]
            remedy = f"{nearest(name, flags)} {page}".strip()
            return UsageError(f"{title} has no flag {name}.", remedy=remedy, param=name)
        case CoercionError():
            return _wrong_value(error, page)
        case MissingArgumentError() if error.argument is not None:
            name = error.keyword or error.argument.name
            if name.startswith("-"):
                return UsageError(f"{name} needs a value.", remedy=page, param=name)
            return UsageError(f"no {name.lower()} is given.", remedy=_usage(command))
        case UnusedCliTokensError():
            extra = ", ".join(repr(word) for word in error.unused_tokens or ())
            return UsageError(f"{title} does not take the word {extra}.", remedy=_usage(command))
        case _:
            return UsageError(
                f"{title} cannot be run with these arguments.", remedy=f"{_usage(command)} {page}"
            )


def refuse_fractions(app: App, command: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse a value such as 1.5 for a whole number, which the library would round.

    `cli.program` gives this to the library as its last config step.

    Raises:
        CoercionError: a value has a fraction; `usage_error` makes our error of it.
    """
    for argument in arguments:
        types_taken = list(_types(argument.hint))
        if int not in types_taken or float in types_taken:
            continue
        for token in argument.tokens:
            if _FRACTION.fullmatch(token.value.strip()):
                raise CoercionError(argument=argument, token=token, target_type=int)


def _foreign_flag(words: Sequence[str], flags: Collection[str]) -> UsageError | None:
    """Return the answer to the first flag of another engine, for a command that has an engine's flags."""
    if _ENGINE_FLAG not in flags:
        return None
    for word in words:
        name = word.partition("=")[0]
        if name in FOREIGN_FLAGS and name not in flags:
            return FOREIGN_FLAGS[name].answer(name)
    return None


def _wrong_value(error: CoercionError, page: str) -> UsageError:
    """Return the error for a value that is not of the type of its setting."""
    argument, token = error.argument, error.token
    name = (token.keyword if token else None) or (argument.name if argument else "a setting")
    kinds = list(_kinds(argument.hint if argument else error.target_type))
    expected = " or ".join([*filter(None, [", ".join(kinds[:-1])]), *kinds[-1:]])
    value = token.value if token else ""
    remedy = f"{nearest(value, kinds)} {page}".strip()
    return UsageError(f"{name} is {value!r}; it must be {expected}.", remedy=remedy)


def _kinds(hint: Any) -> Iterator[str]:
    """Yield what a value of this type may be, in words."""
    parts = list(_types(hint))
    for part in parts:
        if get_origin(part) is Literal:
            yield from map(str, get_args(part))
        elif part is str and int in parts:
            yield "several with commas"
        else:
            yield _NAMES_OF_TYPES.get(part, "a text")


def _types(hint: Any) -> Iterator[Any]:
    """Yield the types that a single value may have. A `Literal` with all its choices counts as one type."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for part in get_args(hint):
            if part is not type(None):
                yield from _types(part)
    elif origin in (list, tuple):
        yield from _types(get_args(hint)[0])
    else:
        yield hint


def _usage(command: tuple[str, ...]) -> str:
    return f"Usage: {COMMANDS[command].usage}."
