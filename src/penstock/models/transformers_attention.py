"""The bridge from transformers' layers to our paged attention.

transformers looks attention up by name; `attend` is registered there under `NAME`
(`models.transformers_survey`). Queries and keys arrive rotated. Scale, window and the like arrive as keyword
arguments; one that is not supported is refused. A `Site`, which is set on every module of a layer, says which
layer calls, and in which forward pass: transformers' own arguments do not say that in every family of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from penstock.errors import UnsupportedModelError
from penstock.kernels.cpu.ops import Sight

NAME = "penstock"

_SITE = "penstock_site"
# Arguments that are ignored: they do not change the attention, or our own metadata has them.
_OF_NO_MATTER = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_KNOWN = frozenset({"scaling", "sliding_window", "softcap"})


class Passage(Protocol):
    """One forward pass over the layers."""

    @property
    def num_tokens(self) -> int: ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
        """Return the attention of a layer of the model.

        Args:
            query: [1, num_heads, num_tokens, head_dim], rotated.
            key, value: [1, num_kv_heads, num_tokens, head_dim], the key rotated.

        Returns:
            [1, num_tokens, num_heads, head_dim]
        """
        ...


class Track:
    """The holder of the forward pass that runs; one per stage."""

    def __init__(self) -> None:
        self._running: Any = None

    @property
    def running(self) -> Any:
        """The pass (`Passage`)."""
        assert self._running is not None, "no forward pass runs"
        return self._running

    @contextmanager
    def run(self, passage: Passage) -> Iterator[None]:
        """Set this passage until the end of the block."""
        self._running = passage
        try:
            yield
        finally:
            self._running = None


class Site:
    """The place of a layer in a model, by which a call of its attention is told from others.

    Args:
        layer: number of the layer.
        track: holds the forward pass that runs.
    """

    def __init__(self, layer: int, track: Track) -> None:
        self.layer, self.track = layer, track

    def bind(self, module: nn.Module) -> None:
        """Set this place on every module in the layer `module`."""
        for part in module.modules():
            setattr(part, _SITE, self)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as transformers calls it: return the result of `Passage.attend`, and no weights.

    Args:
        query: [1, num_heads, num_tokens, head_dim], rotated.
        key, value: [1, num_kv_heads, num_tokens, head_dim], the key rotated.

    Returns:
        [1, num_tokens, num_heads, head_dim], and None.

    Raises:
        UnsupportedModelError: the model asks for attention that is not built, such as a mask of its own.
    """
    site = getattr(module, _SITE, None)
    if site is None:
        raise refused(type(module).__name__, "it uses attention outside the layers")
    if attention_mask is not None:
        raise refused(type(module).__name__, "it uses its own mask")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise refused(
            type(module).__name__,
            f"it has keys of {key.shape[-1]} and values of {value.shape[-1]} numbers a head",
        )
    sight = read_sight(module, query.shape[-1], kwargs)
    return site.track.running.attend(site.layer, query, key, value, sight), None


def read_sight(module: nn.Module, head_dim: int, kwargs: Mapping[str, Any]) -> Sight:
    """Return scale, soft cap and window from the arguments that a layer gives to its attention."""
    if not (getattr(module, "is_causal", True) and kwargs.get("is_causal") in (None, True)):
        raise refused(type(module).__name__, "it looks in both directions")
    for name, value in kwargs.items():
        if name in _OF_NO_MATTER or name in _KNOWN or name == "is_causal":
            continue
        if value is not None and value is not False and not (name == "dropout" and value == 0):
            raise refused(type(module).__name__, f"its attention uses {name}, which is not supported")
    scale = kwargs.get("scaling")
    return Sight(
        scale=float(head_dim**-0.5 if scale is None else scale),
        soft_cap=float(kwargs.get("softcap") or 0.0),
        window=int(kwargs.get("sliding_window") or 0),
    )


def refused(architecture: str, why: str) -> UnsupportedModelError:
    """Return the error for a model that cannot be served by transformers' layers."""
    text = " ".join(why.split())[:600]
    return UnsupportedModelError(
        f"{architecture} cannot run through transformers' layers: {text}.",
        remedy="Use another model, or an architecture that Penstock implements.",
        param="architectures",
    )
