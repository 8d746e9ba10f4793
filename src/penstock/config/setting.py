"""`Setting`: what a field of a config says of the flag that sets it.

The structs of `config` annotate their fields with one; `config.declared` reads them. A setting is declared
nowhere else: the command line, `--help`, the settings file, `docs/flags.md` and the arguments of `LLM` follow
from it, from the field's name, type and default, and from the struct's docstring. Knows no library of command
lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

ENV_PREFIX = "PENSTOCK_"


def as_given(value: Any) -> Any:
    """Return the value: the field holds what the command line reads."""
    return value


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of how one field of a config is set from outside.

    Attributes:
        group: page of `--help GROUP` that shows the flag.
        help: its line there.
        flag: the flag, whose name is the key in a settings file; "" derives it from the field's name:
            `queue_timeout_s` is set by `--queue-timeout`.
        aliases: further names of the flag.
        off: flag that switches the setting off; "" where there is none.
        env: the only name in the environment; "" makes a name of each name of the flag.
        text_type: type that the command line reads, where it is not the field's.
        read: makes the field's value of what the command line has read; raises `UsageError`.
        may_look_like_flag: a value may begin with a hyphen.
        is_secret: the value is never shown.
        is_argument: of a setting of the engine: `LLM` has an argument of the field's name.
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
    """Return the flag of a field that does not name one: without the unit at the end of the field's name."""
    return "--" + field.removesuffix("_ms").removesuffix("_s").replace("_", "-")


def environment_names_of(flags: Sequence[str]) -> list[str]:
    """Return the names in the environment that follow from those of a flag, shortest first."""
    long = sorted((name for name in flags if name.startswith("--") or not name.startswith("-")), key=len)
    return [ENV_PREFIX + name.lstrip("-").upper().replace("-", "_") for name in long]
