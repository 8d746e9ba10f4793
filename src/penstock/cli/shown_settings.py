"""The settings in force, as they are shown: to the user as TOML for `--config`, to clients as values.

Called by `cli.serve`. Secrets are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.cli.terminal import one_line
from penstock.config.declared import ENGINE, SERVER, Declared, declared


def config_as_toml(
    given: Mapping[str, Any], model: str | None, origins: Mapping[str, str], version: str
) -> str:
    """Return every setting with its source, as TOML that `--config` reads back. Secrets are left out."""
    lines = [f"# penstock {version}: effective settings; feed back with --config FILE"]
    lines.append(_toml_line("model", model, origins.get("model", "default")))
    for each, value in _in_force(given):
        origin = origins.get(each.key, "default")
        if each.setting.is_secret:
            state = f"set by {origin}, not shown" if value else "not set"
            lines.append(f"# {each.key}: {state}")
        else:
            lines.append(_toml_line(each.key, value, origin))
    return "\n".join(lines) + "\n"


def shown_to_clients(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting by its key, for `/server_info`, which every holder of an API key may read.

    Keys and their files are only reported as set or not set. An address is cut to scheme, host and path.
    """
    secrets = {each.key for each, _ in _in_force(given) if each.setting.is_secret}
    return {
        each.key: (_set_or_not if each.key.removesuffix("-file") in secrets else _without_credentials)(value)
        for each, value in _in_force(given)
    }


def _in_force(given: Mapping[str, Any]) -> Iterator[tuple[Declared, Any]]:
    """Yield each setting of a server with its value, as it is given or by default."""
    for each in declared(*ENGINE, *SERVER):
        yield each, given.get(each.name, each.default)


def _set_or_not(value: Any) -> str:
    return "set" if value else "not set"


def _without_credentials(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) and "://" in value:
        parts = urlsplit(value)
        return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
    return value


def _toml_line(key: str, value: Any, origin: str) -> str:
    if value is None:
        return f"# {key} =  # {origin}: not set"
    return f"{key} = {_toml_value(value)}  # {one_line(origin)}"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
