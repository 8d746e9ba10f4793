"""The interface of model classes that can be cut into the stages of a pipeline [A7].

`runner.model_runner` runs any such model. `rank.loading` checks a class before it loads a model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from penstock.attention.metadata import AnyKV, AttentionMetadata
from penstock.errors import UnsupportedModelError
from penstock.kernels.candidates import HeadOutput, HeadRequest
from penstock.models.intermediate import IntermediateTensors

_logger = logging.getLogger(__name__)

_STAGE_INPUT = "tensors"

BeforeLayer = Callable[[int], None]  # takes the number of a layer, counted from the rank's first one


class SupportsPP(Protocol):
    """A model of which a stage can hold a part."""

    supports_pp: ClassVar[Literal[True]]
    make_empty_intermediate_tensors: Callable[[int], IntermediateTensors]

    def embed(self, input_ids: Tensor) -> IntermediateTensors:
        """Return the input of the first layer for `input_ids`, [num_tokens] int64."""
        ...

    def forward(
        self,
        tensors: IntermediateTensors,
        positions: Tensor,
        kv: Sequence[AnyKV],
        metadata: AttentionMetadata,
        before_layer: BeforeLayer | None = None,
    ) -> IntermediateTensors:
        """Run the own layers, those that this stage has.

        Args:
            tensors: [num_tokens, hidden] each, from `embed` or from the stage before.
            positions: [num_tokens] int64.
            kv: storage of the own layers, in order.
            before_layer: called before each own layer; None: nothing is.
        """
        ...

    def final_states(self, tensors: IntermediateTensors, indices: Tensor) -> Tensor:
        """Return the final norm of the tokens `indices` ([n] int64, rising): [n, hidden].

        A token of a step may be asked for once only, here or for its logits. The next call may write over the
        result.
        """
        ...

    def compute_candidates(
        self, tensors: IntermediateTensors, indices: Tensor, request: HeadRequest
    ) -> HeadOutput:
        """Return what `request` asks for of the logits after the tokens `indices` ([n] int64, rising)."""
        ...


def supports_pp(model_class: type) -> bool:
    """Return whether the class says that it can be cut *and* its `forward` takes a stage's input.

    If the class only sets the flag, its author has made a mistake: a warning is logged.
    """
    if not getattr(model_class, "supports_pp", False):
        return False
    forward = getattr(model_class, "forward", None)
    if forward is not None and _STAGE_INPUT in inspect.signature(forward).parameters:
        return True
    _logger.warning(
        "%s sets supports_pp, but its forward has no argument %r", model_class.__name__, _STAGE_INPUT
    )
    return False


def require_pp(model_class: type) -> None:
    """Refuse, before anything is loaded, a class that cannot be cut into stages."""
    if not supports_pp(model_class):
        raise UnsupportedModelError(
            f"{model_class.__name__} does not implement pipeline parallelism.", remedy="Use one stage."
        )
