"""The sources of settings: flag, then environment, then TOML file, then default.

`cli.program` gives a `SettingSources` to cyclopts as a config step. It runs after the flags are read, fills
the settings that no flag has set, and notes the source of every setting in the invocation.
`cli.shown_settings` shows the sources. Values are not checked here, but by cyclopts and by the configs.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Token

from penstock.cli.terminal import Invocation
from penstock.config.setting import environment_names_of
from penstock.errors import UsageError

if TYPE_CHECKING:
    from cyclopts import App, Argument, ArgumentCollection

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_NOT_IN_FILES = frozenset({"config", "print-config"})


def key_of(argument: Argument) -> str:
    """Return the name of a setting in TOML and in reports: its first flag without dashes, or `model`."""
    return argument.name.lstrip("-").lower()


def environment_names(argument: Argument) -> list[str]:
    """Return the environment variables of a setting; help screens show the first one."""
    own = argument.parameter.env_var
    if own:
        return [own] if isinstance(own, str) else list(own)
    return environment_names_of(argument.names)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a sentence naming the closest of the known words, or an empty one."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean {close[0]}?" if close else ""


class SettingSources:
    """A config step of cyclopts: it fills settings without a flag from environment and `--config` file."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        settings = [argument for argument in arguments if argument.parse and argument.name != "*"]
        for argument in settings:
            # cyclopts has read the variables that `flag(env=...)` names. They are read again below, so that
            # all variables are treated alike.
            argument.tokens[:] = [token for token in argument.tokens if token.source != "env"]
            if argument.has_tokens:
                self._invocation.origins[key_of(argument)] = "flag"
            else:
                self._take_environment(argument)
        self._take_file(settings)
        self._leave_one_stage_whole(settings)
        for argument in settings:
            self._invocation.origins.setdefault(key_of(argument), "default")

    def _take_environment(self, argument: Argument) -> None:
        for name in environment_names(argument):
            text = self._invocation.environ.get(name)
            if text:
                _fill(argument, text, name)
                self._invocation.origins[key_of(argument)] = f"environment {name}"
                return

    def _leave_one_stage_whole(self, settings: list[Argument]) -> None:
        """Drop the layers per stage that the environment asks for, if there is only one stage."""
        by_key = {key_of(argument): argument for argument in settings}
        layers, stages = by_key.get("partition"), by_key.get("pipeline-parallel-size")
        if layers is None or stages is None or not self._is_of_environment("partition"):
            return
        if not stages.has_tokens or stages.tokens[-1].value.strip() == "1":
            layers.tokens.clear()
            del self._invocation.origins["partition"]

    def _is_of_environment(self, key: str) -> bool:
        return self._invocation.origins.get(key, "").startswith("environment")

    def _take_file(self, settings: list[Argument]) -> None:
        chosen = [argument for argument in settings if key_of(argument) == "config" and argument.has_tokens]
        if not chosen:
            return
        path = Path(chosen[0].tokens[0].value)
        by_key = _by_every_name(settings)
        for raw_key, value in read_toml(path).items():
            argument = by_key.get(raw_key.replace("_", "-"))
            if argument is None:
                raise UsageError(
                    f"{path} sets {raw_key}, which is not a setting.",
                    param=raw_key,
                    remedy=nearest(raw_key.replace("_", "-"), by_key) or "Remove the line.",
                )
            if not argument.has_tokens:
                _fill(argument, value, f"{path}, key {raw_key},")
                self._invocation.origins[key_of(argument)] = f"file {path}"


def _by_every_name(settings: list[Argument]) -> dict[str, Argument]:
    return {
        name.lstrip("-").lower(): argument
        for argument in settings
        for name in argument.names
        if key_of(argument) not in _NOT_IN_FILES
    }


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table of a settings file. Raises `UsageError` with the place of the fault."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows marks UTF-8 at the beginning
    except OSError as error:
        raise UsageError(
            f"--config {path} cannot be read: {error.strerror}.",
            remedy="Give a readable file.",
            param="--config",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"--config {path} is not TOML: {error}.",
            remedy="`penstock serve MODEL --print-config` prints a valid file.",
            param="--config",
        ) from error


def _fill(argument: Argument, value: Any, where: str) -> None:
    """Give a setting a value from the environment or the file, as if it had been typed.

    Args:
        where: the place of the value, for errors.
    """
    many = argument.token_count()[1]
    if argument.hint is bool:
        argument.append(
            Token(keyword=where, value="", implicit_value=_boolean(value, where), source="config")
        )
        return
    if isinstance(value, (dict, bool)) or (isinstance(value, list) and not many):
        raise UsageError(
            f"{where} holds {value!r}, which is not a valid value of {argument.name}.", param=argument.name
        )
    items = value if isinstance(value, list) else str(value).split(",") if many else [value]
    for index, item in enumerate(items):
        argument.append(Token(keyword=where, value=str(item), index=index, source="config"))


def _boolean(value: Any, where: str) -> bool:
    word = str(value).lower()
    if word not in _TRUE | _FALSE:
        raise UsageError(f"{where} is {value!r}; it must be true or false.", remedy="Write true or false.")
    return word in _TRUE
