"""Says where a GGUF file has the tensors that our layers know by the names of Hugging Face checkpoints.

`stored_tensors` maps a name such as `model.layers.0.self_attn.q_proj.weight` to a tensor of the file, to some
rows of a tensor (a file keeps the experts of a layer in one), or to pieces of several tensors. Called by
`families.gguf_config` and by the loader of weights. Torch-free; reads no tensor data.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import CheckpointError
from penstock.families.experts_spec import MAX_EXPERTS, ExpertNames
from penstock.families.gguf_fields import head_width, whole_number
from penstock.families.gguf_kinds import GgufKind, kind_of_file
from penstock.families.gguf_rope import ROPE_FACTORS
from penstock.gguf.file import GgufFile
from penstock.gguf.part import GgufTensor

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<part>(?:nextn\.)?[a-z0-9_]+)\.(?P<kind>weight|bias)")
_EXPERTS = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
_GATES_AND_UPS = "ffn_gate_up_exps"
_REORDERED = ("attn_q", "attn_k")
_ALL_HEADS = "attn_qkv"
_CORRECTION = "exp_probs_b"
_TO_KEYS, _TO_VALUES, _TO_BOTH = "attn_k_b", "attn_v_b", "attn_kv_b"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint as a GGUF file has it.

    Attributes:
        tensor: the tensor of the file that has its rows.
        first_row: number of its first row in `tensor`.
        shape: number of its rows, then sizes of all other dimensions.
        head_rows: rows of a head, if the rows of each head are in the order of ggml's rotation: row 2 i + j
            of a head in the file is row j * head_rows / 2 + i of that head in the checkpoint. 0: all rows are
            in the checkpoint's order.
        is_one_plus: the file has 1 + weight.
        is_transposed: its rows in the file are columns in the checkpoint.
        pieces: stored tensors whose rows, one below the other, are its own; it is then not read from
            `tensor`. Empty: it is stored as one.
    """

    tensor: GgufTensor
    first_row: int
    shape: tuple[int, ...]
    head_rows: int = 0
    is_one_plus: bool = False
    is_transposed: bool = False
    pieces: tuple[StoredTensor, ...] = ()

    @property
    def columns(self) -> int:
        """The number of values of a row in the file."""
        return math.prod(self.shape[1:])

    @property
    def checkpoint_rows(self) -> int:
        """The number of rows that it has in the checkpoint."""
        return self.columns if self.is_transposed else self.shape[0]


def stored_tensors(file: GgufFile, names: ExpertNames) -> dict[str, StoredTensor]:
    """Return the tensors of a file by the names that our layers have for them.

    A tensor whose name is not known keeps its name, by which the loader refuses it.

    Args:
        file: a file of an architecture that is served.
        names: names of the family's experts.

    Raises:
        CheckpointError: parts of one tensor do not fit together.
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
    layer, part, suffix = f"model.layers.{match['layer']}", match["part"], match["kind"]
    known = kind.name_of(part)
    name = tensor.name if known is None else f"{layer}.{known}.{suffix}"
    if part in _EXPERTS or part == _GATES_AND_UPS:
        yield from _experts(tensor, f"{layer}.{names.block}", _projections(part, names))
    elif part in (_TO_KEYS, _TO_VALUES):
        yield from _latent_expansion(file, match["layer"], part)
    elif part == _ALL_HEADS and known is None:
        yield from _apart(kind, file, tensor, layer, suffix)
    elif part == _CORRECTION:
        yield f"{layer}.{names.block}.gate.e_score_correction_bias", _whole(kind, tensor)
    elif kind.has_reordered_heads and part in _REORDERED:
        yield name, _whole(kind, tensor, head_rows=head_width(file))
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


def _projections(part: str, names: ExpertNames) -> tuple[str, ...]:
    """Return the projections whose rows a tensor of experts has, one below the other."""
    parts = ("gate", "up") if part == _GATES_AND_UPS else (_EXPERTS[part],)
    return tuple(getattr(names, each) for each in parts)


def _experts(
    tensor: GgufTensor, block: str, projections: tuple[str, ...]
) -> Iterator[tuple[str, StoredTensor]]:
    if len(tensor.shape) != 3 or tensor.shape[0] > MAX_EXPERTS or tensor.shape[1] % len(projections):
        yield tensor.name, StoredTensor(tensor=tensor, first_row=0, shape=tensor.shape)
        return
    count, rows, columns = tensor.shape
    rows //= len(projections)
    for index in range(count * len(projections)):
        expert, place = divmod(index, len(projections))
        yield (
            f"{block}.experts.{expert}.{projections[place]}.weight",
            StoredTensor(tensor=tensor, first_row=index * rows, shape=(rows, columns)),
        )


def _apart(
    kind: GgufKind, file: GgufFile, tensor: GgufTensor, layer: str, suffix: str
) -> Iterator[tuple[str, StoredTensor]]:
    """Cut a tensor of query, key and value projections for a family that has three tensors."""
    queries = whole_number(file, "attention.head_count")
    keys = whole_number(file, "attention.head_count_kv", queries)
    width, first = head_width(file), 0
    if tensor.shape[0] != (queries + 2 * keys) * width:
        yield tensor.name, _whole(kind, tensor)
        return
    for part, heads in (("q", queries), ("k", keys), ("v", keys)):
        rows = heads * width
        yield (
            f"{layer}.self_attn.{part}_proj.{suffix}",
            StoredTensor(
                tensor=tensor,
                first_row=first,
                shape=(rows, *tensor.shape[1:]),
                head_rows=width if kind.has_reordered_heads and part != "v" else 0,
            ),
        )
        first += rows


def _latent_expansion(file: GgufFile, layer: str, part: str) -> Iterator[tuple[str, StoredTensor]]:
    """Join the projections from latent vectors to keys and to values, which the file has apart.

    The checkpoint has a head's rows for keys and then those for values. The file has each head's projection
    to keys transposed. Some files have the checkpoint's tensor as well: it is taken, and these two are not.
    """
    both, keys, values = (f"blk.{layer}.{name}.weight" for name in (_TO_BOTH, _TO_KEYS, _TO_VALUES))
    if both in file.tensors or (part == _TO_VALUES and keys in file.tensors):
        return
    heads = whole_number(file, "attention.head_count")
    rank = whole_number(file, "attention.kv_lora_rank")
    to_keys, to_values = (_heads(file, name, heads) for name in (keys, values))
    if to_keys.shape[0] != rank or to_values.columns != rank:
        raise CheckpointError(
            file=file.path.name,
            tensor=keys,
            expected=f"{rank} rows for each of {heads} heads, and as many columns of {values}",
            found=f"{to_keys.shape[0]} and {to_values.columns}",
        )
    pieces = tuple(
        dataclasses.replace(stored, first_row=head * stored.shape[0])
        for head in range(heads)
        for stored in (dataclasses.replace(to_keys, is_transposed=True), to_values)
    )
    rows = heads * (to_keys.columns + to_values.shape[0])
    name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
    yield name, StoredTensor(tensor=to_keys.tensor, first_row=0, shape=(rows, rank), pieces=pieces)


def _heads(file: GgufFile, name: str, heads: int) -> StoredTensor:
    """Return the first of equal parts of a tensor, one for each head."""
    tensor = file.tensors.get(name)
    shape = () if tensor is None else tensor.shape
    fits = len(shape) == 2 or (len(shape) == 3 and shape[0] == heads)
    rows = math.prod(shape[:-1])
    if tensor is None or not fits or rows % max(heads, 1):
        raise CheckpointError(
            file=file.path.name,
            tensor=name,
            expected=f"equal parts for {heads} heads",
            found="no such tensor" if tensor is None else f"shape {list(tensor.shape)}",
        )
    return StoredTensor(tensor=tensor, first_row=0, shape=(rows // heads, tensor.shape[-1]))
