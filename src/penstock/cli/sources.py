"""Where settings come from: flag, then environment, then TOML file, then default; and how to show that.

`cli` gives a `SettingSources` to cyclopts as its config step: it runs after the flags are read, fills what
they left open, and notes the source of every setting in the invocation. `config_as_toml` prints them so that
the text can be fed back.
Does not check values: the settings' types and the configs do.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cyclopts import Token

from penstock.cli.settings import ENV_PREFIX, SECRET_SETTINGS
from penstock.cli.terminal import Invocation, one_line
from penstock.errors import UsageError

if TYPE_CHECKING:
    from cyclopts import App, Argument, ArgumentCollection

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_NOT_IN_FILES = frozenset({"config", "print-config"})


def key_of(argument: Argument) -> str:
    """Name of a setting in TOML and in reports: its first flag without dashes, or `model`."""
    return argument.name.lstrip("-").lower()


def environment_names(argument: Argument) -> list[str]:
    """Environment names of a setting, the one for its help first: one for each name of the flag."""
    own = argument.parameter.env_var
    if own:
        return [own] if isinstance(own, str) else list(own)
    names = sorted((name for name in argument.names if not _is_short(name)), key=len)
    return [ENV_PREFIX + name.lstrip("-").upper().replace("-", "_") for name in names]


def _is_short(name: str) -> bool:
    return name.startswith("-") and not name.startswith("--")


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence naming the closest of the known words, or an empty one."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean {close[0]}?" if close else ""


class SettingSources:
    """cyclopts config step: fills settings without a flag from the environment and the `--config` file."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        settings = [argument for argument in arguments if argument.parse and argument.name != "*"]
        for argument in settings:
            # cyclopts has read the names that settings have of their own (`flag(env=...)`); below all are.
            argument.tokens[:] = [token for token in argument.tokens if token.source != "env"]
            if argument.has_tokens:
                self._invocation.origins[key_of(argument)] = "flag"
            else:
                self._take_environment(argument)
        self._take_file(settings)
        for argument in settings:
            self._invocation.origins.setdefault(key_of(argument), "default")

    def _take_environment(self, argument: Argument) -> None:
        for name in environment_names(argument):
            text = self._invocation.environ.get(name)
            if text:
                _fill(argument, text, name)
                self._invocation.origins[key_of(argument)] = f"environment {name}"
                return

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
                    f"{path} sets {raw_key}, which is no setting.",
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
    """The table of a settings file. Raises `UsageError` with the place of the fault."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--config {path} cannot be read: {error.strerror}.",
            remedy="Give a readable file.",
            param="--config",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--config {path} is not TOML: {error}.",
            remedy="`penstock serve MODEL --print-config` prints a file to start from.",
            param="--config",
        ) from error


def _fill(argument: Argument, value: Any, where: str) -> None:
    """Give the setting a value from outside the command line, as if it had been typed."""
    many = argument.token_count()[1]
    if argument.hint is bool:
        argument.append(
            Token(keyword=where, value="", implicit_value=_boolean(value, where), source="config")
        )
        return
    if isinstance(value, (dict, bool)) or (isinstance(value, list) and not many):
        raise UsageError(
            f"{where} holds {value!r}, which is no value for {argument.name}.", param=argument.name
        )
    items = value if isinstance(value, list) else str(value).split(",") if many else [value]
    for index, item in enumerate(items):
        argument.append(Token(keyword=where, value=str(item), index=index, source="config"))


def _boolean(value: Any, where: str) -> bool:
    word = str(value).lower()
    if word not in _TRUE | _FALSE:
        raise UsageError(f"{where} is {value!r}; it must be true or false.", remedy="Write true or false.")
    return word in _TRUE


def config_as_toml(parts: Iterable[Any], model: str | None, origins: Mapping[str, str], version: str) -> str:
    """Every effective setting with its source, as TOML that `--config` reads back. Secrets are left out.

    Args:
        parts: dataclasses of settings, whose field names are the keys.
    """
    lines = [f"# penstock {version}: effective settings; feed back with --config FILE"]
    lines.append(_toml_line("model", model, origins.get("model", "default")))
    for part in parts:
        for item in fields(part):
            key = item.name.replace("_", "-")
            lines.append(_toml_line(key, getattr(part, item.name), origins.get(key, "default")))
    return "\n".join(lines) + "\n"


def shown_settings(parts: Iterable[Any]) -> dict[str, Any]:
    """Every effective setting by its key, for `/server_info`, which whoever holds an API key may read.

    Of keys and their files it is told whether they are set; of an address, nothing but scheme, host and path.
    """
    return {
        (key := item.name.replace("_", "-")): _shown(key, getattr(part, item.name))
        for part in parts
        for item in fields(part)
    }


def _shown(key: str, value: Any) -> Any:
    if key in SECRET_SETTINGS or key.removesuffix("-file") in SECRET_SETTINGS:
        return "set" if value else "not set"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) and "://" in value:
        parts = urlsplit(value)
        return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
    return value


def _toml_line(key: str, value: Any, origin: str) -> str:
    if key in SECRET_SETTINGS:
        state = f"set by {origin}, not shown" if value else "not set"
        return f"# {key}: {state}"
    if value is None:
        return f"# {key} =  # {origin}: not set"
    return f"{key} = {_toml_value(value)}  # {one_line(origin)}"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
