"""The flags of commands: those that a command defines itself, and those that the configs declare.

`flag` makes one flag. `with_settings` gives a command a flag for each setting of some configs. The values
that a user gives reach the command as keyword arguments, by the names of the configs' fields. Of these
`config.declared` and `cli.settings` make configs. `cli.help` and `cli.sources` read the flags.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Annotated, TypeVar

from cyclopts import Parameter

from penstock.config.declared import Config, Declared, declared

SERVED_ENV = "PENSTOCK_MODEL_NAME"  # for clients; PENSTOCK_MODEL is the model that a server is to serve

Command = TypeVar("Command", bound=Callable[..., int])


def flag(
    help_text: str,
    *names: str,
    group: str,
    env: str | None = None,
    leading_hyphen: bool = False,
    negative: str = "",
) -> Parameter:
    """Return a flag. If a user gives it twice, the last value counts.

    Args:
        help_text: its line of help.
        names: its names; the first one, without dashes, is the key in a settings file.
        group: the help page that shows it.
        env: the only environment variable for it; None: one for each name.
        leading_hyphen: whether a value may look like a flag.
        negative: name of the flag that switches it off; "": there is none.
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
        without: names of settings for which the command has flags of its own.
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
