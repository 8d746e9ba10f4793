"""One simulated pipeline, with the engine's own core and scheduler.

Nothing that decides is simulated: `Scheduler`, `EngineCore`, the number of plans in flight and the measuring
of links are those of `penstock serve`. Only the stages are simulated (`simulator.executor`). The costs of
stages by which plans are sized are known from the beginning, or unknown as on GPUs; they are not learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.batch import ScheduledBatch
from penstock.config.engine import PLANS_ON_WIRES, CacheConfig, ParallelConfig, SchedulerConfig
from penstock.engine.core.calibration import Calibration
from penstock.engine.core.core import EngineCore
from penstock.engine.core.core_assembly import depth_and_wire
from penstock.errors import StageLostError
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool
from penstock.kvcache.eviction import eviction_order
from penstock.kvcache.prefix_cache import PrefixCache
from penstock.layouts.stage_times import StageTimes, learnt_cost
from penstock.request import GenerationRequest, RequestUpdate
from penstock.scheduler.cost_model import CostModel, StageCost, StepSample, StepShape
from penstock.scheduler.pacing import PlanDepth
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.windows import DraftWindows, NoWindows
from penstock.simulator.accepted_drafts import AcceptedDrafts
from penstock.simulator.executor import SimulatedExecutor, no_record
from penstock.simulator.flow import PlanFlow
from penstock.simulator.pipe import SimulatedPipe, StageLoss

_LEARNT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 256)  # tokens of the steps from which costs are learnt
_LEARNT_CONTEXTS = (64, 512)  # positions that each of these tokens attends to


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the simulated engine.

    `scheduler`, `cache` and `async_depth` are settings of `penstock serve`; the others are the simulator's.

    Attributes:
        async_depth: number of plans that wait ready at the first stage.
        acceptance: the chance that a guessed token is right; 0: no tokens are guessed.
        most_drafts: most drafts of a row in one step.
        seed: seed of the jitter of links and of the guesses.
    """

    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    async_depth: int = 0
    acceptance: float = 0.0
    most_drafts: int = 4
    seed: int = 0


class KnownCosts(CostModel):
    """The costs of stages, given from the beginning and never learnt.

    Args:
        shared, alone: the costs of each stage, while other stages compute too, and while no other does.
    """

    def __init__(self, shared: Sequence[StageCost], alone: Sequence[StageCost]) -> None:
        super().__init__(len(shared))
        self._known = list(shared), list(alone)

    def learn(self, stage: int, samples: object, *, alone: bool) -> None:
        """Do nothing: the costs stay as they are."""

    def costs(self, *, alone: bool = False) -> list[StageCost]:
        return self._known[alone]


class SimulatedReplica:
    """One replica: a core and its scheduler, over a simulated pipe.

    Args:
        pipeline: the simulated pipe.
        clock: the clock of the simulation.
        number: number of the replica.
        max_kept: number of plans whose times are kept for a timeline.
        record: called with every plan; returns the plan's digest.

    Attributes:
        core, scheduler, allocator: the engine's parts of this replica.
        flow: computes when plans pass the pipe.
    """

    def __init__(
        self,
        pipeline: SimulatedPipe,
        settings: EngineSettings,
        clock: Callable[[], float],
        *,
        number: int = 0,
        max_kept: int = 0,
        record: Callable[[ScheduledBatch], int] = no_record,
    ) -> None:
        seed = settings.seed + number
        self.pipeline, self._settings, self._clock, self._record = pipeline, settings, clock, record
        self.flow = PlanFlow(pipeline, began_at=clock(), seed=seed, max_kept=max_kept)
        parallel = _parallel(pipeline, settings)
        costs = _known_costs(pipeline)
        depth, wire = depth_and_wire(parallel, costs, num_links=pipeline.num_links)
        self.allocator = BlockAllocator(_pool(pipeline, settings.cache), pipeline.block_size)
        self.scheduler = Scheduler(
            settings.scheduler,
            self.allocator,
            num_stages=pipeline.num_stages,
            max_model_len=pipeline.max_model_len,
            eos_token_ids=(),
            seed=seed,
            clock=clock,
            costs=costs,
            depth=depth,
            windows=self._windows(costs, depth, seed),
        )
        self._executor = self._new_executor()
        self.core = EngineCore(
            self.scheduler,
            self._executor,
            parallel,
            clock,
            calibration=Calibration(async_depth=settings.async_depth),
            recovers=True,
            wire=wire,
        )

    @property
    def next_at(self) -> float:
        """The clock time at which the core next has something to do."""
        due = self.core.next_wakeup()
        return min(self._executor.next_at, due) if self.core.has_pipe else due

    @property
    def num_steps(self) -> int:
        """The number of plans that were sent."""
        return self.core.steps_in_flight[1]

    def add(self, request: GenerationRequest) -> None:
        """Add a request to the core. Raises the errors of `EngineCore.add_request`."""
        self.core.add_request(request)

    def lose(self, loss: StageLoss) -> list[RequestUpdate]:
        """End the epoch because a stage is lost, as in a real engine; return updates of requests that end."""
        error = StageLostError(f"stage {loss.stage} is lost.", stage=loss.stage)
        return self.core.lose_epoch(error.info())

    def recover(self) -> None:
        """Begin the next epoch, since all stages are there again."""
        self.flow.resume(self._clock())
        self._executor = self._new_executor()
        self.core.enter_epoch(self.core.epoch + 1, self._executor)

    def _new_executor(self) -> SimulatedExecutor:
        return SimulatedExecutor(
            self.pipeline,
            self.flow,
            self._clock,
            is_alone=lambda: self.scheduler.is_one_alone,
            record=self._record,
        )

    def _windows(self, costs: CostModel | None, depth: PlanDepth, seed: int) -> NoWindows:
        settings = self._settings
        if not settings.acceptance:
            return NoWindows()
        return DraftWindows(
            AcceptedDrafts(settings.acceptance, seed=seed),
            self.allocator,
            costs,
            most=settings.most_drafts,
            max_tokens=settings.scheduler.max_num_batched_tokens,
            depth=depth,
            clock=self._clock,
        )


def _parallel(pipeline: SimulatedPipe, settings: EngineSettings) -> ParallelConfig:
    """Return the settings as the supervisor resolves them: with room for plans on the links between hosts."""
    parallel = ParallelConfig(pipeline_parallel_size=pipeline.num_stages, async_depth=settings.async_depth)
    if not pipeline.num_links:
        return parallel
    room = parallel.least_plans_in_flight + PLANS_ON_WIRES
    return msgspec.structs.replace(parallel, max_plans_in_flight=room)


def _known_costs(pipeline: SimulatedPipe) -> KnownCosts | None:
    """Return the costs by which the engine sizes plans by time; None: it sizes them by plain rules."""
    if not pipeline.has_known_costs:
        return None
    return KnownCosts(_learnt(pipeline.stages), _learnt(pipeline.stages_alone))


def _learnt(stages: Sequence[StageTimes]) -> list[StageCost]:
    """Return the costs that the engine would learn of each stage; stages with equal times share one cost."""
    costs = {times: _learnt_cost(times) for times in dict.fromkeys(stages)}
    return [costs[times] for times in stages]


def _learnt_cost(times: StageTimes) -> StageCost:
    known = learnt_cost(times)
    if known is not None:
        return known
    model = CostModel(1)
    samples = []
    for tokens in _LEARNT_TOKENS:
        for context in _LEARNT_CONTEXTS:
            shape = StepShape(tokens, tokens * context, tokens)
            forward_s = times.seconds(shape._replace(samples=0))
            samples.append(StepSample(shape, forward_s, times.seconds(shape) - forward_s, 0.0))
    model.learn(0, samples, alone=False)
    costs = model.costs()
    assert costs is not None, "many shapes were learnt"
    return costs[0]


def _pool(pipeline: SimulatedPipe, cache: CacheConfig) -> BlockPool:
    kept = None
    if cache.enable_prefix_caching:
        kept = PrefixCache(pipeline.num_blocks, eviction_order(cache.eviction_policy))
    return BlockPool(pipeline.num_blocks, kept)
