"""Builds scheduler and core once ranks are connected, and proves that a step crosses all stages.

Called by the core's process, and by programs that run a core in a thread. Torch-free.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from penstock.batch import RankLoaded
from penstock.config.engine import ParallelConfig
from penstock.decisions.recorder import NO_RECORDER, DecisionRecorder, NoRecorder
from penstock.drafting.drafter_child import DrafterChild
from penstock.drafting.model_drafter import ModelDrafter
from penstock.engine.core.calibration import calibrate
from penstock.engine.core.core import EngineCore
from penstock.engine.core.memory_gate import memory_gate
from penstock.engine.core.plan_depth import WireDepth
from penstock.engine.core.recorded_core import RecordedCore
from penstock.engine.core.stall_limits import FixedLimit, MeasuredLimit, StallLimit
from penstock.engine.core.wire_times import NO_WIRE_TIMES, AnyWireTimes, WireTimes
from penstock.engine.ipc import HEARTBEAT_S
from penstock.errors import PenstockError, error_from_info
from penstock.executor.base import Executor, KVPlan
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool
from penstock.kvcache.eviction import eviction_order
from penstock.kvcache.hosts_catalogue import HostsCatalogue
from penstock.kvcache.prefetching import prefetch_patience
from penstock.kvcache.prefix_cache import PrefixCache
from penstock.kvcache.storage_tier import AnyStorageTier, NoStorageTier, StorageTier, TierPolicy
from penstock.kvstore.catalogue import StoreCatalogue
from penstock.kvstore.host_tier import block_bytes
from penstock.kvstore.opening import open_guarded
from penstock.process.config import CoreConfig
from penstock.process.endpoints import NO_RESTARTS, Restarts
from penstock.process.host_memory import give_back_freed_pages, host_available_bytes
from penstock.scheduler.cost_model import CostModel
from penstock.scheduler.pacing import FixedDepth, PlanDepth
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.start_order import ALWAYS_OPEN
from penstock.scheduler.windows import DraftWindows, NoWindows
from penstock.speculation.drafter import Drafter
from penstock.speculation.grammar_guides import NO_GUIDES, GrammarGuides, NoGuides
from penstock.speculation.guard import GuardedDrafter
from penstock.speculation.mtp import MTPDrafter
from penstock.speculation.suffix import SuffixDrafter

if TYPE_CHECKING:
    from penstock.grammar.matcher import Vocabulary

CATALOGUE_BYTES = 1 << 20  # for the list of blocks in host memory, besides the entries of the blocks

_logger = logging.getLogger(__name__)


def build_core(
    config: CoreConfig,
    executor: Executor,
    kv_plan: KVPlan,
    clock: Callable[[], float],
    *,
    recovers: bool = False,
    epoch: int = 0,
    restarts: Restarts = NO_RESTARTS,
    drafting: DrafterChild | None = None,
    guides: NoGuides | None = None,
    recorder: NoRecorder = NO_RECORDER,
) -> tuple[EngineCore, Scheduler]:
    """Return core and scheduler over an executor that has been started; the stages are measured first.

    Args:
        executor: a started executor.
        kv_plan: what the ranks reported at start, and the number of KV blocks.
        recovers: whether a broken pipe will be connected anew; if not, its loss is final.
        drafting: the process of the draft model, if the caller has started it; it need not be ready. None:
            if the config has a draft model, its process is started here, and the core closes it.
        guides: keep guessed tokens within the grammars of requests; None: they are opened here
            (`open_guides`).
        recorder: records what scheduler and core read, for a replay; the core closes it.
    """
    with ExitStack() as undone:
        if drafting is None and (drafting := start_drafting(config)) is not None:
            undone.callback(drafting.close)
            drafting.await_ready(config.parallel.load_timeout_s)
        guides = recorder.guides(guides or open_guides(config))
        recorder.begin_assembly(config, kv_plan, recovers=recovers, epoch=epoch)
        drafter = recorder.drafter(_drafter(config, drafting, clock))
        clock, executor = recorder.clock(clock), recorder.executor(executor)
        calibration = calibrate(executor, config, kv_plan, clock, epoch=epoch)
        depth, wire = depth_and_wire(config.parallel, calibration.costs.model, num_links=config.num_links)
        allocator = BlockAllocator(_pool(config, kv_plan.num_blocks), config.cache.block_size)
        free_memory = recorder.free_memory(host_available_bytes)
        gate = memory_gate(config.scheduler.min_start_bytes, clock, free_memory)
        scheduler = Scheduler(
            config.scheduler,
            allocator,
            num_stages=config.parallel.pipeline_parallel_size,
            max_model_len=config.max_model_len,
            eos_token_ids=config.eos_token_ids,
            seed=config.seed,
            clock=clock,
            costs=calibration.costs.model,
            tier=_tier(config, allocator, clock),
            depth=depth,
            windows=_windows(
                config,
                allocator,
                calibration.costs.model,
                depth,
                guides,
                kv_plan.ranks,
                clock,
                drafter,
            ),
            gate=gate or ALWAYS_OPEN,
        )
        core = _core_class(recorder)(
            scheduler,
            executor,
            config.parallel,
            clock,
            calibration=calibration,
            recovers=recovers,
            stall_limit=_stall_limit(config, recovers),
            wire=wire,
            epoch=epoch,
            restarts=restarts,
            ranks=kv_plan.ranks,
            vocab_size=config.vocab_size,
        )
        if gate is not None:
            gate.told = core.stage_times
        undone.pop_all()
    return core, scheduler


def _core_class(recorder: NoRecorder) -> Callable[..., EngineCore]:
    """Return the constructor of the core, which takes the arguments of `EngineCore`."""
    return partial(RecordedCore, recorder) if isinstance(recorder, DecisionRecorder) else EngineCore


def _drafter(config: CoreConfig, drafting: DrafterChild | None, clock: Callable[[], float]) -> Drafter:
    """Return the drafter of the chosen method.

    With the method `off`, and in a replay, the drafter that is returned is never asked for guesses.
    """
    if drafting is not None:
        return ModelDrafter(drafting, clock)
    match config.speculation.method:
        case "mtp":
            return MTPDrafter(config.guess_share)
        case "auto" | "off" | "suffix" | "draft_model":  # a draft model without a process: in a replay
            return SuffixDrafter()
        case other:  # a name of `SpeculativeMethod` without a case: mypy refuses this line
            assert_never(other)


def start_drafting(config: CoreConfig) -> DrafterChild | None:
    """Start the process of the draft model and return it without waiting.

    Returns None if no draft model is configured.
    """
    return None if config.drafter is None else DrafterChild(config.drafter)


def depth_and_wire(
    parallel: ParallelConfig, costs: CostModel | None, *, num_links: int
) -> tuple[PlanDepth, AnyWireTimes]:
    """Return what decides how many plans fill the pipe, and what measures the links between hosts for that.

    If no more plans than stages may fill the pipe, the number is fixed and nothing is measured.

    Args:
        costs: learnt costs of the stages; None: they are not known.
        num_links: number of links between hosts that a plan crosses on its way through the stages.
    """
    num_stages = parallel.pipeline_parallel_size
    largest = parallel.depth - parallel.max_async_depth
    if largest == num_stages:
        return FixedDepth(num_stages), NO_WIRE_TIMES
    depth = WireDepth(num_stages, largest, costs)
    return depth, WireTimes(depth, num_stages, num_links)


def open_guides(config: CoreConfig, *, at_once: bool = True) -> NoGuides:
    """Return the guides, which keep guessed tokens within the grammar of their request.

    If nothing is guessed, or the vocabulary cannot be read, the guides do nothing.

    Args:
        at_once: True: read the vocabulary now. That holds up everything else in this process, perhaps for
            seconds. False: it is read when the first request with a grammar comes.
    """
    if not (config.speculation.is_on and config.model_path):
        return NO_GUIDES

    def open_vocabulary() -> Vocabulary:
        from penstock.grammar.matcher import (
            load_vocabulary,  # here: nobody else in the core needs the library
        )

        return load_vocabulary(Path(config.model_path), config.eos_token_ids)

    guides = GrammarGuides(open_vocabulary, config.vocab_size)
    try:
        if at_once:
            guides.open()
            give_back_freed_pages()  # as a rank does after it has read the vocabulary
    except PenstockError:  # a request with a grammar is refused before it comes here
        return NO_GUIDES
    return guides


def _windows(
    config: CoreConfig,
    allocator: BlockAllocator,
    costs: CostModel | None,
    depth: PlanDepth,
    guides: NoGuides,
    ranks: Sequence[RankLoaded],
    clock: Callable[[], float],
    drafter: Drafter,
) -> NoWindows:
    if not config.speculation.is_on:
        return NoWindows()
    others = sorted({rank.stage for rank in ranks if not rank.is_invariant})
    if others and config.speculation.method == "auto":
        return NoWindows()
    if others:
        _logger.warning(
            "speculation may change tokens: stages %s compute without our CPU kernels, so results depend "
            "on the other rows of a step.",
            ", ".join(map(str, others)),
        )
    return DraftWindows(
        GuardedDrafter(drafter, config.vocab_size, clock),
        allocator,
        costs,
        most=config.speculation.most_drafts,
        max_tokens=config.scheduler.max_num_batched_tokens,
        depth=depth,
        clock=clock,
        # Ranks that share the last stage must end a window (a row's known token and drafts) at the same
        # place, but each makes the masks of a grammar itself.
        with_grammars=config.parallel.tp_sizes[-1] == 1,
        guides=guides,
        is_exact=not others,
    )


def _stall_limit(config: CoreConfig, recovers: bool) -> StallLimit:
    """Return the limit on how long a plan may take until the pipe counts as lost.

    If the user has set it, or a lost pipe is not connected again, it is fixed. Without recovery a measured
    limit would be too strict for somebody who halts a stage in a debugger.
    """
    if config.is_stall_timeout_fixed or not recovers:
        return FixedLimit(config.stall_timeout_s)
    return MeasuredLimit(config.stall_timeout_s)


def _pool(config: CoreConfig, num_blocks: int) -> BlockPool:
    cache = None
    if config.cache.enable_prefix_caching:
        cache = PrefixCache(num_blocks, eviction_order(config.cache.eviction_policy))
    return BlockPool(num_blocks, cache)


def _tier(config: CoreConfig, allocator: BlockAllocator, clock: Callable[[], float]) -> AnyStorageTier:
    if config.store is None:
        return NoStorageTier()
    url = config.store.url
    # Without a store, the list of the blocks that the ranks have in host memory is kept in memory here.
    num_blocks = config.store.host_blocks
    listed = CATALOGUE_BYTES + num_blocks * block_bytes(1, 0) if url is None else 0
    store = open_guarded(url, quota_bytes=config.store.quota_bytes, host_bytes=listed)
    return StorageTier(
        allocator,
        HostsCatalogue(StoreCatalogue(store, config.store.namespace, config.store.description)),
        clock,
        TierPolicy(
            store_when_found=config.cache.kv_store_when_found,
            host_blocks=num_blocks,
            has_store=url is not None,
            patience=prefetch_patience(config.cache.kv_prefetch_policy, config.cache.kv_store_patience_s),
        ),
    )


def prove_stages(core: EngineCore) -> None:
    """Send an empty plan and wait until it has crossed every stage; raise the cause if it does not."""
    while math.isinf(core.stats().last_result_age_s):
        core.step(timeout_s=HEARTBEAT_S)
        cause = core.failure or core.loss
        if cause is not None:
            raise error_from_info(cause)
