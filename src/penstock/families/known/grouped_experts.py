"""Many small experts beside shared ones, as in DeepSeek and in the families that have taken this over.

Called by the families' modules (`families.known.deepseek`, `families.known.glm`, `families.known.dots`). The
numbers that these pass are for configurations that do not give them; None: the configuration must.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.families.config_fields import ConfigFields
from penstock.families.experts_spec import MAX_EXPERTS, ExpertNames, ExpertsSpec, RoutingSpec
from penstock.families.spec import ModelSpec

_MAX_WIDTH = 1 << 20
_MAX_SHARED = 1024
_MAX_LAYERS = 1 << 20
_NAMES = ExpertNames(shared="shared_experts")


def read_experts(
    config: ConfigFields,
    spec: ModelSpec,
    counts: tuple[int | None, int | None],
    *,
    inner_size: int,
    num_shared: int,
    first: int,
) -> ExpertsSpec:
    """Return the experts without their routing.

    Args:
        counts: number of experts of a layer, and of those that are chosen for a token.
        inner_size: inner width of an expert, between its projections up and down.
        num_shared: number of experts that all tokens go through.
        first: number of layers at the start with a plain MLP.
    """
    num_experts = config.integer("n_routed_experts", 1, MAX_EXPERTS, counts[0])
    inner_size = config.integer("moe_intermediate_size", 1, _MAX_WIDTH, inner_size)
    if config.is_null("n_shared_experts"):
        num_shared = 0
    return ExpertsSpec(
        num_experts=num_experts,
        num_chosen=config.integer("num_experts_per_tok", 1, num_experts, counts[1]),
        inner_size=inner_size,
        normalized=False,
        shared_size=inner_size * config.integer("n_shared_experts", 0, _MAX_SHARED, num_shared),
        is_shared_gated=False,
        dense_layers=_dense_layers(config, spec.num_layers, first),
        names=_NAMES,
    )


def corrected(
    config: ConfigFields,
    experts: ExpertsSpec,
    *,
    factor: float,
    groups: tuple[int, int] = (1, 1),
    normalized: bool = True,
) -> ExpertsSpec:
    """Return the experts chosen by sigmoids that are corrected for the choice (arXiv 2412.19437).

    Args:
        factor, normalized: as in `RoutingSpec` and `ExpertsSpec`.
        groups: number of groups, and of those from which experts are chosen.
    """
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    config.choice("topk_method", ("noaux_tc",), "noaux_tc")
    factor = config.number("routed_scaling_factor", 0.0, 1e6, factor)
    routing = RoutingSpec(scoring="sigmoid", factor=factor, in_float32=True)
    routing = grouped(config, routing, experts, groups)
    return replace(experts, normalized=config.flag("norm_topk_prob", normalized), routing=routing)


def grouped(
    config: ConfigFields, routing: RoutingSpec, experts: ExpertsSpec, defaults: tuple[int | None, int | None]
) -> RoutingSpec:
    """Return the routing with the groups of the configuration.

    Args:
        defaults: number of groups, and of those from which experts are chosen.
    """
    num_groups = config.integer("n_group", 1, experts.num_experts, defaults[0])
    size, rest = divmod(experts.num_experts, num_groups)
    if rest or (size < 2 and routing.is_corrected):
        expected = f"such that it divides n_routed_experts ({experts.num_experts})"
        expected += " into groups of two or more" if routing.is_corrected else ""
        raise config.error("n_group", expected, num_groups)
    num_chosen = config.integer("topk_group", 1, num_groups, defaults[1])
    if num_chosen * size < experts.num_chosen:
        expected = f"groups enough for num_experts_per_tok ({experts.num_chosen}) of {size} experts each"
        raise config.error("topk_group", expected, num_chosen)
    return replace(routing, num_groups=num_groups, num_chosen_groups=num_chosen)


def with_experts(spec: ModelSpec, experts: ExpertsSpec) -> ModelSpec:
    """Return the decoder with experts, if any layer has them."""
    if len(experts.dense_layers) == spec.num_layers:
        return replace(spec, has_mtp=False)  # the MTP layer would be the only one with experts
    return replace(spec, experts=experts)


def with_mtp(spec: ModelSpec, config: ConfigFields, num_layers: int) -> ModelSpec:
    """Return the decoder with its number of layers that guess further tokens.

    Args:
        num_layers: number of these layers.
    """
    num_unused = config.integer("num_nextn_predict_layers", 0, _MAX_LAYERS, num_layers)
    return replace(spec, num_unused_layers=num_unused, has_mtp=num_unused > 0)


def _dense_layers(config: ConfigFields, num_layers: int, first: int) -> frozenset[int]:
    """Return the layers with a plain MLP: the first, and those whose number the step does not divide."""
    first = config.integer("first_k_dense_replace", 0, _MAX_LAYERS, first)
    step = config.integer("moe_layer_freq", 1, _MAX_LAYERS, 1)
    return frozenset(layer for layer in range(num_layers) if layer < first or layer % step)
