"""The flags of commands: those that a command writes down itself, and those that the configs declare.

`flag` makes one. `with_settings` gives a command a flag for each setting of some configs; what a user gives
of them reaches the command as keyword arguments by the names of the configs' fields. `config.declared` and
`cli.settings` make configs of these; `cli.help` and `cli.sources` read the flags.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Annotated, TypeVar

from cyclopts import Parameter

from penstock.config.declared import Config, Declared, declared

SERVED_ENV = "PENSTOCK_MODEL_NAME"  # for clients; PENSTOCK_MODEL is the server's directory

Command = TypeVar("Command", bound=Callable[..., int])


def flag(
    help_text: str,
    *names: str,
    group: str,
    env: str | None = None,
    leading_hyphen: bool = False,
    negative: str = "",
) -> Parameter:
    """Return a flag: one line of help, its names (the first is the key in TOML), and the help page it is on.

    Given twice, the last one counts. `env` replaces the environment names that follow from the names.
    With `leading_hyphen` a value may look like a flag; `negative` is the name that switches it off.
    """
    return Parameter(
        name=list(names),
        help=help_text,
        group=group,
        negative=negative,
        env_var=env,
        allow_repeating=True,
        allow_leading_hyphen=leading_hyphen,
    )


def with_settings(*configs: Config, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Return a decorator of commands that take the settings of these configs as `**given`.

    Args:
        without: settings that the command has in a form of its own.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        settings = [each for each in declared(*configs) if each.name not in without]
        parameters = [*own, *map(_parameter, settings)]
        setattr(command, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
        return command

    return decorate


def _parameter(declared: Declared) -> inspect.Parameter:
    setting = declared.setting
    made = flag(
        setting.help,
        *declared.flags,
        group=setting.group,
        env=setting.env or None,
        leading_hyphen=setting.may_look_like_flag,
        negative=setting.off,
    )
    return inspect.Parameter(
        declared.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=declared.default,
        annotation=Annotated[declared.text_type, made],
    )
