"""The names of the metrics of `/metrics`: ours, and with `--vllm-metric-names` vLLM's as well.

Dashboards and autoscalers that were made for vLLM then find the metrics that they read. Most of vLLM's names
differ from ours in the prefix alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

PREFIX = "penstock_"
VLLM_PREFIX = "vllm:"

# Our names without their prefix, each with vLLM's name without its prefix.
_OF_VLLM = {
    name: name
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    )
} | {
    "spec_drafted_tokens": "spec_decode_num_draft_tokens",
    "spec_accepted_tokens": "spec_decode_num_accepted_tokens",
}


def under_own_names(family: Metric) -> Iterable[Metric]:
    """Give the family under no other name: used in place of `under_vllm_names` where that is not wanted."""
    return ()


def under_vllm_names(family: Metric) -> Iterator[Metric]:
    """Give the family once more under vLLM's name, if vLLM has it, with the same labels and values."""
    own = family.name.removeprefix(PREFIX)
    if own not in _OF_VLLM:
        return
    name = VLLM_PREFIX + _OF_VLLM[own]
    copy = Metric(name, family.documentation, family.type)
    copy.samples = [
        sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples
    ]
    yield copy
