"""Windows in plans: who drafts, how far, and what becomes of it (D5, D10, D11, d11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from drafters import KnowingDrafter
from fakes import CoreRig, FakeExecutor, next_token, taught
from penstock.batch import ScheduledBatch
from penstock.config.engine import SchedulerConfig
from penstock.scheduler import windows
from penstock.scheduler.cost_model import StageCost
from penstock.scheduler.pacing import FixedDepth
from penstock.scheduler.queues import RequestState
from penstock.speculation.drafter import Draft, Question
from penstock.speculation.streaming import KEPT_PLANS, PipeTimes


class Always(KnowingDrafter):
    """Guesses as many tokens as it may, all right."""

    name = "always"

    def __init__(self, request_of: Callable[[int], RequestState]) -> None:
        super().__init__(request_of, 1.0)

    def propose(self, question: Question) -> Draft:
        request, token_ids, most, *_ = question
        self.asked.add(request)
        state, context = self._request_of(request), list(token_ids)
        for _ in range(most):
            context.append(next_token(context, state.sampling, len(context) - state.prompt_len))
        return Draft(context[len(token_ids) :], 1.0)


def rig_of(**given: Any) -> CoreRig:
    return CoreRig(**{"drafter": Always, "num_drafts": 3, "eos_token_ids": (), "num_blocks": 64, **given})


def drafts_of(rig: CoreRig) -> list[int]:
    """How many drafts each plan with decodes brought."""
    return [sum(map(len, plan.drafts.values())) for plan in rig.plans]


def test_right_drafts_are_a_step_each_for_four_tokens() -> None:
    rig = rig_of()
    rig.add("r", 3, max_tokens=17)
    rig.run_until_idle()
    assert rig.result("r") == rig.expected("r")
    assert drafts_of(rig) == [0, 3, 3, 3, 3]  # the prompt's step yields one token, four steps four each
    told = rig.core.stats().scheduler.speculation
    assert (told.drafter, told.num_drafted, told.num_accepted) == ("always", 12, 12)
    updates = rig.updates["r"]
    assert [len(update.token_ids) for update in updates] == [1, 4, 4, 4, 4]
    assert [update.num_accepted_drafts for update in updates] == [0, 3, 3, 3, 3]


def test_a_window_goes_no_further_than_the_last_token_may() -> None:
    rig = rig_of()
    rig.add("r", 3, max_tokens=7)
    rig.run_until_idle()
    assert rig.result("r") == rig.expected("r")
    assert drafts_of(rig) == [0, 3, 1]  # 1 + 4 + 2 tokens


def test_d11_what_a_window_says_behind_the_stop_is_nobodys() -> None:
    rig = rig_of()
    rig.add("free", 3, max_tokens=12)
    rig.run_until_idle()
    tokens = rig.tokens("free")
    stop = tokens[2]  # in the middle of the first window
    assert stop not in tokens[:2]
    other = rig_of()
    other.add("r", 3, max_tokens=12, stop_token_ids=[stop], logprobs=0)
    other.run_until_idle()
    assert other.result("r") == (tokens[:3], "stop") == other.expected("r")
    last = other.updates["r"][-1]
    assert (last.token_ids, last.stop_token_id, len(last.logprobs or ())) == (tokens[1:3], stop, 2)
    assert (last.num_accepted_drafts, last.num_rejected_drafts) == (2, 1)


def test_a_request_that_says_so_does_not_draft() -> None:
    rig = rig_of()
    rig.add("r", 3, max_tokens=9, speculative=False)
    rig.run_until_idle()
    assert not any(drafts_of(rig))
    assert not any(update.num_accepted_drafts for update in rig.updates["r"])


def test_while_prompts_are_computed_nobody_drafts() -> None:
    rig = rig_of(scheduler=SchedulerConfig(max_num_seqs=8, prefill_chunk=2))
    rig.add("r", 2, max_tokens=30)
    for _ in range(3):
        rig.step(timeout_s=1.0)
    rig.add("other", 12, max_tokens=2)
    rig.run_until_idle()
    mixed = [plan for plan in rig.plans if len(plan.rows) > 1 and max(plan.num_tokens) == 2]
    assert len(mixed) > 3
    assert not any(plan.drafts for plan in mixed)
    assert sum(drafts_of(rig)) > 0


def wrong(request_of: Callable[[int], RequestState]) -> KnowingDrafter:
    """Sure of itself, and never right."""
    return KnowingDrafter(request_of, 0.0, claimed=0.9)


@pytest.mark.parametrize("drafter", [None, wrong, Always])
def test_drafts_take_no_block_that_another_rows_next_token_needs(drafter: Any) -> None:
    """Five blocks are just enough for both, as long as nobody takes one before it is needed."""
    rig = rig_of(drafter=drafter, num_drafts=4, num_blocks=5, block_size=4, max_model_len=40)
    rig.add("a", 3, max_tokens=8)
    rig.add("b", 3, max_tokens=10)
    rig.run_until_idle()
    assert rig.core.stats().scheduler.num_preemptions == 0
    assert rig.result("a") == rig.expected("a", 0)
    assert rig.result("b") == rig.expected("b", 1)


@pytest.mark.parametrize(("num_requests", "num_blocks"), [(3, 8), (4, 11)])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_nor_what_rows_of_other_plans_need(num_stages: int, num_requests: int, num_blocks: int) -> None:
    for drafter in (None, wrong):
        rig = rig_of(
            drafter=drafter,
            num_stages=num_stages,
            num_drafts=4,
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=16,
        )
        for number in range(num_requests):
            rig.add(f"r{number}", 3, max_tokens=10)
        rig.run_until_idle()
        assert rig.core.stats().scheduler.num_preemptions == 0


def test_rows_with_drafts_stand_behind_the_others() -> None:
    rig = rig_of(drafter=lambda request_of: KnowingDrafter(request_of, 0.9, seed=5))
    for number in range(5):
        rig.add(f"r{number}", 3, max_tokens=30)
    rig.run_until_idle()
    mixed = [plan for plan in rig.plans if 0 < len(plan.drafts) < len(plan.rows)]
    assert mixed
    for plan in mixed:
        assert sorted(plan.drafts) == list(range(len(plan.rows) - len(plan.drafts), len(plan.rows)))
        assert plan.num_tokens == [1 + len(plan.drafts.get(index, ())) for index in range(len(plan.rows))]
    for number in range(5):
        assert rig.result(f"r{number}") == rig.expected(f"r{number}", number)


def test_where_a_step_is_bound_by_computing_nobody_drafts() -> None:
    cost = StageCost(read=1e-4, per_token=0.02)
    rig = rig_of(costs=(cost, cost))
    rig.add("r", 3, max_tokens=9)
    rig.run_until_idle()
    assert drafts_of(rig) == [0] * 9


def test_a_request_that_has_a_draft_waits_for_its_result() -> None:
    """With plans ahead of the results a request would go on before its newest token is known."""
    for drafter, drafts in ((None, False), (Always, True)):
        rig = rig_of(drafter=drafter, async_depth=2, latency=None)
        rig.add("r", 3, max_tokens=13)
        rig.run_until_idle()
        assert rig.result("r") == rig.expected("r")
        assert any(drafts_of(rig)) == drafts
    assert max(drafts_of(rig)) == 3


def test_whether_a_stream_pays_is_worked_out_once_for_a_chance_and_anew_some_plans_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[float, int]] = []

    def size(chance: float, most: int, times: PipeTimes) -> int:
        asked.append((chance, most))
        return 1

    monkeypatch.setattr(windows, "streamed_size", size)
    prices = windows._Prices(None, FixedDepth(4), 8)
    for step in range(3, 3 + 2 * KEPT_PLANS):
        prices.planned(windows._Shape(1, 10, is_alone=True), step, float(step))
        assert prices.streamed_size(Draft(range(20), 0.503)) == 1
    assert asked == [(0.5, 9)] * 3, "for the first plans, and twice anew"
    prices.note_running(2)
    prices.streamed_size(Draft(range(2), 0.9))
    assert asked[3:] == [(0.9, 2)]


def test_a_size_that_seemed_cheap_is_given_up_when_large_windows_turn_out_to_be_dear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans of single tokens do not tell what more tokens cost; a stream tries, and learns."""
    cheap, dear = StageCost(read=0.1, per_token=0.001), StageCost(read=0.1, per_token=0.1)
    model = taught(*[cheap] * 8, alone=[cheap] * 8)
    prices = windows._Prices(model, FixedDepth(8), 8)
    shape, draft = windows._Shape(1, 10, is_alone=True), Draft(range(20), 0.95)
    prices.planned(shape, 1, 1.0)
    assert prices.streamed_size(draft) > 1
    monkeypatch.setattr(model, "costs", lambda *, alone: [dear] * 8)
    prices.planned(shape, 2, 2.0)
    assert prices.streamed_size(draft) == 1


def test_e5_a_plan_may_follow_a_window_whose_outcome_is_not_known() -> None:
    """A drafter that is never sure enough to wait for: the next plan goes out with the window in flight."""

    def unsure(request_of: Callable[[int], RequestState]) -> KnowingDrafter:
        return KnowingDrafter(request_of, 0.5, claimed=0.45, seed=3)

    rig = rig_of(drafter=unsure, async_depth=2, latency=None, num_drafts=4)
    for number in range(3):
        rig.add(f"r{number}", 3, max_tokens=40)
    while not rig.core.is_idle:
        rig.settle(3)  # all that are in flight: every token is known, and the next plans go out together
    for number in range(3):
        assert rig.result(f"r{number}") == rig.expected(f"r{number}", number)
    followed = 0
    for before, plan in zip(rig.plans, rig.plans[1:], strict=False):
        windows = {before.rows[index] for index in before.drafts}
        sources = dict(zip(plan.rows, plan.token_from, strict=True))
        followed += any(sources.get(row) == before.step_id for row in windows)
    assert followed > 5


class Lying(FakeExecutor):
    """Its results accept more than was sent, or forget drafts."""

    def _result(self, plan: ScheduledBatch, tokens: list[list[int]]) -> Any:
        result = super()._result(plan, tokens)
        if not plan.drafts:
            return result
        return msgspec.structs.replace(result, num_rejected=[count + 1 for count in result.num_rejected])


def test_a_result_that_does_not_fit_its_window_is_refused() -> None:
    rig = rig_of(executor_class=Lying)
    rig.add("r", 3, max_tokens=9)
    rig.run_until_idle()
    assert rig.core.failure is not None
    assert "ids and rejected drafts, found" in rig.core.failure.message


def test_a_request_is_forgotten_once_however_it_ends() -> None:
    made: list[KnowingDrafter] = []

    def knowing(request_of: Callable[[int], RequestState]) -> KnowingDrafter:
        made.append(KnowingDrafter(request_of, 0.9))
        return made[-1]

    rig = rig_of(drafter=knowing)
    rig.add("ends", 3, max_tokens=5)
    rig.add("aborted", 3, max_tokens=50)
    for _ in range(4):
        rig.step(timeout_s=1.0)
    rig.abort("aborted")
    rig.run_until_idle()
    assert made[0].forgotten >= made[0].asked


def test_r6_of_plans_whose_requests_have_ended_nothing_is_kept() -> None:
    """Where costs are not known, as with torch, plans are timed until their results come."""
    rig = rig_of(num_stages=2, latency=1)
    for number in range(20):
        name = f"r{number}"
        rig.add(name, 3, max_tokens=12, speculative=False)
        while len(rig.tokens(name)) < 4:
            rig.step(timeout_s=1.0)
        rig.core.abort(name)
        rig.run_until_idle()
    drafting = rig.scheduler.windows
    assert isinstance(drafting, windows.DraftWindows)
    assert len(drafting._prices._made_at) < 4
