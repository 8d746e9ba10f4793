"""Many small experts beside shared ones, as DeepSeek has them and other families took them over.

Called by the families' modules (`families.known.deepseek`, `families.known.glm`, `families.known.dots`).
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
        counts: experts, and those of a token, of a configuration that does not say; the other numbers too.
        inner_size: width of the middle of an expert.
        num_shared: experts that all tokens go through.
        first: layers at the start with a plain MLP.
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
        factor, groups, normalized: of a configuration that does not say; groups are all, and those chosen.
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
    """Return the routing with the groups of the configuration, or these."""
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
        return replace(spec, has_mtp=False)  # that layer would have the only experts
    return replace(spec, experts=experts)


def with_mtp(spec: ModelSpec, config: ConfigFields, num_layers: int) -> ModelSpec:
    """Return the decoder with layers that guess further tokens; the first is used, if it is wanted.

    Args:
        num_layers: of a configuration that does not say.
    """
    num_unused = config.integer("num_nextn_predict_layers", 0, _MAX_LAYERS, num_layers)
    return replace(spec, num_unused_layers=num_unused, has_mtp=num_unused > 0)


def _dense_layers(config: ConfigFields, num_layers: int, first: int) -> frozenset[int]:
    """Layers with a plain MLP: the first, and those that are not at a multiple of the step."""
    first = config.integer("first_k_dense_replace", 0, _MAX_LAYERS, first)
    step = config.integer("moe_layer_freq", 1, _MAX_LAYERS, 1)
    return frozenset(layer for layer in range(num_layers) if layer < first or layer % step)
