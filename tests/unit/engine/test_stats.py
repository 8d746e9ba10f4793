"""Numbers of an engine outlive its cores."""

from __future__ import annotations

from core_numbers import core_stats
from penstock.batch import RankLoaded
from penstock.engine.stats import StageMemory, SteadyStats, stage_memory
from penstock.process.endpoints import Restarts
from penstock.scheduler.stats import SpeculationStats

FIRST = core_stats(
    generated_tokens=500,
    prompt_tokens=70,
    num_running=2,
    num_blocks=100,
    free_blocks=40,
    step_id=10,
    restarts=Restarts(stages=[1, 0], core=1),
)


def test_totals_never_fall_while_a_core_is_away_and_when_another_begins_at_zero() -> None:
    steady = SteadyStats()
    assert steady.shown(is_away=True) is None
    steady.note(FIRST)
    assert steady.shown(is_away=False) == FIRST
    away = steady.shown(is_away=True)
    assert away is not None
    assert (away.scheduler.generated_tokens, away.scheduler.num_running, away.cache.free_blocks) == (
        500,
        0,
        100,
    )
    restarts = Restarts(stages=[1, 0], core=2)
    young = core_stats(FIRST, generated_tokens=7, step_id=1, prompt_tokens=0, restarts=restarts)
    for tokens, step_id, total in ((7, 1, 507), (9, 2, 509), (11, 99, 511)):
        steady.note(core_stats(young, generated_tokens=tokens, step_id=step_id))
        found = steady.shown(is_away=False)
        assert found is not None
        assert found.scheduler.generated_tokens == total
        assert (found.step_id, found.scheduler.prompt_tokens) == (10 + step_id, 70)
        assert found.restarts == restarts


def test_what_became_of_guesses_goes_on_too() -> None:
    steady = SteadyStats()
    drafts = SpeculationStats("suffix", 9, 8, 7, num_forced_drafted=6, num_forced_accepted=5)
    steady.note(core_stats(speculation=drafts, restarts=Restarts(stages=[0], core=0)))
    young = SpeculationStats("suffix", 1, 1, 1, num_forced_drafted=1, num_forced_accepted=1)
    steady.note(core_stats(speculation=young, restarts=Restarts(stages=[0], core=1)))
    found = steady.shown(is_away=False)
    assert found is not None
    assert found.scheduler.speculation == SpeculationStats(
        "suffix", 10, 9, 8, num_forced_drafted=7, num_forced_accepted=6
    )


def test_d16_the_tightest_stage_strands_memory_of_the_others() -> None:
    def rank(stage: int, tp_rank: int, max_blocks: int, block_bytes: int) -> RankLoaded:
        return RankLoaded(
            stage=stage,
            tp_rank=tp_rank,
            max_blocks=max_blocks,
            block_bytes=block_bytes,
            tensor_bytes=7,
            bytes_read=0,
            load_seconds=0.0,
            is_invariant=True,
        )

    ranks = [rank(0, 0, 10, 100), rank(0, 1, 11, 100), rank(1, 0, 16, 50)]
    assert stage_memory(ranks, 10) == [
        StageMemory(stage=0, kv_bytes=2000, stranded_bytes=100, weight_bytes=14),
        StageMemory(stage=1, kv_bytes=500, stranded_bytes=300, weight_bytes=7),
    ]
    assert stage_memory([], 10) == []
