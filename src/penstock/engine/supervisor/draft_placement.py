"""Decides where and how the draft model, which guesses tokens ahead, runs beside the served model.

The draft model runs on the core's host in a process of its own, like a pipeline of one stage. This module
makes the config of an engine with one stage. `engine.supervisor.launch`, which calls it, hands it a function
that makes the settings of the process from such a config. This module starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from penstock.config.speculation import SpeculationConfig
from penstock.errors import PenstockError, UsageError, error_from_info
from penstock.families.registry import load_spec, resolve_model_directory, served_names
from penstock.families.spec import ModelSpec
from penstock.hosts.resources import HostResources
from penstock.process.config import DrafterConfig, RankConfig
from penstock.tokenizer.sources.model_files import vocabulary_file
from penstock.tokenizer.vocabularies import vocabulary_difference
from penstock.weights.checkpoint import Checkpoint

CHUNK_TOKENS = 256  # the most tokens of a text that the draft model computes at once; others wait
_PARAM = "speculative_model"

Decide = Callable[[EngineConfig, HostResources], RankConfig]


def drafter_config(
    config: EngineConfig,
    spec: ModelSpec,
    directory: Path,
    ranks: Sequence[RankConfig],
    head: HostResources,
    decide: Decide,
) -> DrafterConfig | None:
    """Return the config of the draft model's process, or None if no model drafts.

    Args:
        spec, directory: what the served model is, and where its files are.
        ranks: the ranks of all replicas, which serve that model.
        head: the core's host, with the free memory that is left when its ranks have loaded their weights.
        decide: returns the config of the only rank of an engine with one stage, on a host.

    Raises:
        UsageError: the draft model has another vocabulary, or a setting cannot be met.
        ModelError: the draft model cannot be read.
        NotEnoughMemoryError: the draft model does not fit into memory beside the ranks.
    """
    model = config.speculation.speculative_model
    if model is None:
        return None
    num_drafters = config.parallel.data_parallel_size  # each replica has a core, and each core a drafter
    own = msgspec.structs.replace(head, free_bytes=head.free_bytes // num_drafters)
    num_cpus = _num_idle_cpus(ranks, head) // num_drafters
    try:
        draft_directory = resolve_model_directory(model)
        draft_spec = load_spec(draft_directory, dequantize=config.model.gguf_dequantize)
        rank = decide(_engine_config(config, model, draft_spec, ranks[0], num_cpus), own)
    except PenstockError as error:
        message = f"the draft model {model}: {error.message}"
        remedy = re.sub(r"--(device|quantization)\b", r"--speculative-\1", error.remedy)
        info = msgspec.structs.replace(error.info(), message=message, remedy=remedy, param=_PARAM)
        raise error_from_info(info) from None
    _require_same_vocabulary(spec, directory, draft_spec, draft_directory, model)
    with_guesses = ranks[0].max_model_len + config.speculation.num_speculative_tokens + 1
    longest = min(rank.max_model_len, with_guesses)
    rank = msgspec.structs.replace(rank, max_model_len=longest, cpus=(), host=head.name)
    return DrafterConfig(rank=rank, vocab_size=spec.vocab_size)


def require_mtp(config: EngineConfig, spec: ModelSpec, directory: Path) -> None:
    """Raise `UsageError` if the model's own MTP layer is to guess tokens, but the model has no such layer."""
    if config.speculation.method != "mtp":
        return
    by = "" if spec.implementation == "penstock" else " when it runs with the layers of transformers"
    missing = f"{spec.architecture} has no MTP layer{by}"
    if spec.has_mtp:
        if not directory.is_dir():  # of a GGUF file, the spec names the layer only if the tensors are there
            return
        needed = f"model.layers.{spec.num_layers}.eh_proj.weight"
        if needed in Checkpoint(directory).names:
            return
        missing = f"the checkpoint has no tensor {needed}, which the MTP layer needs"
    raise UsageError(
        f"speculative_method is mtp, but {missing}.",
        remedy="Use --speculative-method suffix, or give a draft model with --speculative-model.",
        param="speculative_method",
        code="unsupported",
    )


def notes_on_drafter(
    model: str | None, drafter: DrafterConfig | None, ranks: Sequence[RankConfig]
) -> list[str]:
    """Return a sentence for the user on the model or MTP layer that guesses tokens ahead, if one does.

    Args:
        model: the draft model, as the user names it; None if no model drafts.
    """
    if ranks[-1].has_mtp:
        return [f"layer {ranks[-1].end_layer} drafts, on the last stage (--speculative-method mtp)."]
    if drafter is None or model is None:
        return []
    rank = drafter.rank
    form = rank.dtype if rank.quantization == "none" else rank.quantization
    layers = _counted(rank.end_layer, "layer")
    threads = f" with {_counted(rank.threads, 'thread')}" if rank.device == "cpu" else ""
    return [f"{served_names(model, ())[0]} drafts: {layers}, {form}, on {rank.device}{threads}."]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _engine_config(
    config: EngineConfig, model: str, draft_spec: ModelSpec, first: RankConfig, num_idle_cpus: int
) -> EngineConfig:
    """Return the config of an engine of one stage that serves the draft model."""
    speculation = config.speculation
    device = speculation.speculative_device
    if device == "auto":  # quantised weights run only on the CPU
        is_quantized = speculation.speculative_quantization != "none" or draft_spec.quantization is not None
        device = "cpu" if is_quantized else first.device
    scheduler = SchedulerConfig(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=max(CHUNK_TOKENS, config.scheduler.max_num_seqs),
    )
    return EngineConfig(
        model=ModelConfig(
            model=model,
            quantization=speculation.speculative_quantization,
            gguf_dequantize=config.model.gguf_dequantize,
        ),
        parallel=ParallelConfig(
            device=device,
            kernels=config.parallel.kernels,
            pin_threads="off",
            threads_per_rank=max(1, num_idle_cpus),
        ),
        scheduler=scheduler,
        cache=CacheConfig(block_size=config.cache.block_size),
        speculation=SpeculationConfig(speculative_method="off"),
    )


def _num_idle_cpus(ranks: Sequence[RankConfig], head: HostResources) -> int:
    """Return the number of the head's CPU cores that no rank computes on; it may be 0 or less.

    The draft model then gets one thread. Two threads on busy cores would be slower: a stage would often hold
    up one, and the other would wait for it.
    """
    return head.num_cpus - sum(rank.threads for rank in ranks if rank.host == head.name)


def _require_same_vocabulary(
    spec: ModelSpec, directory: Path, draft_spec: ModelSpec, draft_directory: Path, model: str
) -> None:
    difference = vocabulary_difference(directory, draft_directory)
    has_both = all(vocabulary_file(each) is not None for each in (directory, draft_directory))
    if not difference and not has_both and spec.vocab_size != draft_spec.vocab_size:
        difference = f"the served model has {spec.vocab_size} tokens, the draft model {draft_spec.vocab_size}"
    if difference:
        raise UsageError(
            f"the draft model {model} has a different vocabulary: {difference}.",
            remedy="Use a smaller model of the same family as draft model, or --speculative-method suffix.",
            param=_PARAM,
            code="other_vocabulary",
        )
