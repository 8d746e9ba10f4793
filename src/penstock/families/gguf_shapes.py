"""Checks whether a GGUF file has the model's large tensors, in the shapes that the metadata state.

Checked when the configuration is read: a size in the metadata that the tensors do not have is then an error
before memory is planned or taken by it. `require_stored` is the check of one tensor, for the loader of
weights too, which looks at all of them. Torch-free; reads no tensor data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.errors import CheckpointError
from penstock.families.gguf_names import StoredTensor
from penstock.families.latent_spec import LatentSpec
from penstock.families.spec import ModelSpec

_Shapes = Iterator[tuple[str, tuple[int, int]]]


def require_shapes(stored: Mapping[str, StoredTensor], spec: ModelSpec, file: str) -> None:
    """Raise `CheckpointError` at the first large matrix that is missing or of another shape.

    Args:
        stored: the tensors of the file, by the names of the model's weights.
        spec: the model as the metadata say it.
        file: name of the file, for the error.
    """
    for name, shape in _matrices(spec):
        found = require_stored(stored, name, shape, file)
        if found.pieces and spec.latent is not None:
            _require_halves(found, spec.latent)


def require_stored(
    stored: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...], file: str
) -> StoredTensor:
    """Return a tensor. Raises `CheckpointError` if it is missing or of another shape."""
    found = stored.get(name)
    if found is None:
        raise CheckpointError(file=file, tensor=name, expected="this tensor", found="no tensor of its kind")
    if found.shape != shape:
        raise CheckpointError(
            file=found.tensor.path.name,
            tensor=found.tensor.name,
            expected=f"{list(shape)} by the file's metadata",
            found=f"{list(found.shape)}",
        )
    return found


def _require_halves(stored: StoredTensor, latent: LatentSpec) -> None:
    """Raise `CheckpointError` if the first head's pieces do not have the widths of its keys and values."""
    sizes = {"keys": latent.plain_dim, "values": latent.value_dim}
    for (what, size), piece in zip(sizes.items(), stored.pieces, strict=False):
        if piece.checkpoint_rows != size:
            raise CheckpointError(
                file=piece.tensor.path.name,
                tensor=piece.tensor.name,
                expected=f"{what} of {size} numbers by the file's metadata",
                found=str(piece.checkpoint_rows),
            )


def _matrices(spec: ModelSpec) -> _Shapes:
    """Yield name and shape of the matrices that take most of a model's memory."""
    yield "model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)
    if not spec.tie_word_embeddings:
        yield "lm_head.weight", (spec.vocab_size, spec.hidden_size)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        for name, shape in _of_attention(spec):
            yield f"{layer}.self_attn.{name}.weight", shape
        for name, shape in _of_mlp(spec, index):
            yield f"{layer}.{name}.weight", shape


def _of_attention(spec: ModelSpec) -> _Shapes:
    if spec.latent is not None:
        yield from _of_latent_attention(spec, spec.latent)
        return
    query, kv = spec.query_size, spec.kv_size
    outputs = {"q_proj": query, "k_proj": kv, "v_proj": kv}
    if spec.stored_together == "all":
        outputs = {"qkv_proj": query + 2 * kv}
    for name, rows in outputs.items():
        yield name, (rows, spec.hidden_size)
    yield "o_proj", (spec.hidden_size, query)


def _of_latent_attention(spec: ModelSpec, latent: LatentSpec) -> _Shapes:
    hidden, heads = spec.hidden_size, spec.num_heads
    queries = heads * latent.head_dim
    if latent.query_rank:
        yield "q_a_proj", (latent.query_rank, hidden)
        yield "q_b_proj", (queries, latent.query_rank)
    else:
        yield "q_proj", (queries, hidden)
    yield "kv_a_proj_with_mqa", (latent.width, hidden)
    yield "kv_b_proj", (heads * (latent.plain_dim + latent.value_dim), latent.rank)
    yield "o_proj", (hidden, heads * latent.value_dim)


def _of_mlp(spec: ModelSpec, index: int) -> _Shapes:
    """Yield the matrices of the MLP, or of a layer's first and last expert.

    All experts of a layer are rows of the same tensors, so the others are then there too.
    """
    hidden, experts = spec.hidden_size, spec.experts_of(index)
    if experts is None:
        inner = spec.intermediate_size
        outputs = {"gate_proj": inner, "up_proj": inner}
        if spec.stored_together != "nothing":
            outputs = {"gate_up_proj": 2 * inner}
        for name, rows in outputs.items():
            yield f"mlp.{name}", (rows, hidden)
        yield "mlp.down_proj", (hidden, inner)
        return
    names = experts.names
    for number in (0, experts.num_experts - 1):
        block = f"{names.block}.experts.{number}"
        yield f"{block}.{names.gate}", (experts.inner_size, hidden)
        yield f"{block}.{names.up}", (experts.inner_size, hidden)
        yield f"{block}.{names.down}", (hidden, experts.inner_size)
    if experts.has_shared:
        shared = f"{names.block}.{names.shared}"
        yield f"{shared}.gate_proj", (experts.shared_size, hidden)
        yield f"{shared}.up_proj", (experts.shared_size, hidden)
        yield f"{shared}.down_proj", (hidden, experts.shared_size)
