"""Splits each layer among the ranks of a stage, and tells which models can be split so [B2] [B3] [B9].

Asked by `engine.supervisor.launch` before anything is started, by `models.decoder` and by `layouts`.
Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from penstock.distributed.share import IDS, Share, even_share, head_share, near_share, vocab_share
from penstock.errors import UsageError
from penstock.families.experts_spec import ExpertShares, ExpertsSpec
from penstock.families.spec import ModelSpec
from penstock.kernels.quantized_groups import default_group_size, inputs_together


class ShardRule(Protocol):
    """A rank among those of its stage."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShares:
    """The attention heads that a rank has. A query head is on the same rank as the KV head that it reads."""

    queries: Share
    keys: Share

    @classmethod
    def of(cls, spec: ModelSpec, shard: ShardRule) -> HeadShares:
        return cls(
            queries=even_share(spec.num_heads, shard.rank, shard.size),
            keys=head_share(spec.num_kv_heads, shard.rank, shard.size),
        )


def require_shardable(spec: ModelSpec, size: int, *, expert_parallel: bool = False) -> None:
    """Raise `UsageError` if `size` ranks cannot share the layers; the error names the number in the way.

    Args:
        expert_parallel: each rank is to have whole experts (`layers.compute.Compute`).
    """
    reason = _in_the_way(spec, size, expert_parallel=expert_parallel)
    if reason is None:
        return
    sizes = range(1, spec.num_heads + 1)
    good = [str(each) for each in sizes if _in_the_way(spec, each, expert_parallel=expert_parallel) is None]
    raise UsageError(
        f"tensor_parallel_size is {size}, but {reason}.",
        remedy=f"Use {', '.join(good)}; or use more stages (--pp).",
        param="tensor_parallel_size",
    )


def _in_the_way(spec: ModelSpec, size: int, *, expert_parallel: bool) -> str | None:
    """Return why `size` ranks cannot share the layers; None: they can."""
    if size == 1:
        return None
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % size:
        return f"the model has {heads} attention heads, which {size} ranks cannot share"
    if kv_heads % size and size % kv_heads:
        return (
            f"the model has {kv_heads} key-value heads, which {size} ranks can neither share nor replicate "
            "equally"
        )
    for what, _, inner in mlp_cuts(spec, expert_parallel=expert_parallel):
        if inner % size:
            return f"{what} is {inner} wide, which {size} ranks cannot share equally"
    if expert_parallel and spec.experts is not None and spec.experts.num_experts < size:
        return f"a layer has {spec.experts.num_experts} experts, fewer than the ranks"
    if spec.vocab_size < IDS * size:
        return f"a vocabulary of {spec.vocab_size} ids is too small for {size} ranks"
    return None


def require_whole_groups(
    spec: ModelSpec, size: int, load_bits: int | None, *, expert_parallel: bool = False
) -> None:
    """Raise `UsageError` if a group of quantised weights would lie on two ranks.

    The same holds for a group of the activations that they are multiplied with: the rounded numbers would
    depend on the layout.

    Args:
        load_bits: bits of weights that are quantised while they are loaded; None: they are not.
        expert_parallel: as for `require_shardable`.
    """
    if size == 1:
        return
    cuts = mlp_cuts(spec, expert_parallel=expert_parallel)
    widths = {name: inner for _, name, inner in cuts} | {"self_attn.o_proj": spec.attended_size}
    for name, width in widths.items():
        for unit in _groups_of(spec, name, width, load_bits):
            if width // size % unit:
                raise UsageError(
                    f"tensor_parallel_size is {size}, but {name} is quantised in groups: {width // size} of "
                    f"{width} inputs per rank are not a multiple of {unit}.",
                    remedy="Use fewer ranks per stage and more stages (--pp), or weights that are not "
                    "quantised.",
                    param="tensor_parallel_size",
                )


def _groups_of(spec: ModelSpec, name: str, width: int, load_bits: int | None) -> set[int]:
    """Return at which multiples the inputs of a projection can be cut: the numbers of all layers."""
    if load_bits is not None:
        return {inputs_together(default_group_size(load_bits, width), width)}
    if spec.quantization is None:
        return set()
    names = [f"model.layers.{layer}.{name}" for layer in range(spec.num_layers)]
    units = [spec.quantization.inputs_of_unit(projection, width) for projection in names]
    return {unit for unit in units if unit is not None}


def mlp_cuts(spec: ModelSpec, *, expert_parallel: bool) -> list[tuple[str, str, int]]:
    """Return the parts of MLPs and experts that are cut by their width.

    Returns:
        For each part: its name in words; the name, within a layer, of the projection whose inputs are cut
        (for experts, that of the first one); and the number of these inputs.
    """
    dense = ("the MLP", "mlp.down_proj", spec.intermediate_size)
    experts = spec.experts
    if experts is None:
        return [dense]
    names = experts.names
    cuts = [dense] if experts.dense_layers else []
    if not expert_parallel:
        cuts.append(("an expert", f"{names.block}.experts.0.{names.down}", experts.inner_size))
    if experts.has_shared:
        cuts.append(("the shared expert", f"{names.block}.{names.shared}.{names.down}", experts.shared_size))
    return cuts


def rank_spec(spec: ModelSpec, shard: ShardRule, *, expert_parallel: bool = False) -> ModelSpec:
    """Return the model as one rank of a stage has it: its heads, its part of MLPs or experts, its ids.

    The sums of `ModelSpec` are then the rank's own, but for the router: every rank has the whole router, and
    the sums count only the part of the rank's own experts (`router_parameters_elsewhere`).

    Args:
        shard: the rank, in a stage of a size that `require_shardable` accepts.
        expert_parallel: the rank has whole experts.
    """
    if shard.size == 1:
        return spec
    heads = HeadShares.of(spec, shard)
    return replace(
        spec,
        num_heads=heads.queries.size,
        num_kv_heads=heads.keys.size,
        intermediate_size=near_share(spec.intermediate_size, shard.rank, shard.size).size,
        vocab_size=vocab_share(spec.vocab_size, shard.rank, shard.size).size,
        experts=None if spec.experts is None else _rank_experts(spec.experts, shard, expert_parallel),
    )


def _rank_experts(experts: ExpertsSpec, shard: ShardRule, expert_parallel: bool) -> ExpertsSpec:
    own = ExpertShares.of(experts, shard.rank, shard.size, whole_experts=expert_parallel)
    return replace(
        experts, num_experts=own.experts.size, inner_size=own.inner.size, shared_size=own.shared.size
    )


def router_parameters_elsewhere(spec: ModelSpec, own: ModelSpec, layer: int) -> int:
    """Return how many parameters of a layer's router `rank_spec` leaves out: the part of other experts."""
    experts, kept = spec.experts_of(layer), own.experts
    if experts is None or kept is None:
        return 0
    return (experts.num_experts - kept.num_experts) * (spec.hidden_size + experts.routing.is_corrected)
