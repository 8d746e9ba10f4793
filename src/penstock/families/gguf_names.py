"""Where the tensors of a checkpoint are in a GGUF file, by the names that our layers have for them.

`stored_tensors` maps names such as `model.layers.0.self_attn.q_proj.weight` to a tensor, or to some rows of
one: a file keeps the experts of a layer in one tensor. Called by `families.gguf_config` and by the loader of
weights. Torch-free; reads no tensor data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.families.experts_spec import MAX_EXPERTS, ExpertNames
from penstock.families.gguf_kinds import GgufKind, kind_of_file, whole_number
from penstock.gguf.file import GgufFile
from penstock.gguf.part import GgufTensor

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# The rotation's factors: read with the configuration, and not as weights.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYER = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<part>[a-z0-9_]+)\.(?P<kind>weight|bias)")
_EXPERTS = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
_REORDERED = ("attn_q", "attn_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint as a GGUF file has it.

    Attributes:
        first_row: of `tensor`, from where its own rows begin. shape: of its own rows and all columns.
        head_rows: its rows are in groups of so many, each in the order of ggml's rotation: row 2 i + j of a
        group is
            row j * head_rows / 2 + i of the checkpoint's. 0: they are in order.
        is_one_plus: it is stored as 1 + weight.
    """

    tensor: GgufTensor
    first_row: int
    shape: tuple[int, ...]
    head_rows: int = 0
    is_one_plus: bool = False

    @property
    def columns(self) -> int:
        """Numbers of a row."""
        return math.prod(self.shape[1:])


def stored_tensors(file: GgufFile, names: ExpertNames) -> dict[str, StoredTensor]:
    """Return the tensors of a file by the names that our layers have for them.

    A tensor whose name is not known keeps it, so that whoever loads can refuse it by name.

    Args:
        file: of an architecture that is served.
        names: of the family's experts.
    """
    kind = kind_of_file(file)
    assert kind is not None, "refused before"
    return {
        name: stored
        for tensor in file.tensors.values()
        if tensor.name not in ROPE_FACTORS
        for name, stored in _stored(kind, file, tensor, names)
    }


def _stored(
    kind: GgufKind, file: GgufFile, tensor: GgufTensor, names: ExpertNames
) -> Iterator[tuple[str, StoredTensor]]:
    match = _LAYER.fullmatch(tensor.name)
    if match is None:
        yield _WHOLE.get(tensor.name, tensor.name), _whole(kind, tensor)
        return
    layer, part = f"model.layers.{match['layer']}", match["part"]
    if part in _EXPERTS:
        yield from _experts(tensor, f"{layer}.{names.block}", getattr(names, _EXPERTS[part]))
        return
    known = kind.name_of(part)
    name = tensor.name if known is None else f"{layer}.{known}.{match['kind']}"
    if kind.has_reordered_heads and part in _REORDERED:
        yield name, _whole(kind, tensor, head_rows=_head_dim(file))
    elif part == "ffn_gate_inp_shexp":  # a row, stored as a vector
        yield name, StoredTensor(tensor=tensor, first_row=0, shape=(1, math.prod(tensor.shape)))
    else:
        yield name, _whole(kind, tensor)


def _whole(kind: GgufKind, tensor: GgufTensor, *, head_rows: int = 0) -> StoredTensor:
    is_norm = "_norm." in tensor.name
    return StoredTensor(
        tensor=tensor,
        first_row=0,
        shape=tensor.shape,
        head_rows=head_rows,
        is_one_plus=kind.has_one_plus_norms and is_norm,
    )


def _experts(tensor: GgufTensor, block: str, projection: str) -> Iterator[tuple[str, StoredTensor]]:
    if len(tensor.shape) != 3 or tensor.shape[0] > MAX_EXPERTS:
        yield tensor.name, StoredTensor(tensor=tensor, first_row=0, shape=tensor.shape)
        return
    count, rows, columns = tensor.shape
    for expert in range(count):
        yield (
            f"{block}.experts.{expert}.{projection}.weight",
            StoredTensor(tensor=tensor, first_row=expert * rows, shape=(rows, columns)),
        )


def _head_dim(file: GgufFile) -> int:
    heads = whole_number(file, "attention.head_count")
    default = whole_number(file, "embedding_length") // max(heads, 1)
    return whole_number(file, "attention.key_length", default)
