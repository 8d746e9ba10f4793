"""DR5: a row whose grammar is being built is held back, alone, until the last stage has told that it is."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from fake_catalogue import FakeCatalogue
from fakes import VOCAB_SIZE
from penstock.batch import ScheduledBatch
from penstock.config.engine import SchedulerConfig
from penstock.errors import PeerError, error_from_info
from penstock.request import RequestUpdate, StructuredOutputs
from replicas import Rank, ReplicaRig

DIGITS = StructuredOutputs(regex="[0-9]+")
LETTERS = StructuredOutputs(regex="[a-z]+")
LAYOUTS = [(stages, depth, tp) for stages in (1, 2, 3) for depth in (0, 1, 2) for tp in (1, 2)]
TURNS = 60
FREE = 12  # tokens of requests without a grammar


def make_rig(stages: int = 2, depth: int = 1, tp: int = 1, **settings: Any) -> ReplicaRig:
    settings = {"num_blocks": 40, "max_model_len": 40} | settings
    return ReplicaRig(num_stages=stages, async_depth=depth, tp=tp, **settings)


def builders(rig: ReplicaRig) -> list[Rank]:
    return [rank for rank in rig.pipe.ranks if rank.replica.builds_grammars]


def build_all(rig: ReplicaRig, why: str = "") -> None:
    for rank in builders(rig):
        for number in list(rank.replica.builds):
            rig.pipe.build(rank, number, why)


def finish(rig: ReplicaRig) -> None:
    """Build whatever is asked for, until nothing is alive."""
    for _ in range(4 * TURNS):
        build_all(rig)
        rig.turn()
    assert rig.core.is_idle
    assert rig.core.stats().cache.free_blocks == 40


def check(rig: ReplicaRig, *names: str) -> None:
    for arrival, name in enumerate(rig.requests):
        if not names or name in names:
            assert rig.result(name) == rig.expected(name, arrival)


def steps_of(rig: ReplicaRig, row: int) -> list[tuple[int, int, bool]]:
    """(start, tokens, sampled) of each step that runs a row."""
    columns = [
        zip(plan.rows, plan.start_positions, plan.num_tokens, plan.need_sampled, strict=True)
        for plan in rig.pipe.plans
    ]
    return [(start, count, sampled) for plan in columns for r, start, count, sampled in plan if r == row]


def entering(rig: ReplicaRig, name: str) -> ScheduledBatch:
    """The last plan with which it gets a row."""
    return next(
        plan for plan in reversed(rig.pipe.plans) if name in [new.request_id for new in plan.new_rows]
    )


@pytest.mark.parametrize(("stages", "depth", "tp"), LAYOUTS)
def test_dr5_other_rows_go_on_and_the_row_is_sampled_once_all_have_built(
    stages: int, depth: int, tp: int
) -> None:
    rig = make_rig(stages, depth, tp)
    rig.add("before", 9, max_tokens=FREE)
    rig.turn()
    rig.add("bound", 7, max_tokens=5, structured_outputs=DIGITS)
    rig.add("after", 6, max_tokens=FREE)
    rig.turn_often(TURNS)
    check(rig, "before", "after")
    assert rig.updates["bound"] == []
    (row,) = [new.row for new in entering(rig, "bound").new_rows if new.request_id == "bound"]
    assert [step for step in steps_of(rig, row) if step[1] > 1][-1] == (0, 6, False), "all but the last token"
    *others, last = builders(rig)
    for rank in others:
        rig.pipe.build(rank, 0)
        rig.turn_often(5)
        assert rig.updates["bound"] == [], "one rank has not built it"
    rig.pipe.build(last, 0)
    rig.turn()
    assert rig.tokens("bound"), "no step is lost once it is known"
    finish(rig)
    check(rig)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_dr5_a_row_whose_grammar_is_there_loses_no_step(stages: int) -> None:
    rig = make_rig(stages)
    rig.add("first", 7, max_tokens=5, structured_outputs=DIGITS)
    finish(rig)
    rig.add("free", 7, max_tokens=5)
    rig.add("second", 6, max_tokens=5, structured_outputs=DIGITS)
    rig.step()
    plan = entering(rig, "second")
    assert plan is entering(rig, "free")
    assert plan.num_tokens == [7, 6]
    assert plan.need_sampled == [True, True]
    finish(rig)
    check(rig)


@pytest.mark.parametrize(("stages", "depth", "tp"), LAYOUTS[::4])
@pytest.mark.parametrize("prompt", [[3], list(range(9))], ids=["one token", "all but one found"])
def test_dr5_a_row_without_another_token_enters_alone(
    prompt: list[int], stages: int, depth: int, tp: int
) -> None:
    """Blocks and beginning are told with the row; who is behind it in the line does not wait."""
    rig = make_rig(stages, depth, tp)
    rig.add("cached", prompt, max_tokens=3)
    rig.turn_often(TURNS)
    rig.add("bound", prompt, max_tokens=5, structured_outputs=DIGITS)
    rig.add("after", 6, max_tokens=FREE)
    rig.turn_often(TURNS)
    check(rig, "after")
    (new,) = [new for new in entering(rig, "bound").new_rows if new.request_id == "bound"]
    assert new.blocks
    assert new.start == len(prompt) - 1
    rig.scheduler.prefixes.flush(with_store=False)
    rig.turn()
    build_all(rig)
    rig.turn()
    assert rig.tokens("bound")
    finish(rig)
    check(rig)


def test_dr5_siblings_do_not_hold_up_the_line() -> None:
    rig = make_rig()
    rig.add("many", 9, n=3, max_tokens=4, seed=5, structured_outputs=DIGITS)
    rig.add("after", 6, max_tokens=FREE)
    rig.turn_often(TURNS)
    assert rig.is_finished("after")
    assert len(builders(rig)[0].replica.builds) == 1, "one build for all"
    finish(rig)
    check(rig)


def test_d13_abort_while_it_is_built() -> None:
    rig = make_rig(tp=2)
    rig.add("bound", 7, max_tokens=5, structured_outputs=DIGITS)
    rig.turn_often(3)
    rig.pipe.build(builders(rig)[0], 0)
    assert rig.abort("bound")
    rig.add("free", 5, max_tokens=4)
    rig.turn_often(TURNS)
    assert rig.finish_reason("free") == "length"
    assert 0 in [number for plan in rig.pipe.plans for number in plan.dropped_grammars]
    rig.pipe.build(builders(rig)[1], 0)  # it had begun
    rig.turn()
    rig.add("again", 7, max_tokens=5, structured_outputs=DIGITS)
    rig.turn_often(3)
    assert builders(rig)[0].replica.builds == [1], "it is asked for anew"
    assert rig.updates["again"] == []
    finish(rig)
    check(rig, "again")


def test_r10_who_shares_a_grammar_that_fails_ends_and_nobody_else() -> None:
    rig = make_rig(tp=2)
    for name, structured in (("a", DIGITS), ("free", None), ("other", LETTERS), ("b", DIGITS)):
        rig.add(name, 7, max_tokens=5, structured_outputs=structured)
    rig.turn_often(3)
    good, bad = builders(rig)
    rig.pipe.build(good, 0)
    rig.pipe.build(bad, 0, "it has too many parts")
    rig.turn_often(3)
    for name in ("a", "b"):
        (update,) = rig.updates[name]
        assert update.error is not None
        assert (update.error.code, update.error.param) == ("constraint_unmet", "structured_outputs")
        assert "it has too many parts" in update.error.message
        assert name in update.error.message
    rig.add("again", 7, max_tokens=5, structured_outputs=DIGITS)
    finish(rig)
    check(rig, "free", "other", "again")


def test_r10_who_waits_for_a_stage_that_is_late_is_not_told_that_the_request_is_wrong() -> None:
    rig = make_rig(tp=2)
    for name, structured in (("a", DIGITS), ("free", None), ("b", DIGITS)):
        rig.add(name, 7, max_tokens=5, structured_outputs=structured)
    rig.turn_often(3)
    good, late = builders(rig)
    rig.pipe.build(good, 0)
    rig.pipe.build(late, 0, late="it was not there after 5 s")
    rig.turn_often(3)
    for name in ("a", "b"):
        (update,) = rig.updates[name]
        assert update.error is not None
        error = error_from_info(update.error)
        assert (error.http_status, error.code, error.param) == (503, "grammar_not_built", None)
        assert f"request {name}: it was not there after 5 s." in error.message
        assert error.remedy.startswith("Try again later")
    rig.add("again", 7, max_tokens=5, structured_outputs=DIGITS)
    finish(rig)
    check(rig, "free", "again")


@pytest.mark.parametrize(("stages", "depth", "tp"), LAYOUTS)
def test_r4_what_was_built_is_forgotten_with_the_ranks(stages: int, depth: int, tp: int) -> None:
    rig = make_rig(stages, depth, tp)
    rig.add("ready", 7, max_tokens=25, ignore_eos=True, structured_outputs=LETTERS)
    rig.turn()
    build_all(rig)
    rig.turn_often(2)
    rig.add("bound", 7, max_tokens=5, structured_outputs=DIGITS)
    rig.add("free", 6, max_tokens=FREE)
    rig.turn()
    assert rig.tokens("ready")
    assert rig.updates["bound"] == []
    rig.pipe.lose_stage(0)
    rig.step()
    rig.rejoin()
    before = len(rig.tokens("ready"))
    rig.turn_often(TURNS)
    assert rig.finish_reason("free") == "length"
    assert len(rig.tokens("ready")) == before, "its grammar is built anew"
    assert [len(rank.replica.builds) for rank in builders(rig)] == [2] * tp
    finish(rig)
    check(rig)


@pytest.mark.parametrize("prompt", [[3], [3] * 7], ids=["entered alone", "held back"])
@pytest.mark.parametrize(("stages", "depth", "tp"), LAYOUTS[::5])
def test_r4_a_build_that_kills_its_rank_twice_is_not_tried_again(
    prompt: list[int], stages: int, depth: int, tp: int
) -> None:
    """Its steps may all have returned by then."""
    rig = make_rig(stages, depth, tp)
    rig.add("bound", prompt, max_tokens=5, structured_outputs=DIGITS)
    rig.turn_often(TURNS)
    rig.add("free", 6, max_tokens=30, ignore_eos=True)
    for ended in (False, True):
        rig.turn_often(2)
        assert not rig.is_finished("free")
        rig.pipe.lose_stage(0)
        rig.step()
        rig.rejoin()
        assert rig.is_finished("bound") == ended
    (update,) = rig.updates["bound"]
    assert update.error is not None
    assert update.error.code == "quarantined"
    rig.add("after", 7, max_tokens=5, structured_outputs=LETTERS)
    finish(rig)
    check(rig, "free", "after")


@pytest.mark.parametrize("stages", [1, 3])
def test_dr5_preempted_while_it_is_built(stages: int) -> None:
    rig = make_rig(stages, num_blocks=10)
    rig.add("old", 5, max_tokens=30, ignore_eos=True)
    rig.turn()
    rig.add("bound", 8, max_tokens=5, structured_outputs=DIGITS)
    rig.turn_often(8)
    assert len(builders(rig)[0].replica.grammars) == 1
    rig.turn_often(4 * TURNS)
    check(rig, "old")
    assert rig.core.stats().scheduler.num_preemptions > 0
    assert rig.updates["bound"] == []
    for _ in range(TURNS):
        build_all(rig)
        rig.turn()
    check(rig)
    assert rig.core.stats().cache.free_blocks == 10


def test_dr5_equal_reports_give_equal_plans() -> None:
    def plans() -> list[ScheduledBatch]:
        rig = make_rig(3, 2, 2)
        for number in range(6):
            structured = [DIGITS, None, LETTERS][number % 3]
            rig.add(str(number), 3 + number, max_tokens=6, structured_outputs=structured)
            rig.turn()
            if number == 4:
                build_all(rig)
        finish(rig)
        return rig.pipe.plans

    assert plans() == plans()


@pytest.mark.parametrize(("stages", "depth", "tp"), LAYOUTS[::4])
def test_dr5_a_grammar_without_room_does_not_hold_up_the_line(stages: int, depth: int, tp: int) -> None:
    """Issue 25, point 18."""
    rig = make_rig(stages, depth, tp, scheduler=SchedulerConfig(max_num_seqs=4, built_grammar_bytes=1))
    rig.add("first", 7, max_tokens=20, ignore_eos=True, structured_outputs=DIGITS)
    rig.turn()
    build_all(rig)
    rig.add("awaits room", 7, max_tokens=5, structured_outputs=LETTERS)
    rig.add("free", 6, max_tokens=FREE)
    rig.add("shares", 5, max_tokens=2, structured_outputs=DIGITS)
    while not rig.is_finished("first"):
        rig.turn()
    assert rig.is_finished("free")
    assert rig.is_finished("shares")
    assert rig.updates["awaits room"] == []
    entered = [new.request_id for plan in rig.pipe.plans for new in plan.new_rows]
    assert entered[:3] == ["first", "free", "shares"]
    finish(rig)
    check(rig)


def test_a_driver_that_waits_is_not_sent_round_for_nothing() -> None:
    """Where only a build is awaited, a synchronous core waits for the ranks, as for a result."""
    rig = make_rig(1, 0)
    rig.add("bound", 7, max_tokens=5, structured_outputs=DIGITS)
    rig.turn_often(3)
    assert rig.core.num_inflight == 0
    asked: list[float] = []
    poll = rig.pipe.poll_results
    rig.pipe.poll_results = lambda timeout_s: asked.append(timeout_s) or poll(timeout_s)  # type: ignore[method-assign,func-returns-value]
    rig.step(timeout_s=0.5)
    assert asked == [0.0, 0.5]


def drive(seed: int) -> Counter[str]:
    """An engine's life with grammars, where everything comes as late as the seed has it."""
    chance = random.Random(seed)
    num_blocks = chance.choice([11, 16, 40])
    most_bytes, most = chance.choice([(1, 1), (3 << 20, 2), (1 << 29, 4)])  # of grammars
    rig = make_rig(
        chance.randint(1, 4),
        chance.randint(0, 2),
        chance.randint(1, 2),
        num_blocks=num_blocks,
        chance=chance,
        catalogue=FakeCatalogue() if chance.random() < 0.5 else None,
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            prefill_chunk=chance.choice([1, 3, 64]),
            max_waiting_tokens=1 << 20,
            built_grammar_bytes=most_bytes,
        ),
    )
    grammars = [StructuredOutputs(choice=[str(number)]) for number in range(4)]
    families = [[chance.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(2)]
    seen: Counter[str] = Counter()
    ended: set[str] = set()
    for number in range(24):
        name, prompt = str(number), chance.choice(families)[: chance.randint(1, 24)]
        rig.add(
            name,
            prompt,
            n=chance.choice([1, 1, 1, 3]),
            seed=number,
            max_tokens=chance.randint(0, 10),
            ignore_eos=True,
            structured_outputs=chance.choice([None, *grammars]),
            prompt_logprobs=chance.choice([None, None, 1]),
        )
        for _ in range(chance.randint(0, 8)):
            ended |= failed(rig.step(timeout_s=chance.choice([0.0, 1.0])), seen)
            rig.clock.advance(chance.choice([0.0, 0.1]))
            assert max(len(rank.replica.grammars) for rank in builders(rig)) <= most
        if chance.random() < 0.1:
            victim = chance.choice(list(rig.requests))
            seen["aborted"] += rig.abort(victim)
            ended.add(victim)
        elif chance.random() < 0.1:
            seen["flushed"] += 1
            rig.scheduler.prefixes.flush(with_store=False)
        elif chance.random() < 0.15 and (able := [r for r in builders(rig) if r.replica.builds]):
            rank = chance.choice(able)
            why, late = chance.choice([("it must not be", ""), ("", "it is late")])
            rig.pipe.build(rank, rank.replica.builds[0], why, late=late)
        elif chance.random() < 0.1:
            seen["lost"] += 1
            rig.pipe.lose_stage(0)
            ended |= failed(rig.step(), seen)
            rig.rejoin()
    for _ in range(3000):
        if rig.core.is_idle:
            break
        ended |= failed(rig.step(timeout_s=1.0), seen)
        rig.clock.advance(0.1)
    assert rig.core.is_idle
    for name in rig.requests.keys() - ended:
        assert rig.result(name) == rig.expected(name)
        assert rig.scores(name) == rig.expected_scores(name)
        seen["finished"] += 1
    assert rig.num_compared + rig.pipe.num_compared > 0
    numbers = {name: number for number, name in enumerate(rig.requests)}
    entered = dict.fromkeys(numbers[new.request_id] for plan in rig.pipe.plans for new in plan.new_rows)
    seen["passed"] += sum(before > after for before, after in itertools.pairwise(entered))
    seen["entered alone"] += sum(bool(new.blocks) for plan in rig.pipe.plans for new in plan.new_rows)
    return seen


def failed(updates: list[RequestUpdate], seen: Counter[str]) -> set[str]:
    """Whose grammar was not built, or who was lost twice."""
    errors = {update.request_id: update.error for update in updates if update.error is not None}
    codes = {"constraint_unmet", "grammar_not_built", "quarantined"}
    assert {error.code for error in errors.values()} <= codes
    seen["failed"] += len(errors)
    return set(errors)


def test_dr5_whatever_comes_when_tokens_and_tables_agree() -> None:
    seen: Counter[str] = Counter()
    for seed in range(25):
        try:
            seen += drive(seed)
        except (AssertionError, PeerError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    wanted = ("aborted", "flushed", "failed", "lost", "entered alone", "passed")
    assert min(seen[what] for what in wanted) > 5, seen
    assert seen["finished"] > 300


@pytest.mark.soak
def test_dr5_soak_whatever_comes_when() -> None:
    for seed in range(1000, 1600):
        drive(seed)
