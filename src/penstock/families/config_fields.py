"""The reading of untrusted configuration files, field by field.

Owns the limits and the checks; the family modules (`families.known.llama`, `families.known.qwen`) say which
fields they want. Every value that is missing, of the wrong type or out of range is a `ModelConfigError` that
names file and field. Knows nothing of what a field means.
"""

from __future__ import annotations

import json
import math
import reprlib
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ModelConfigError

MAX_CONFIG_BYTES = 4 << 20
MAX_CONFIG_DEPTH = 32

_REMEDY = "Correct the file or download the model again."
_UNSUPPORTED_REMEDY = "Use a model that Penstock supports, or correct the file if this value is a mistake."


def read_config(path: Path) -> ConfigFields:
    """Return the object in a JSON file, its size and depth limited."""
    try:
        value = json.loads(_read_limited(path).decode("utf-8"))
    except ValueError as error:  # malformed JSON, or not UTF-8
        raise ModelConfigError(f"{path.name} is not valid JSON: {error}.", remedy=_REMEDY) from error
    except RecursionError:
        raise _too_deep(path) from None
    if _is_deeper_than(value, MAX_CONFIG_DEPTH):
        raise _too_deep(path)
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path.name} holds {kind_of(value)}, not an object.", remedy=_REMEDY)
    return ConfigFields(value, file=path.name)


def _too_deep(path: Path) -> ModelConfigError:
    return ModelConfigError(
        f"{path.name} is nested more than {MAX_CONFIG_DEPTH} levels deep.", remedy=_REMEDY
    )


def _read_limited(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would block for ever
            raise ModelConfigError(f"{path} is not a regular file.", remedy=_REMEDY)
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ModelConfigError(
            f"{path} cannot be read: {error.strerror}.",
            remedy="Give the directory of a Hugging Face style checkpoint.",
        ) from error
    if len(content) > MAX_CONFIG_BYTES:
        raise ModelConfigError(f"{path.name} is larger than {MAX_CONFIG_BYTES} bytes.", remedy=_REMEDY)
    return content


def _is_deeper_than(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def _children(node: object) -> Sequence[object]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else ()


def kind_of(value: object) -> str:
    """Return a value in words that are safe to print: "an object", "a list", or the value, cut if long."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class ConfigFields:
    """One JSON object and its place in a file. A field that is `null` counts as absent.

    Args:
        values: the object's fields.
        file: name of the file, for errors.
        prefix: names of the sections around the object, for errors, such as "rope_scaling."; "": it is the
            whole file.
    """

    def __init__(self, values: Mapping[str, Any], *, file: str, prefix: str = "") -> None:
        self._values = values
        self._file = file
        self._prefix = prefix

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Return whether the field is there as null, for the few fields where that has a meaning."""
        return name in self._values and self._values[name] is None

    def values(self) -> dict[str, Any]:
        """Return all fields as they stand in the file, unchecked: for a library that reads them itself."""
        return dict(self._values)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number within `[low, high]`; required unless it has a default."""
        value = self._get(name, default)
        if type(value) is not int:  # bool is an int to Python, not to us
            raise self.error(name, f"an integer from {low} to {high}", value)
        if not low <= value <= high:
            raise self.error(name, f"an integer from {low} to {high}", value)
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """Return a finite number within `[low, high]`; required unless it has a default."""
        value = self._get(name, default)
        expected = f"a number from {low:g} to {high:g}"
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            raise self.error(name, expected, value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.error(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if type(value) is not str:
            raise self.error(name, "a string", value)
        return value

    def choice(self, name: str, allowed: Sequence[str], default: str | None = None) -> str:
        """Return a word that is supported; every other word is refused as unsupported."""
        value = self.text(name, default)
        if value not in allowed:
            raise self.unsupported(name, f"one of {', '.join(allowed)}", value)
        return value

    def text_list(self, name: str) -> list[str]:
        value = self._get(name, None)
        if not isinstance(value, list) or any(type(item) is not str for item in value):
            raise self.error(name, "a list of strings", value)
        return value

    def integer_list(self, name: str, low: int, high: int) -> list[int]:
        """Return whole numbers within `[low, high]`; an absent field gives none."""
        value = self._values.get(name)
        if value is None:
            return []
        items: list[int] = value if isinstance(value, list) else [low - 1]
        if any(type(item) is not int or not low <= item <= high for item in items):
            raise self.error(name, f"a list of integers from {low} to {high}", value)
        return items

    def number_list(self, name: str, low: float, high: float) -> list[float]:
        """Return finite numbers within `[low, high]`."""
        value = self._get(name, None)
        numbers: list[Any] = value if isinstance(value, list) else [None]
        for number in numbers:
            if type(number) not in (int, float) or not low <= number <= high:
                raise self.error(name, f"a list of numbers from {low:g} to {high:g}", number or value)
        return [float(number) for number in numbers]

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return one token id or a list of them; an absent field gives none."""
        value = self._values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise self.error(name, f"token ids from 0 to {vocab_size - 1}", token_id)
        return tuple(ids)

    def section(self, name: str) -> ConfigFields:
        """Return the object under `name`; an absent one is empty."""
        value = self._values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(name, "an object", value)
        return ConfigFields(value, file=self._file, prefix=f"{self._field(name)}.")

    def with_defaults(self, **values: Any) -> ConfigFields:
        """Return the same object with these values for fields that it lacks."""
        present = {name: value for name, value in self._values.items() if value is not None}
        return ConfigFields({**values, **present}, file=self._file, prefix=self._prefix)

    def with_values(self, **values: Any) -> ConfigFields:
        """Return the same object with these values in place of its own."""
        return ConfigFields({**self._values, **values}, file=self._file, prefix=self._prefix)

    def error(self, name: str, expected: str, value: object, *, remedy: str = _REMEDY) -> ModelConfigError:
        """Return the error for a field that is malformed or contradicts others, ready to raise."""
        field = self._field(name)
        return ModelConfigError(
            f"{self._file}: {field} must be {expected}, found {kind_of(value)}.", remedy=remedy, param=field
        )

    def unsupported(self, name: str, expected: str, value: object) -> ModelConfigError:
        """Return the error for a field of a sound file that asks for what is not built, ready to raise."""
        return self.error(name, expected, value, remedy=_UNSUPPORTED_REMEDY)

    def _field(self, name: str) -> str:
        """Return the full name of a field for messages. A name that the file chose may be any text."""
        is_plain = name.isprintable() and len(name) <= 64
        return f"{self._prefix}{name if is_plain else reprlib.repr(name)}"

    def _get(self, name: str, default: object) -> Any:
        value = self._values.get(name)
        if value is None and default is None:
            shown = "null" if name in self._values else "nothing"
            field = self._field(name)
            raise ModelConfigError(
                f"{self._file}: {field} is required, found {shown}.", remedy=_REMEDY, param=field
            )
        return default if value is None else value
