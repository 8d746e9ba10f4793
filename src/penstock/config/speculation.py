"""The settings of speculation: what guesses the next tokens, and how many at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.config.checks import between, is_device
from penstock.config.setting import Setting
from penstock.errors import UsageError

SpeculativeMethod = Literal["auto", "off", "suffix", "draft_model", "mtp"]
DraftQuantization = Literal["none", "int8", "int4"]
MOST_SPECULATIVE_TOKENS = 64

# Names of methods that vLLM's JSON object may have, and our names for them.
_METHODS = {
    "auto": "auto",
    "off": "off",
    "suffix": "suffix",
    "ngram": "suffix",
    "draft_model": "draft_model",
    "mtp": "mtp",
    "deepseek_mtp": "mtp",
}
_FIELDS = {
    "model": "speculative_model",
    "quantization": "speculative_quantization",
    "device": "speculative_device",
    "num_speculative_tokens": "num_speculative_tokens",
}
_IGNORED = ("prompt_lookup_min", "prompt_lookup_max")  # how much text vLLM looks up; ours is fixed
_NAME = "speculative_config"
_EXAMPLE = """Give {"method": "suffix"}, for example."""


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The drafter of a request's next tokens, by which one step yields several.

    Attributes:
        speculative_method: draft with `suffix` (the text), `draft_model` or `mtp` (a layer); `off`; `auto`.
        num_speculative_tokens: most draft tokens of a request in one step; fewer where more would cost time.
        speculative_model: directory or name of a draft model with the same vocabulary; this alone switches it
            on.
        speculative_quantization: weights of the draft model: `int8` or `int4`, on the CPU.
        speculative_device: device of the draft model, on the head's machine: `cpu`, `cuda`, a GPU such as
            `cuda:1`, or `auto`, the device of the first stage.
        speculative_config: a JSON object, as in vLLM: {"method": "suffix"}, or {"model": "small"}.
    """

    speculative_method: Annotated[
        SpeculativeMethod,
        Setting("speculation", "method: suffix (the text), draft_model, mtp, off"),
    ] = "auto"
    num_speculative_tokens: Annotated[
        int, Setting("speculation", "most draft tokens of a request in one step")
    ] = 8
    speculative_model: Annotated[
        str | None,
        Setting("speculation", "draft model, with the same vocabulary", is_argument=False),
    ] = None
    speculative_quantization: Annotated[
        DraftQuantization,
        Setting("speculation", "weights of the draft model: none, int8, int4", is_argument=False),
    ] = "none"
    speculative_device: Annotated[
        str, Setting("speculation", "device of the draft model: auto, cpu, cuda, cuda:N", is_argument=False)
    ] = "auto"
    speculative_config: ClassVar[
        Annotated[
            str | Mapping[str, Any] | None,
            Setting("speculation", "these settings as a JSON object, as in vLLM", text_type=str | None),
        ]
    ] = None

    def __post_init__(self) -> None:
        between("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_SPECULATIVE_TOKENS)
        if self.speculative_method == "draft_model" and self.speculative_model is None:
            raise UsageError(
                "speculative_method is draft_model, but no draft model is given.",
                remedy="Name it with --speculative-model, or use --speculative-method suffix.",
                param="speculative_model",
            )
        if self.speculative_method not in ("auto", "draft_model") and self.speculative_model is not None:
            raise UsageError(
                f"speculative_method is {self.speculative_method}, which needs no model; speculative_model "
                "names one.",
                remedy="Leave one of the two out.",
                param="speculative_model",
            )
        if self.speculative_device != "auto" and not is_device(self.speculative_device):
            raise UsageError(
                f"speculative_device is {self.speculative_device!r}.",
                remedy="Use auto, cpu, cuda or a GPU such as cuda:1.",
                param="speculative_device",
                code="out_of_range",
            )

    @property
    def method(self) -> SpeculativeMethod:
        """The method in force: `draft_model` if a draft model is named, else what the setting says.

        `auto` drafts as `suffix` does, but only if all stages compute so that drafts cannot change a token.
        """
        return "draft_model" if self.speculative_model is not None else self.speculative_method

    @property
    def is_on(self) -> bool:
        return self.method != "off"

    @property
    def most_drafts(self) -> int:
        """The most draft tokens of a row in one step."""
        return self.num_speculative_tokens if self.is_on else 0


def with_speculative_config(
    config: SpeculationConfig, given: str | Mapping[str, Any] | None
) -> SpeculationConfig:
    """Return the config with the settings of vLLM's object `speculative_config`.

    Args:
        given: the object, or JSON of it; None leaves the config as it is.

    Raises:
        UsageError: `given` is not such an object, or asks for an unsupported feature; the error names the
            field.
    """
    if given is None:
        return config
    fields = _parsed(given) if isinstance(given, str) else given
    if not isinstance(fields, Mapping):
        raise _refusal("it is not a JSON object", _EXAMPLE)
    fields = {name: value for name, value in fields.items() if name not in _IGNORED}
    if fields.pop("draft_tensor_parallel_size", 1) != 1:
        raise _refusal("draft_tensor_parallel_size is not 1", "The draft model runs in one process.")
    method = fields.pop("method", "draft_model" if "model" in fields else "suffix")
    if not isinstance(method, str) or method not in _METHODS:
        known = ", ".join(sorted(_METHODS))
        raise _refusal(f"method is {method!r}", f"Methods are {known}.")
    changed: dict[str, Any] = {"speculative_method": _METHODS[method]}
    if method == "off":
        changed["speculative_model"] = None
    for name, value in fields.items():
        if name not in _FIELDS:
            raise _refusal(f"{name} is not known", f"Give method, {', '.join(_FIELDS)}, and nothing else.")
        changed[_FIELDS[name]] = value
    return _checked(msgspec.structs.asdict(config) | changed)


def _checked(fields: Mapping[str, Any]) -> SpeculationConfig:
    try:
        return msgspec.convert(fields, SpeculationConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UsageError):
            raise error.__cause__ from None
        raise _refusal(str(error), _EXAMPLE) from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _refusal(f"it is not JSON ({error})", _EXAMPLE) from None


def _refusal(what: str, remedy: str) -> UsageError:
    return UsageError(f"{_NAME}: {what}.", remedy=remedy, param=_NAME)
