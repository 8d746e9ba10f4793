"""Decides from an `EngineConfig` the configuration of each process, the same for every backend.

`resolve` replaces every "auto" by a value (model directory, layer ranges, dtype, device, threads and their
cores), and refuses settings that do not go together. `--partition auto` was replaced by numbers before
(`engine.supervisor.auto_partition`). Called by the supervisor, and by `llm` for ranks that are threads.
Starts nothing and opens no socket.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from penstock.config.checks import MAX_TIMEOUT_S
from penstock.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, Quantization
from penstock.config.speculation import SpeculationConfig
from penstock.engine.supervisor.class_choice import require_class
from penstock.engine.supervisor.draft_placement import drafter_config, notes_on_drafter, require_mtp
from penstock.engine.supervisor.flight_room import (
    notes_on_frames,
    num_links_between_hosts,
    with_link_frames,
    with_plans_in_flight,
)
from penstock.engine.supervisor.host_blocks import host_blocks
from penstock.engine.supervisor.placement import (
    cpus_of_core,
    cpus_of_ranks,
    devices_of_ranks,
    hosts_of_ranks,
    no_quantised_weights_on_cuda,
    on_each_host,
    shared_threads,
)
from penstock.errors import NotEnoughMemoryError, UsageError
from penstock.families.registry import load_spec, resolve_model_directory
from penstock.families.sharding import require_shardable, require_whole_groups
from penstock.families.spec import ITEM_SIZES, ModelSpec
from penstock.families.transformers_fields import implementation_notes, require_plain
from penstock.faults import Fault
from penstock.hosts.resources import HostResources
from penstock.kernels.cpu.library import KERNEL_NAMES, parse_kernels
from penstock.kvstore.description import Description, encoded
from penstock.kvstore.names import model_identity, namespace
from penstock.kvstore.store import keeps_quota, open_store
from penstock.pipeline.links.frame import frame_bytes
from penstock.pipeline.partition import partition_layers
from penstock.pipeline.rank_layout import RankLayout
from penstock.process.config import CoreConfig, HostLink, RankConfig, StageShape, StoreConfig
from penstock.scheduler.admission import derive_seed

STALL_GRACE_S = 5.0  # the core waits so much longer than a rank, which knows the peer that it waits for

_REPLICAS = 0x2545F4914F6CDD1D  # makes the seeds of replicas differ from those of sequences

FloatType = Literal["float32", "bfloat16", "float16"]

QUANTIZATION_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightForm:
    """The form in which the weights are held, and the devices that hold them.

    Attributes:
        quantization: how to quantise weights at load, as in `RankConfig`.
        bits: the least bits that a parameter takes; parameters that are not quantised take more.
        notes: sentences for the user about decisions that no setting asked for.
    """

    devices: list[str]  # of each rank of all replicas: "cpu" or "cuda:N"
    dtype: FloatType
    quantization: Quantization
    bits: float
    notes: tuple[str, ...]


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a replica: everything about it that is decided before a process starts.

    Attributes:
        model_path: directory of the model's files.
        ranks: configs of the replica's ranks, stage by stage; those of one stage stand side by side.
        notes: sentences for the user, about what was decided for them.
        host_links: the links between hosts that are in use, with their measured speeds.
    """

    model_path: str
    spec: ModelSpec
    ranks: list[RankConfig]
    core: CoreConfig
    frame_bytes: int  # size of a frame of the links between stages
    notes: tuple[str, ...] = ()
    host_links: tuple[HostLink, ...] = ()

    @property
    def num_stages(self) -> int:
        return self.ranks[-1].num_stages

    @property
    def stage_shapes(self) -> list[StageShape]:
        firsts = [rank for rank in self.ranks if rank.tp_rank == 0]
        return [
            StageShape(
                start_layer=rank.start_layer,
                end_layer=rank.end_layer,
                num_ranks=rank.tp_size,
                host=rank.host,
            )
            for rank in firsts
        ]


def resolve(config: EngineConfig, hosts: Sequence[HostResources]) -> LaunchPlan:
    """Return the launch plan of the first replica, often the only one, as `resolve_replicas` does."""
    return resolve_replicas(config, hosts)[0]


def _only_rank(config: EngineConfig, host: HostResources) -> RankConfig:
    """Return the rank of an engine that has one, on this host."""
    return resolve(config, [host]).ranks[0]


def resolve_replicas(
    config: EngineConfig,
    hosts: Sequence[HostResources],
    of_stages: Sequence[HostResources] | None = None,
) -> list[LaunchPlan]:
    """Return the launch plan of each replica, with everything decided that does not need a tensor.

    Args:
        hosts: the hosts, in the order in which they get stages; the first is the head, where the core runs.
        of_stages: the host of each stage, in all replicas; None: `placement.hosts_of_ranks` decides.

    Raises:
        UsageError, PartitionError: a setting cannot be met by this model or machine.
        ModelError: the directory or its config.json is bad.
        NotEnoughMemoryError: the weights do not fit into what is free on a host.
    """
    parallel = config.parallel
    parse_kernels(parallel.kernels)
    directory = resolve_model_directory(config.model.model)
    spec = load_spec(directory, config.model.model_impl, dequantize=config.model.gguf_dequantize)
    require_plain(spec, config.model.quantization, parallel)
    require_mtp(config, spec, directory)
    layout = RankLayout(tp_sizes=tuple(parallel.tp_sizes), data_parallel_size=parallel.data_parallel_size)
    homes = hosts_of_ranks(layout, hosts)
    if of_stages is not None:
        homes = [of_stages[place.stage] for place in layout.places]
    given, parallel = parallel, with_plans_in_flight(parallel, homes)
    config = msgspec.structs.replace(config, parallel=parallel)
    form = _weight_form(config.model, parallel, spec, homes)
    config = msgspec.structs.replace(config, speculation=_speculation(config, spec, form))
    _check_tensor_parallel(parallel, spec, form)
    require_class(parallel, spec, form.dtype, form.devices, hosts)
    max_model_len = longest_request(config.model.max_model_len, spec)
    stages = parallel.pipeline_parallel_size
    ranges = partition_layers(spec.num_layers, stages, parallel.partition)
    weight_bytes = _weight_bytes(spec, ranges, config, form, homes)
    _check_weights_fit(weight_bytes, homes)
    wait_timeout_s = min(MAX_TIMEOUT_S, _step_timeout_s(config) * stages)
    ranks = _rank_configs(config, str(directory), form, ranges, max_model_len, wait_timeout_s, homes)
    core = _core_config(config, spec, str(directory), max_model_len, cpus_of_core(ranks, hosts[0]))
    kind = _kind(spec, form, ranges, parallel.tp_sizes)
    num_host_blocks = host_blocks(config.cache.kv_host_bytes, spec, ranks, ITEM_SIZES[form.dtype])
    store = _store_config(config, directory, kind, form.dtype, num_host_blocks)
    core = msgspec.structs.replace(core, store=store)
    ranks = [msgspec.structs.replace(rank, store=store) for rank in ranks]
    size_of_frame = frame_bytes(
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        width=spec.hidden_size,
        itemsize=ITEM_SIZES[form.dtype],
    )
    size = len(ranks) // parallel.data_parallel_size
    replicas = [
        with_link_frames(ranks[first : first + size], parallel, size_of_frame)
        for first in range(0, len(ranks), size)
    ]
    head = _with_weights(hosts[0], weight_bytes)
    drafter = drafter_config(config, spec, directory, ranks, head, _only_rank)
    notes = (
        *form.notes,
        *notes_on_drafter(config.speculation.speculative_model, drafter, ranks),
        *implementation_notes(spec),
        *_notes_of_unused(config, spec),
    )
    return [
        LaunchPlan(
            model_path=str(directory),
            spec=spec,
            ranks=own,
            core=msgspec.structs.replace(
                core,
                replica=own[0].replica,
                seed=replica_seed(config.seed, own[0].replica or 0),
                num_links=num_links_between_hosts(own),
                drafter=drafter,
            ),
            frame_bytes=size_of_frame,
            notes=(*notes, *notes_on_frames(own, given, size_of_frame)),
        )
        for own in replicas
    ]


def replica_seed(seed: int, replica: int) -> int:
    """Return a replica's own seed, so that replicas do not sample alike; the first has `seed` itself."""
    return derive_seed(seed ^ _REPLICAS, replica) if replica else seed


def _notes_of_unused(config: EngineConfig, spec: ModelSpec) -> Iterator[str]:
    """Yield a sentence for each setting that was given and changes nothing."""
    if config.parallel.enable_expert_parallel and spec.experts is None:
        yield f"--enable-expert-parallel changes nothing: {spec.architecture} has no experts."
    elif config.parallel.enable_expert_parallel and max(config.parallel.tp_sizes) == 1:
        yield "--enable-expert-parallel changes nothing: each stage has one rank (--tp), with all experts."
    if config.model.gguf_dequantize and not spec.is_dequantized:
        yield "--gguf-dequantize changes nothing: no weights are in blocks of a GGUF file."
    patience_s, policy = config.cache.kv_store_patience_s, config.cache.kv_prefetch_policy
    if policy != "timeout" and patience_s != CacheConfig().kv_store_patience_s:
        yield (
            f"--kv-store-patience {patience_s:g} is not used: --kv-prefetch-policy is {policy}, which has "
            "no timeout."
        )
    if config.cache.num_blocks is not None and config.cache.kv_cache_bytes is not None:
        yield (
            f"--kv-cache-bytes is not used: --num-blocks {config.cache.num_blocks} sets the size of the KV "
            "cache."
        )


def _rank_configs(
    config: EngineConfig,
    model_path: str,
    form: _WeightForm,
    ranges: list[tuple[int, int]],
    max_model_len: int,
    wait_timeout_s: float,
    homes: Sequence[HostResources],
) -> list[RankConfig]:
    parallel = config.parallel
    threads, cpus = _threads_and_cpus(parallel, form.devices, homes)
    memories = [(home.name, device) for home, device in zip(homes, form.devices, strict=True)]
    sizes, replicas = parallel.tp_sizes, parallel.data_parallel_size
    layout = RankLayout(tp_sizes=tuple(sizes), data_parallel_size=replicas)
    return [
        RankConfig(
            model_path=model_path,
            dtype=form.dtype,
            max_model_len=max_model_len,
            stage=coordinates.stage,
            num_stages=len(ranges),
            start_layer=ranges[coordinates.stage][0],
            end_layer=ranges[coordinates.stage][1],
            device=form.devices[rank],
            num_sharers=memories.count(memories[rank]),
            threads=threads[rank],
            block_size=config.cache.block_size,
            num_blocks=config.cache.num_blocks,
            kv_cache_bytes=config.cache.kv_cache_bytes,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            depth=parallel.depth,
            link_frames=parallel.max_async_depth + 1,
            prefill_chunk=config.scheduler.prefill_chunk,
            max_drafts=config.speculation.most_drafts,
            mtp=config.speculation.method == "mtp",
            tied_head=parallel.tied_head,
            quantization=form.quantization,
            gguf_dequantize=config.model.gguf_dequantize,
            kernels=parallel.kernels,
            numeric_class=parallel.numeric_class,
            cpus=cpus[rank],
            wait_timeout_s=wait_timeout_s,
            tp_rank=coordinates.tp_rank,
            tp_size=sizes[coordinates.stage],
            expert_parallel=parallel.enable_expert_parallel,
            tp_sizes=tuple(sizes),
            replica=coordinates.replica if replicas > 1 else None,
            model_impl=config.model.model_impl,
            host=homes[rank].name,
        )
        for rank, coordinates in enumerate(layout.places)
    ]


def _threads_and_cpus(
    parallel: ParallelConfig, devices: list[str], homes: Sequence[HostResources]
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return how many threads each rank has, and the cores that they are bound to."""
    threads = parallel.rank_threads or on_each_host(
        homes, lambda host, own: shared_threads([devices[rank] for rank in own], host.num_cpus)
    )
    cpus = on_each_host(
        homes,
        lambda host, own: cpus_of_ranks(
            parallel, [threads[rank] for rank in own], [devices[rank] for rank in own], host
        ),
    )
    return threads, cpus


def with_faults(plan: LaunchPlan, faults: Sequence[Fault]) -> LaunchPlan:
    """Return the plan with the faults that a test has armed in the configs of the ranks that they are for."""
    ranks = [
        msgspec.structs.replace(
            rank,
            faults=[
                fault
                for fault in faults
                if fault.stage == rank.stage and fault.tp_rank in (None, rank.tp_rank)
            ],
        )
        for rank in plan.ranks
    ]
    return msgspec.structs.replace(plan, ranks=ranks)


def _core_config(
    config: EngineConfig,
    spec: ModelSpec,
    model_path: str,
    max_model_len: int,
    cpus: tuple[int, ...],
) -> CoreConfig:
    is_fixed = config.parallel.step_timeout_s is not None
    num_waits = config.parallel.pipeline_parallel_size if is_fixed else 1
    return CoreConfig(
        parallel=config.parallel,
        cache=config.cache,
        scheduler=config.scheduler,
        speculation=config.speculation,
        seed=config.seed,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=list(spec.eos_token_ids),
        model_path=model_path,
        stall_timeout_s=_step_timeout_s(config) * num_waits + STALL_GRACE_S,
        is_stall_timeout_fixed=is_fixed,
        cpus=cpus,
        guess_share=spec.mtp_share() if spec.has_mtp else 0.0,
        record_decisions=config.record_decisions or "",
    )


def _speculation(config: EngineConfig, spec: ModelSpec, form: _WeightForm) -> SpeculationConfig:
    """Return the speculation settings; `auto` becomes `off` if torch computes, since tokens could change."""
    speculation = config.speculation
    is_invariant = (
        all(device == "cpu" for device in form.devices)
        and form.dtype != "float16"
        and spec.implementation == "penstock"
        and parse_kernels(config.parallel.kernels).enabled == frozenset(KERNEL_NAMES)
    )
    if speculation.method != "auto" or is_invariant:
        return speculation
    return msgspec.structs.replace(speculation, speculative_method="off")


def _kind(spec: ModelSpec, form: _WeightForm, ranges: Sequence[tuple[int, int]], sizes: Sequence[int]) -> str:
    """Return, as text, what decides the numbers in KV blocks besides the model and its dtype."""
    widths = "" if form.quantization == "none" else _widths(ranges, sizes)
    return f"{spec.implementation}, {'dequantised ' * spec.is_dequantized}{form.quantization} weights{widths}"


def _widths(ranges: Sequence[tuple[int, int]], sizes: Sequence[int]) -> str:
    """Return which layers several ranks share, as text: each rank rounds its own part of the activations."""
    shared: list[tuple[int, int, int]] = []
    for (start, end), size in zip(ranges, sizes, strict=True):
        if shared and shared[-1][2] == size:
            shared[-1] = (shared[-1][0], end, size)
        else:
            shared.append((start, end, size))
    return "".join(f", layers {start} to {end - 1} by {size}" for start, end, size in shared if size > 1)


def _store_config(
    config: EngineConfig, directory: Path, kind: str, dtype: str, num_host_blocks: int
) -> StoreConfig | None:
    """Return how the tiers besides the devices are opened; None if the user wants none.

    Args:
        kind: what decides the numbers in KV blocks besides model and dtype, as `_kind` returns it.
        num_host_blocks: blocks that each rank has room for in the host tier.
    """
    cache = config.cache
    if cache.kv_store is None and not cache.kv_host_bytes:
        return None
    names = namespace(model_identity(directory), dtype=dtype, block_size=cache.block_size, kind=kind)
    quota_bytes = None
    if cache.kv_store is not None:
        quota_bytes = cache.kv_store_bytes if keeps_quota(cache.kv_store) else None
        open_store(cache.kv_store, quota_bytes=quota_bytes).close()  # refuse now what can never work
    description = Description(
        model=directory.resolve().name if Path(config.model.model).is_dir() else config.model.model,
        dtype=dtype,
        kind=kind,
        block_size=cache.block_size,
        quota_bytes=quota_bytes,
        opened_at=time.time(),
    )
    return StoreConfig(
        url=cache.kv_store,
        quota_bytes=quota_bytes,
        namespace=names,
        description=encoded(description),
        host_blocks=num_host_blocks,
        writes_back=cache.kv_store_policy == "write-back",
        write_bytes_per_s=cache.kv_write_bytes_per_s,
    )


def _step_timeout_s(config: EngineConfig) -> float:
    """Return the user's timeout, or one that is long enough for the largest plan on a slow machine."""
    configured_s = config.parallel.step_timeout_s
    return configured_s if configured_s is not None else 60.0 + 0.1 * config.scheduler.max_num_batched_tokens


def _weight_form(
    model: ModelConfig, parallel: ParallelConfig, spec: ModelSpec, homes: Sequence[HostResources]
) -> _WeightForm:
    """Choose device, dtype and quantisation together: quantised weights need the CPU, and not float16."""
    quantization, requested_devices = _quantization(model.quantization, spec), parallel.rank_devices
    is_quantized = quantization != "none" or spec.quantization is not None
    moves_head = spec.tie_word_embeddings and parallel.pipeline_parallel_size > 1
    if is_quantized and moves_head and parallel.tied_head == "transfer":
        raise UsageError(
            "--tied-head is transfer, but a quantised head cannot be transferred.",
            remedy="Use --tied-head load.",
            param="tied_head",
        )
    if not is_quantized:
        dtype = _dtype(model.dtype, spec)
        return _WeightForm(
            devices=on_each_host(
                homes, lambda host, own: devices_of_ranks([requested_devices[rank] for rank in own], host)
            ),
            dtype=dtype,
            quantization="none",
            bits=ITEM_SIZES[dtype] * 8,
            notes=(),
        )
    if any(device.startswith("cuda") for device in requested_devices):
        raise no_quantised_weights_on_cuda(parallel.device, model.quantization, spec)
    notes = [_quantization_note(quantization, spec)]
    if parallel.device == "auto" and any(home.num_gpus for home in homes):
        notes.append("the stages run on the CPU, not the GPU: quantised weights run only on the CPU so far.")
    dtype = _dtype(model.dtype, spec)
    if dtype == "float16":
        dtype = _instead_of_float16(model.dtype)
        notes.append(
            "dtype is bfloat16, not the checkpoint's float16, which the kernels for quantised weights "
            "lack; --dtype float32 is exact and slower."
        )
    bits = spec.quantization.mean_bits if spec.quantization else QUANTIZATION_BITS[quantization]
    if "linear" not in parse_kernels(parallel.kernels).enabled:
        bits = 32
        notes.append("without the kernel for linear layers, quantised weights are converted to float32.")
    devices = ["cpu"] * len(requested_devices)
    return _WeightForm(devices=devices, dtype=dtype, quantization=quantization, bits=bits, notes=tuple(notes))


def _quantization(quantization: Quantization, spec: ModelSpec) -> Quantization:
    """Return the quantisation to apply at load: "none" for a checkpoint that is quantised already."""
    if spec.quantization is None:
        return quantization
    if quantization not in ("none", spec.quantization.kind):
        raise UsageError(
            f"--quantization is {quantization}, but the checkpoint is quantised already: "
            f"{spec.quantization.describe()}.",
            remedy=f"Leave the flag out to serve it as it is, or use the original checkpoint for "
            f"{quantization}.",
            param="quantization",
            code="already_quantised",
        )
    return "none"


def _quantization_note(quantization: Quantization, spec: ModelSpec) -> str:
    if spec.quantization is not None:
        return f"weights keep the checkpoint's quantisation, {spec.quantization.describe()}."
    return f"weights are quantised to {quantization} at load."


def _instead_of_float16(requested_dtype: str) -> FloatType:
    if requested_dtype == "auto":
        return "bfloat16"
    raise UsageError(
        "--dtype is float16, but the kernels for quantised weights have no float16.",
        remedy="Use --dtype bfloat16 or float32.",
        param="dtype",
        code="unsupported",
    )


def _dtype(requested_dtype: str, spec: ModelSpec) -> FloatType:
    name = spec.dtype if requested_dtype == "auto" else requested_dtype
    known: dict[str, FloatType] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
    return known.get(name, "float32")


def longest_request(requested_len: int | None, spec: ModelSpec) -> int:
    """Return the most tokens of prompt and output, as requested or the model's; or raise `UsageError`."""
    own = spec.max_position_embeddings
    if requested_len is None:
        return own
    if not 2 <= requested_len <= own:
        raise UsageError(
            f"max_model_len is {requested_len}; this model allows 2 to {own} tokens.",
            remedy=f"Use at most {own}.",
            param="max_model_len",
            code="out_of_range",
        )
    return requested_len


def _check_tensor_parallel(parallel: ParallelConfig, spec: ModelSpec, form: _WeightForm) -> None:
    """Raise an error if the ranks of one stage cannot share this model, or run on these devices."""
    if max(parallel.tp_sizes) == 1:
        return
    layout = RankLayout(tp_sizes=tuple(parallel.tp_sizes), data_parallel_size=parallel.data_parallel_size)
    for group in layout.tensor_groups:
        _check_devices_of_stage([form.devices[rank] for rank in group])
    for size in parallel.tp_sizes:
        whole_experts = parallel.enable_expert_parallel
        require_shardable(spec, size, expert_parallel=whole_experts)
        load_bits = QUANTIZATION_BITS.get(form.quantization)
        require_whole_groups(spec, size, load_bits, expert_parallel=whole_experts)


def _check_devices_of_stage(devices: list[str]) -> None:
    """Raise `UsageError` unless the ranks are on the CPU, or each on a GPU of its own."""
    kinds = {device.partition(":")[0] for device in devices}
    shared = next((device for device in devices if device != "cpu" and devices.count(device) > 1), None)
    if len(kinds) == 1 and shared is None:
        return
    what = f"two ranks would share {shared}" if shared else "some are CPUs and some are GPUs"
    raise UsageError(
        f"the ranks of one stage cannot run on {', '.join(devices)}: {what}.",
        remedy="Give each rank of a stage its own GPU, or run all of them on the CPU; stages may differ.",
        param="device",
    )


def _weight_bytes(
    spec: ModelSpec,
    ranges: list[tuple[int, int]],
    config: EngineConfig,
    form: _WeightForm,
    homes: Sequence[HostResources],
) -> Counter[str]:
    """Return, by the name of the host, the least bytes that the weights of its ranks on the CPU take."""
    parallel = config.parallel
    of_stages = [spec.stage_parameters(start, end) for start, end in ranges]
    if config.speculation.method == "mtp":
        of_stages[-1] += spec.mtp_parameters(with_embedding=len(ranges) > 1 and not spec.tie_word_embeddings)
    of_replica = [
        parameters // size
        for parameters, size in zip(of_stages, parallel.tp_sizes, strict=True)
        for _ in range(size)
    ]
    of_ranks = of_replica * parallel.data_parallel_size
    on_host: Counter[str] = Counter()
    for parameters, device, home in zip(of_ranks, form.devices, homes, strict=True):
        on_host[home.name] += parameters if device == "cpu" else 0
    return Counter({name: int(parameters * form.bits / 8) for name, parameters in on_host.items()})


def _with_weights(host: HostResources, weight_bytes: Counter[str]) -> HostResources:
    """Return the host with the memory that is free once the weights of its ranks are loaded."""
    return msgspec.structs.replace(host, free_bytes=max(0, host.free_bytes - weight_bytes[host.name]))


def _check_weights_fit(weight_bytes: Counter[str], homes: Sequence[HostResources]) -> None:
    """Raise an error now if the weights do not fit, and not after a long load; ranks measure room for KV."""
    for host in homes:
        weights = weight_bytes[host.name]
        if weights <= host.free_bytes:
            continue
        raise NotEnoughMemoryError(
            f"the weights need {weights / 2**20:.0f} MiB on {host.name}, but {host.free_bytes / 2**20:.0f} "
            "MiB are free there.",
            remedy="Use a smaller model or dtype, --quantization int8 or int4, or free memory.",
        )
