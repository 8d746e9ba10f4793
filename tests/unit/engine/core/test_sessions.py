"""Sessions in a running core: a turn finds what the one before has left, and no token depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from fakes import CoreRig
from penstock.config.engine import EvictionPolicy, SchedulerConfig
from penstock.engine.core import operations_in_force
from penstock.errors import ErrorInfo, NotFoundError
from penstock.operations import Abort, CloseSession, FlushCache, OpenSession, Operation, OperationDone
from penstock.request import GenerationRequest, SamplingParams

BLOCK = 4
PROMPT = [3, 5, 7, 9, 2, 4, 6, 8, 1, 3]
LOST = ErrorInfo(kind="StageLostError", message="stage 1 was killed.", stage=1)


class Talk:
    """A core with a prefix cache, whose operations are complete when they return."""

    def __init__(self, policy: EvictionPolicy = "lru", num_blocks: int = 24, **settings: object) -> None:
        self.rig = CoreRig(
            **{
                "eviction": policy,
                "num_blocks": num_blocks,
                "block_size": BLOCK,
                "num_stages": 2,
                "async_depth": 1,
                "recovers": True,
                **settings,
            }
        )
        self._num_asked = 0

    def operate(self, operation: Operation) -> OperationDone:
        core = self.rig.core
        self._num_asked += 1
        core.operations.accept((b"", self._num_asked), operation, core.steps_in_flight[1])
        for _ in range(200):
            if done := core.operations.take_done():
                ((_, found),) = done
                return found
            self.rig.step(timeout_s=1.0)
        raise AssertionError("it never was complete")

    def turn(self, name: str, prompt: list[int], **sampling: object) -> tuple[int, list[int]]:
        """Tokens that were found for it, and its own."""
        self.rig.add(name, prompt, **{"max_tokens": 7, "ignore_eos": True, **sampling})
        self.rig.run_until_idle()
        assert self.rig.result(name) == self.rig.expected(name, list(self.rig.requests).index(name))
        return self.rig.updates[name][0].num_cached_tokens, self.rig.tokens(name)

    def traffic(self, label: str, count: int = 6) -> None:
        """More than the pool holds, from others."""
        for number in range(count):
            prompt = [(11 * number + 3 * index + len(label)) % 40 for index in range(21)]
            self.turn(f"{label}{number}", [number, *prompt])


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
@pytest.mark.parametrize("session_id", ["", "s"])
def test_g4_the_next_turn_finds_all_of_the_one_before_though_others_came_between(
    policy: EvictionPolicy, session_id: str
) -> None:
    talk = Talk(policy)
    opened = talk.operate(OpenSession("s"))
    assert opened.error is None
    assert opened.completed_step is not None
    assert opened.completed_step >= opened.accepted_step
    found, answer = talk.turn("first", PROMPT, session_id=session_id)
    assert found == 0
    talk.traffic("between")
    second = [*PROMPT, *answer, 9, 9]
    found, more = talk.turn("second", second, session_id=session_id)
    whole = (len(PROMPT) + len(answer) - 1) // BLOCK * BLOCK
    assert found == (whole if session_id else 0)
    talk.traffic("again")
    found, _ = talk.turn("third", [*second, *more, 4], session_id=session_id)
    assert found == ((len(second) + len(more) - 1) // BLOCK * BLOCK if session_id else 0)


def test_g4_a_closed_session_keeps_nothing_and_refuses_by_name() -> None:
    talk = Talk()
    talk.operate(OpenSession("s"))
    _, answer = talk.turn("first", PROMPT, session_id="s")
    assert talk.rig.core.stats().sessions.kept_blocks == 4
    assert talk.operate(CloseSession("s")).error is None
    stats = talk.rig.core.stats()
    assert (stats.sessions.num_open, stats.sessions.kept_blocks) == (0, 0)
    talk.traffic("between")
    with pytest.raises(NotFoundError) as raised:
        talk.rig.add("second", PROMPT, session_id="s")
    assert raised.value.param == "session_id"
    assert talk.turn("third", [*PROMPT, *answer, 9])[0] == 0
    error = talk.operate(CloseSession("s")).error
    assert error is not None
    assert (error.kind, error.code) == ("NotFoundError", "session_not_found")


def test_g4_more_than_may_be_open_are_refused_and_the_others_stay() -> None:
    talk = Talk(scheduler=SchedulerConfig(max_num_seqs=8, max_sessions=1))
    talk.operate(OpenSession("s"))
    done = talk.operate(OpenSession("t"))
    assert done.error is not None
    assert (done.error.kind, done.error.code) == ("OverloadedError", "too_many_sessions")
    assert done.completed_step is None
    assert talk.turn("r", PROMPT, session_id="s")[0] == 0


def test_g4_another_core_opens_thousands_of_sessions_without_a_look_at_all_of_them_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number, looks = 3000, 0

    class Counted(operations_in_force._Open):
        def __getattribute__(self, name: str) -> Any:
            nonlocal looks
            looks += 1
            return super().__getattribute__(name)

    monkeypatch.setattr(operations_in_force, "_Open", Counted)
    talk = Talk(scheduler=SchedulerConfig(max_num_seqs=8, max_sessions=number - 1))
    core = talk.rig.core
    talk.rig.add("r", PROMPT, max_tokens=20, ignore_eos=True)
    talk.rig.step(timeout_s=1.0)
    for ticket in range(number):
        core.operations.accept((b"", ticket), OpenSession(str(ticket)), core.steps_in_flight[1])
    done = []
    while len(done) < number:
        talk.rig.step(timeout_s=1.0)
        done += core.operations.take_done()
    errors = [ticket for (_, ticket), how in done if how.error is not None]
    assert (errors, core.stats().sessions.num_open) == ([number - 1], number - 1)
    assert [ticket for (_, ticket), _ in done if ticket not in errors] == list(range(number - 1))
    assert looks <= 50 * number
    talk.rig.run_until_idle()
    assert talk.rig.result("r") == talk.rig.expected("r", 0)


def test_g4_the_core_closes_a_session_that_nobody_uses() -> None:
    talk = Talk()
    talk.operate(OpenSession("s", idle_s=30))
    talk.turn("first", PROMPT, session_id="s")
    talk.rig.clock.advance(29)
    talk.rig.step()
    assert talk.rig.core.stats().sessions.num_open == 1
    talk.rig.clock.advance(1)
    talk.rig.step()
    stats = talk.rig.core.stats()
    assert (stats.sessions.num_open, stats.sessions.kept_blocks, stats.sessions.num_reaped) == (0, 0, 1)
    assert talk.rig.core.operations.sessions.take_changes() == ([], ["s"])
    with pytest.raises(NotFoundError):
        talk.rig.add("late", PROMPT, session_id="s")


def test_g4_a_request_that_waits_for_long_is_a_use() -> None:
    talk = Talk(latency=None)
    talk.operate(OpenSession("s", idle_s=30))
    talk.rig.add("r", PROMPT, session_id="s", max_tokens=3)
    for _ in range(5):
        talk.rig.clock.advance(20)
        talk.rig.step()
    assert talk.rig.core.stats().sessions.num_open == 1
    talk.rig.abort("r")
    talk.rig.clock.advance(30)
    talk.rig.step()
    assert talk.rig.core.stats().sessions.num_open == 0


def test_g4_whoever_was_taken_by_another_core_needs_no_session_any_more() -> None:
    """It was closed while that core was lost; the request goes on after the tokens that it has."""
    talk = Talk()
    params = SamplingParams(session_id="s", temperature=0.0, max_tokens=7, ignore_eos=True)
    request = GenerationRequest(request_id="r", prompt_token_ids=PROMPT, sampling=params)
    with pytest.raises(NotFoundError):
        talk.rig.core.add_request(request)
    talk.rig.requests["r"], talk.rig.updates["r"] = request, []
    all_tokens, reason = talk.rig.expected("r")
    talk.rig.core.add_request(request, all_tokens[:3])
    talk.rig.run_until_idle()
    assert talk.rig.result("r") == (all_tokens[3:], reason)


def test_g4_a_flush_forgets_the_blocks_and_no_session() -> None:
    talk = Talk()
    talk.operate(OpenSession("s"))
    _, answer = talk.turn("first", PROMPT, session_id="s")
    talk.operate(FlushCache())
    stats = talk.rig.core.stats()
    assert (stats.sessions.num_open, stats.sessions.kept_blocks) == (1, 0)
    second = [*PROMPT, *answer, 9]
    assert talk.turn("second", second, session_id="s")[0] == 0
    talk.traffic("between")
    assert talk.turn("third", [*second, 4, 4], session_id="s")[0] == len(second) // BLOCK * BLOCK


def test_g4_an_abort_ends_requests_and_what_they_have_computed_is_kept() -> None:
    talk = Talk()
    talk.operate(OpenSession("s"))
    talk.rig.add("r", PROMPT, session_id="s", max_tokens=30, ignore_eos=True)
    for _ in range(5):
        talk.rig.step(timeout_s=1.0)
    core = talk.rig.core
    core.operations.accept((b"", 99), Abort(["r"]), core.steps_in_flight[1])
    talk.rig.run_until_idle()
    assert core.stats().sessions.num_open == 1
    talk.traffic("between")
    assert talk.turn("again", PROMPT, session_id="s")[0] == len(PROMPT) // BLOCK * BLOCK


@pytest.mark.parametrize("num_steps", [0, 2, 5])
def test_g4_a_lost_stage_takes_the_blocks_and_no_session(num_steps: int) -> None:
    """Who runs is computed again, and then it is kept."""
    talk = Talk()
    talk.operate(OpenSession("s", idle_s=30))
    talk.turn("first", PROMPT, session_id="s")
    talk.rig.add("second", [*PROMPT, 5, 5, 5], session_id="s", max_tokens=9, ignore_eos=True)
    for _ in range(num_steps):
        talk.rig.step(timeout_s=1.0)
    talk.rig.core.lose_epoch(LOST)
    stats = talk.rig.core.stats()
    assert (stats.sessions.num_open, stats.sessions.kept_blocks) == (1, 0)
    talk.rig.rejoin()
    talk.rig.run_until_idle()
    assert talk.rig.result("second") == talk.rig.expected("second", 1)
    talk.traffic("between")
    assert talk.turn("third", [*PROMPT, 5, 5, 5], session_id="s")[0] == 12


def test_g4_several_answers_of_a_prompt_are_all_kept() -> None:
    talk = Talk()
    talk.operate(OpenSession("s"))
    talk.rig.add("r", PROMPT, n=3, session_id="s", temperature=1.0, max_tokens=7, ignore_eos=True, seed=5)
    talk.rig.run_until_idle()
    talk.traffic("between")
    for index, name in enumerate(["r", "r/1", "r/2"]):
        prompt = [*PROMPT, *talk.rig.tokens(name), 1]
        assert talk.turn(f"next{index}", prompt, session_id="s")[0] == 16


@pytest.mark.parametrize("seed", range(20))
def test_g4_sessions_at_any_moment_change_no_token(seed: int) -> None:
    """With a pool that is too small, stages lost in between, and time that passes."""
    chance = random.Random(seed)
    rig = CoreRig(
        num_stages=chance.choice([1, 2, 3]),
        async_depth=chance.choice([0, 1, 2]),
        num_blocks=chance.choice([10, 30]),
        eviction=chance.choice(["lru", "lfu", "priority"]),
        max_model_len=36,
        recovers=True,
    )
    sessions = rig.core.operations.sessions
    kinds: list[Callable[[], Operation]] = [
        lambda: OpenSession(
            chance.choice("xyz"), chance.choice([None, 3, 8, 30]), chance.choice([5.0, 50.0])
        ),
        lambda: CloseSession(chance.choice("xyz")),
        FlushCache,
    ]
    talks: dict[str, list[int]] = {name: [ord(name) % 40] * 5 for name in "xyz-"}
    for name in "xyz":
        rig.core.operations.accept((b"", 0), OpenSession(name, None, 50.0), rig.core.steps_in_flight[1])
    num_refused = most_kept = 0
    for number in range(120):
        rig.clock.advance(chance.choice([0.0, 0.5, 3.0]))
        rig.step(timeout_s=chance.choice([0.0, 1.0]))
        what = chance.random()
        if what < 0.25:
            (kind,) = chance.choices(kinds, [4, 1, 1])
            rig.core.operations.accept((b"", number), kind(), rig.core.steps_in_flight[1])
        elif what < 0.3:
            for update in rig.core.lose_epoch(LOST):
                rig.updates[update.request_id].append(update)
            rig.rejoin()
        elif what < 0.6:
            name = chance.choice(list(talks))
            talks[name] = [*talks[name], number % 40][-25:]
            try:
                rig.add(
                    f"{name}{number}",
                    talks[name],
                    session_id=name.strip("-"),
                    max_tokens=chance.choice([1, 6, 10]),
                    ignore_eos=True,
                )
            except NotFoundError:
                num_refused += 1
        most_kept = max(most_kept, sessions.num_kept)
        rig.core.check_invariants()
    rig.run_until_idle()
    num_served = sum(request.sampling.session_id != "" for request in rig.requests.values())
    assert num_served > 0, f"{num_refused} were refused"
    assert most_kept > 0
    num_failed = 0
    for arrival, name in enumerate(rig.requests):
        if rig.finish_reason(name) == "error":  # in the pipe at two losses, with no token between
            num_failed += 1
        else:
            assert rig.result(name) == rig.expected(name, arrival)
    assert num_failed < len(rig.requests) / 2
    assert sessions.num_kept <= rig.allocator.num_blocks // 2
    for name in "xyz":
        rig.core.operations.accept((b"", 0), CloseSession(name), rig.core.steps_in_flight[1])
    assert (len(sessions), sessions.num_kept) == (0, 0)
    assert rig.allocator.num_free_blocks == rig.allocator.num_blocks
