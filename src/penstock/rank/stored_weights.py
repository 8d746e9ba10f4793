"""The weights of a model as its files hold them: safetensors, or blocks of a GGUF file.

`read_model` chooses by the model's path. It is called by `rank.loading`, which knows no format. That module
opens the weights, asks in which form to hold each matrix (`form_of`), and has the weights loaded into the
model (`load`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import nn

from penstock.config.engine import ModelImpl
from penstock.families.gguf_config import gguf_tensors
from penstock.families.gguf_names import StoredTensor
from penstock.families.quantization_spec import QuantizationSpec
from penstock.families.registry import load_gguf_spec, load_spec
from penstock.families.spec import ModelSpec
from penstock.gguf.file import GgufFile
from penstock.kernels.block_formats import BLOCK_FORMATS
from penstock.layers.block_matrix import BlockForms
from penstock.layers.compute import HeldForm
from penstock.layers.matrix import QuantizedFormat
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.gguf_loader import load_gguf
from penstock.weights.loader import LoadReport, load_weights
from penstock.weights.quantized_formats import QuantizedCheckpoint
from penstock.weights.read_digests import ReadDigests


class StoredWeights(Protocol):
    """The weights of a model, whatever the format of its files."""

    @property
    def is_quantized(self) -> bool:
        """Whether any of the weights is quantised in the files."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors in the files."""
        ...

    def form_of(self, parts: Mapping[str, int], in_size: int) -> HeldForm | None:
        """Return the form in which the files hold a matrix, which memory is to hold too; None: as floats.

        Args:
            parts: names of the projections that the matrix consists of, with the size of each one's output.
            in_size: the size of the input.
        """
        ...

    def load(
        self, model: nn.Module, progress: Callable[[int, int], None], left_out: frozenset[str]
    ) -> LoadReport:
        """Load the weights into a model (`weights.loader.load_weights`), except those in `left_out`.

        Args:
            progress: called with (bytes done, bytes in all).
            left_out: names of tensors in the files that are not loaded.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on disk: what it is, and its weights.

    Attributes:
        open_weights: opens the files with the weights; `StoredWeights.load` reads them. Its argument has the
            digests of the tensors that the engine's first load read, to be compared; it is empty at the
            first load.
    """

    spec: ModelSpec
    open_weights: Callable[[bytes], StoredWeights]


def read_model(path: Path, model_impl: ModelImpl = "auto", *, dequantize: bool = False) -> StoredModel:
    """Return the model that is at a path; arguments and errors are those of `load_spec`."""
    if path.is_dir():
        spec = load_spec(path, model_impl)
        return StoredModel(
            spec, lambda digests: SafetensorsWeights(Checkpoint(path, ReadDigests(digests)), spec)
        )
    # The header is read once for both: with a large vocabulary that takes a tenth of a second or more.
    file = GgufFile.open(path)
    spec = load_gguf_spec(file, dequantize=dequantize)
    stored = gguf_tensors(file, spec)
    return StoredModel(spec, lambda digests: GgufWeights(stored, spec, digests))


class SafetensorsWeights:
    """The weights of safetensors files, some of them perhaps quantised."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        self._checkpoint = checkpoint
        quantization = spec.quantization
        self._quantized: QuantizedCheckpoint | None = None
        if isinstance(quantization, QuantizationSpec):
            self._quantized = QuantizedCheckpoint(checkpoint, quantization)

    @property
    def is_quantized(self) -> bool:
        return self._quantized is not None

    @property
    def names(self) -> frozenset[str]:
        return self._checkpoint.names

    def form_of(self, parts: Mapping[str, int], in_size: int) -> QuantizedFormat | None:
        """Return the quantised form of a matrix if all its parts have the same in the files; None: floats.

        Args:
            parts: names of the projections that the matrix consists of, with the size of each one's output.
            in_size: the size of the input.
        """
        formats = set()
        quantized = self._quantized
        for projection, out_size in parts.items():
            if quantized is None or not quantized.holds(projection):
                return None
            if quantized.is_dense(projection, out_size, in_size):
                return None
            scheme = quantized.scheme(projection)
            formats.add(
                QuantizedFormat(
                    bits=scheme.bits,
                    group_size=min(scheme.group_size or in_size, in_size),
                    scale_dtype=quantized.scale_dtype(projection),
                    has_zeros=not scheme.symmetric,
                )
            )
        return formats.pop() if len(formats) == 1 else None

    def load(
        self, model: nn.Module, progress: Callable[[int, int], None], left_out: frozenset[str]
    ) -> LoadReport:
        return load_weights(model, self._checkpoint, progress, left_out=left_out, quantized=self._quantized)


class GgufWeights:
    """The weights of a GGUF file."""

    def __init__(self, stored: Mapping[str, StoredTensor], spec: ModelSpec, digests: bytes) -> None:
        self._stored = stored
        self._is_quantized = spec.quantization is not None
        self._digests = ReadDigests(digests)

    @property
    def is_quantized(self) -> bool:
        return self._is_quantized

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def form_of(self, parts: Mapping[str, int], in_size: int) -> BlockForms | None:
        """Return the block formats of those parts of a matrix that the file has.

        None is returned if the file has none of the parts, or one of them as floats.

        Args:
            parts: names of the projections that the matrix consists of, with the size of each one's output.
            in_size: not used.
        """
        stored = (self._stored.get(f"{projection}.weight") for projection in parts)
        names = [each.tensor.type.name for each in stored if each is not None]
        if not names or not all(name in BLOCK_FORMATS for name in names):
            return None
        return BlockForms(tuple(BLOCK_FORMATS[name] for name in dict.fromkeys(names)))

    def load(
        self, model: nn.Module, progress: Callable[[int, int], None], left_out: frozenset[str]
    ) -> LoadReport:
        return load_gguf(model, self._stored, progress, digests=self._digests, left_out=left_out)
