"""`Setting` describes a flag: it annotates the field of a config that the flag sets.

The structs of `config` annotate each field that a user can set with a `Setting`; `config.declared` collects
them. A setting is declared nowhere else. The command line, `--help`, the settings file, `docs/flags.md` and
the arguments of `LLM` follow from the `Setting`, from the field's name, type and default, and from the
struct's docstring. This module imports no command-line library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

ENV_PREFIX = "PENSTOCK_"


def as_given(value: Any) -> Any:
    """Return the value unchanged, for fields that hold what the command line has read."""
    return value


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of how one field of a config is set from outside.

    Attributes:
        group: page of `--help GROUP` that shows the flag.
        help: the flag's line on that page.
        flag: the flag; its name without dashes is the key in a settings file. "" derives the flag from the
            field's name: `queue_timeout_s` is set by `--queue-timeout`.
        aliases: further names of the flag.
        off: flag that switches the setting off; "": there is no such flag.
        env: the only environment variable for the setting; "": one variable for each name of the flag.
        text_type: type that the command line reads, if it is not the field's type.
        read: makes the field's value of what the command line has read; raises `UsageError`.
        may_look_like_flag: whether a value may begin with a hyphen.
        is_secret: whether the value must never be shown.
        is_argument: whether `LLM` has an argument of the field's name. It has none of the HTTP server's.
    """

    group: str
    help: str
    _: KW_ONLY
    flag: str = ""
    aliases: tuple[str, ...] = ()
    off: str = ""
    env: str = ""
    text_type: Any = None
    read: Callable[[Any], Any] = as_given
    may_look_like_flag: bool = False
    is_secret: bool = False
    is_argument: bool = True

    def names(self, field: str) -> tuple[str, ...]:
        """Return all names of the flag that sets the field; the first one is its key in a settings file."""
        return (self.flag or flag_named_for(field), *self.aliases)


def flag_named_for(field: str) -> str:
    """Return the flag that is derived from a field's name, without the unit (`_ms` or `_s`) at its end."""
    return "--" + field.removesuffix("_ms").removesuffix("_s").replace("_", "-")


def environment_names_of(flags: Sequence[str]) -> list[str]:
    """Return the environment variables for a flag, one for each name, the shortest first.

    Names with a single hyphen, such as `-q`, have none.
    """
    long = sorted((name for name in flags if name.startswith("--") or not name.startswith("-")), key=len)
    return [ENV_PREFIX + name.lstrip("-").upper().replace("-", "_") for name in long]
