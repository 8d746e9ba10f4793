"""Speculation as it is configured: who guesses tokens, and how many at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.config.checks import between
from penstock.config.setting import Setting
from penstock.errors import UsageError

SpeculativeMethod = Literal["off", "suffix"]
MOST_SPECULATIVE_TOKENS = 64

_METHODS = {"off": "off", "suffix": "suffix", "ngram": "suffix"}  # vLLM's names for what we have
_IGNORED = ("prompt_lookup_min", "prompt_lookup_max")  # lengths that are looked up: ours are fixed
_NAME = "speculative_config"
_EXAMPLE = """Give {"method": "suffix"}, for example."""


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who guesses what requests say next, so that one step yields several tokens.

    Attributes:
        speculative_method: who guesses: `off`: nobody; `suffix`: the request's own text, where it repeats.
        num_speculative_tokens: guesses of a request in one step at most; fewer where more would cost time.
        speculative_config: both as vLLM takes them: {"method": "suffix", "num_speculative_tokens": 8}.
    """

    speculative_method: Annotated[
        SpeculativeMethod, Setting("speculation", "who guesses tokens: off, or suffix (the text itself)")
    ] = "off"
    num_speculative_tokens: Annotated[
        int, Setting("speculation", "guesses of a request in one step at most")
    ] = 8
    speculative_config: ClassVar[
        Annotated[
            str | Mapping[str, Any] | None,
            Setting("speculation", "both as a JSON object, as vLLM takes it", text_type=str | None),
        ]
    ] = None

    def __post_init__(self) -> None:
        between("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_SPECULATIVE_TOKENS)

    @property
    def is_on(self) -> bool:
        return self.speculative_method != "off"

    @property
    def most_drafts(self) -> int:
        """Guessed tokens of a row in one step at most."""
        return self.num_speculative_tokens if self.is_on else 0


def with_speculative_config(
    config: SpeculationConfig, given: str | Mapping[str, Any] | None
) -> SpeculationConfig:
    """Return the config with what vLLM's object says of it.

    Args:
        given: the object, or JSON of it; None leaves the config as it is.

    Raises:
        UsageError: it is no such object, or asks for what is not built; names the field.
    """
    if given is None:
        return config
    fields = _parsed(given) if isinstance(given, str) else given
    if not isinstance(fields, Mapping):
        raise _refusal("it is not a JSON object", _EXAMPLE)
    fields = {name: value for name, value in fields.items() if name not in _IGNORED}
    method = fields.pop("method", "suffix")
    if not isinstance(method, str) or method not in _METHODS:
        known = ", ".join(sorted(_METHODS))
        raise _refusal(f"method is {method!r}", f"Methods are {known}. Models that draft are not built yet.")
    count = fields.pop("num_speculative_tokens", config.num_speculative_tokens)
    if type(count) is not int:
        raise _refusal(f"num_speculative_tokens is {count!r}", "Give a whole number.")
    if fields:
        name = next(iter(fields))
        raise _refusal(f"{name} is not known", "Give method and num_speculative_tokens, and nothing else.")
    return msgspec.structs.replace(config, speculative_method=_METHODS[method], num_speculative_tokens=count)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _refusal(f"it is not JSON ({error})", _EXAMPLE) from None


def _refusal(what: str, remedy: str) -> UsageError:
    return UsageError(f"{_NAME}: {what}.", remedy=remedy, param=_NAME)
