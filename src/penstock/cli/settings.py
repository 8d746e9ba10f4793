"""The settings of `penstock serve`: from what a user has given to the config of the HTTP server.

The structs of `config` declare the settings; `config.declared` makes the config of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.config.declared import configured
from penstock.config.limits import ConnectionLimits, GrammarLimits, Limits
from penstock.config.server import ServerConfig
from penstock.config.setting import Setting
from penstock.errors import UsageError


class ProgramConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one run of the program beside serving.

    Attributes:
        config: TOML file of settings.
        download: fetch the model first if it is one of the hub and not on this machine.
        print_config: print every setting and its source, and stop.
    """

    config: Annotated[Path | None, Setting("program", "TOML file of settings")] = None
    download: Annotated[bool, Setting("program", "download the model from the hub if it is missing")] = False
    print_config: Annotated[bool, Setting("program", "print every setting and its source, and exit")] = False


def configured_server(given: Mapping[str, Any]) -> ServerConfig:
    """Return the config of the HTTP server, with the keys of files read.

    Raises:
        UsageError: a setting is out of range, or a file of keys cannot be used.
    """
    keys = {
        "api_keys": _keys(given, "api_keys", "api_key_file", "--api-key"),
        "admin_keys": _keys(given, "admin_keys", "admin_key_file", "--admin-key"),
    }
    return configured(
        ServerConfig,
        given,
        **keys,
        limits=configured(Limits, given),
        connections=configured(ConnectionLimits, given),
        grammars=configured(GrammarLimits, given),
    )


def _keys(given: Mapping[str, Any], name: str, file_name: str, flag: str) -> list[str]:
    """Return the keys that are given one by one and those of the file."""
    keys = given.get(name, ())
    if any(not key.strip() for key in keys):
        raise UsageError(f"{flag} is empty.", param=flag, remedy=f"Use {flag}-file PATH.")
    return [*keys, *read_keys(given.get(file_name), f"{flag}-file")]


def read_keys(path: Path | None, name: str = "--api-key-file") -> list[str]:
    """Return the keys of a file, one a line; blank lines and lines that start with `#` are left out.

    Args:
        path: the file; None: there are no keys.
        name: the flag, for errors.
    """
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # Windows marks UTF-8 at the beginning
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(
            f"{name} {path} cannot be read: {reason}.",
            param=name,
            remedy="Give a readable text file with one key a line.",
        ) from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise UsageError(
            f"{name} {path} does not hold a key.",
            param=name,
            remedy="Write one key a line, or leave the flag out to serve without keys.",
        )
    return keys
