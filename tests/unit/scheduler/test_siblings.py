"""Several sequences of one prompt: the others wait until the first has computed it, whatever becomes of it.

`CoreRig` checks after each operation that nothing is held twice or lost; the ranks of `fakes` check that each
block that is found holds the very tokens.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from fake_catalogue import FakeCatalogue
from fakes import VOCAB_SIZE, CoreRig
from penstock.batch import GREEDY, ScoredTokens, StepResult
from penstock.config.engine import SchedulerConfig
from penstock.engine.client.siblings import sibling_seed, with_siblings
from penstock.errors import ErrorInfo, InvalidRequestError, OverloadedError
from penstock.operations import FlushCache, Pause, Resume
from penstock.request import GenerationRequest, SamplingParams, TokenLogprobs
from penstock.scheduler.admission import derive_seed
from penstock.scheduler.prompt_scores import returned_scores
from penstock.scheduler.queues import RequestQueues, RequestState

BLOCK = 4
PROMPT = [(5 * index + 2) % VOCAB_SIZE for index in range(18)]  # four whole blocks and a half
LOST = ErrorInfo(kind="StageLostError", message="stage 0 was killed.", stage=0)
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 6, "ignore_eos": True}


def rig(**settings: Any) -> CoreRig:
    """A cached pool; prompts take several plans."""
    scheduler = {"max_num_seqs": 8, "prefill_chunk": 5, "max_waiting_tokens": 1 << 20}
    scheduler |= settings.pop("scheduler", {})
    return CoreRig(
        **{
            "eviction": "lru",
            "block_size": BLOCK,
            "scheduler": SchedulerConfig(**scheduler),
            "max_model_len": 64,
            **settings,
        }
    )


def names(count: int, name: str = "r") -> list[str]:
    return [name, *(f"{name}/{index}" for index in range(1, count))]


def computed(one: CoreRig, request_id: str) -> int:
    """Tokens of its prompt that plans have run for it."""
    rows, total = {}, 0
    for plan in one.plans:
        rows |= {new.row: new.request_id for new in plan.new_rows}
        for row, count, start in zip(plan.rows, plan.num_tokens, plan.start_positions, strict=True):
            if rows[row] == request_id:
                total += max(0, min(start + count, len(PROMPT)) - start)
    return total


def scored(one: CoreRig) -> int:
    """Tokens of prompts that plans have had scored."""
    return sum(tokens.count for plan in one.plans for tokens in plan.scored)


def assert_exact(one: CoreRig, request_ids: list[str]) -> None:
    for request_id in request_ids:
        assert one.result(request_id) == one.expected(request_id), request_id
        assert one.scores(request_id) == one.expected_scores(request_id), request_id


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("async_depth", [0, 2])
def test_the_prompt_is_computed_once_but_for_its_last_block(num_stages: int, async_depth: int) -> None:
    one = rig(num_stages=num_stages, async_depth=async_depth)
    one.add("r", PROMPT, n=4, **SEEDED)
    while not one.updates["r"]:
        one.step(timeout_s=1.0)
    held = {block for row in one.executor.replica.rows.values() for block in row.blocks}
    assert len(held) <= 4 + 4 * 2, "four blocks that all share, and for each the rest and what it generates"
    one.run_until_idle()
    assert [computed(one, name) for name in names(4)] == [18, 2, 2, 2]
    assert_exact(one, names(4))
    assert len({tuple(one.tokens(name)) for name in names(4)}) == 4, "each has a seed of its own"
    cached = [one.updates[name][0].num_cached_tokens for name in names(4)]
    assert cached == [0, 16, 16, 16]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("async_depth", [0, 2])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_g8_the_prompt_is_computed_and_scored_once_and_all_have_the_scores(
    num_stages: int, async_depth: int, max_tokens: int
) -> None:
    one = rig(num_stages=num_stages, async_depth=async_depth)
    one.add("r", PROMPT, n=4, **SEEDED | {"prompt_logprobs": 2, "max_tokens": max_tokens})
    one.add("other", PROMPT[:9], **SEEDED)
    one.run_until_idle()
    assert_exact(one, [*names(4), "other"])
    assert scored(one) == 17
    computed_here = [computed(one, name) for name in names(4)]
    if max_tokens:
        assert computed_here == [18, 2, 2, 2]
    else:
        assert computed_here[0] == 17
        assert max(computed_here[1:]) <= 2


def test_g8_without_a_prefix_cache_it_is_scored_once() -> None:
    one = rig(eviction=None)
    one.add("r", PROMPT, n=3, **SEEDED | {"prompt_logprobs": 0})
    one.run_until_idle()
    assert_exact(one, names(3))
    assert scored(one) == 17


@pytest.mark.parametrize("after", range(7))
@pytest.mark.parametrize("what", ["abort", "loss", "failure"])
def test_g8_a_leader_that_ends_or_begins_again_while_it_is_scored(after: int, what: str) -> None:
    one = rig(recovers=True, num_stages=2, async_depth=1)
    if what == "failure":
        one.executor.fail_scores = {after: [0]}
    one.add("r", PROMPT, n=3, **SEEDED | {"prompt_logprobs": 1})
    for _ in range(after):
        one.step(timeout_s=1.0)
    if what == "abort":
        one.abort("r")
    elif what == "loss":
        one.core.lose_epoch(LOST)
        one.rejoin()
    one.run_until_idle()
    assert_exact(one, names(3) if what == "loss" else names(3)[1:])
    assert scored(one) <= (2 if what == "loss" else 3) * 17, "each scores it where nobody is left to follow"


def test_whole_blocks_of_a_prompt_leave_its_last_one_to_each() -> None:
    """The logits of the last token are wanted of each."""
    one = rig()
    one.add("r", PROMPT[:16], n=2, **SEEDED | {"max_tokens": 1})
    one.run_until_idle()
    assert [computed(one, name) for name in names(2)] == [16, 4]


def test_followers_start_in_the_plan_behind_the_prompts_last() -> None:
    one = rig(latency=None)
    one.add("r", PROMPT, n=3, **SEEDED)
    while len(one.plans) < 5 and not one.core.is_idle:
        one.settle(1)
    entered = {new.request_id: plan.step_id for plan in one.plans for new in plan.new_rows}
    last = max(plan.step_id for plan in one.plans if plan.num_tokens == [3])  # 18 tokens in chunks of 5
    assert entered["r/1"] == entered["r/2"] == last + 1


def test_seeds_are_functions_of_the_request_s_seed_and_the_index() -> None:
    assert [sibling_seed(7, index) for index in range(3)] == [7, sibling_seed(7, 1), sibling_seed(7, 2)]
    seeds = [sibling_seed(seed, index) for seed in (-(2**63), -1, 0, 7, 2**63 - 1) for index in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    asked = with_siblings("r", [1], SamplingParams(n=3, seed=7))
    assert [one.sampling.seed for one in asked.alone()] == [7, sibling_seed(7, 1), sibling_seed(7, 2)]
    assert [one.sampling.n for one in asked.alone()] == [1, 1, 1]
    assert with_siblings("r", [1], SamplingParams()).alone()[0].follows == ""


def test_without_a_seed_each_has_that_of_its_place_in_the_order_of_arrival() -> None:
    one = rig(seed=5)
    one.add("a", 3, temperature=1.0, max_tokens=3)
    one.add("r", PROMPT, n=3, temperature=1.0, max_tokens=8)
    one.run_until_idle()
    for arrival, name in enumerate(names(3), start=1):
        assert one.result(name) == one.expected(name, arrival)
    assert sibling_seed(None, 2) is None
    assert derive_seed(5, 1) != derive_seed(5, 2)


def test_without_a_prefix_cache_each_computes_its_own_prompt() -> None:
    one = rig(eviction=None)
    one.add("r", PROMPT, n=3, **SEEDED)
    one.run_until_idle()
    assert [computed(one, name) for name in names(3)] == [18, 18, 18]
    assert_exact(one, names(3))


@pytest.mark.parametrize("after", range(6))
def test_a_leader_that_is_aborted_leaves_the_prompt_to_the_next(after: int) -> None:
    one = rig()
    one.add("r", PROMPT, n=3, **SEEDED)
    for _ in range(after):
        one.step(timeout_s=1.0)
    one.abort("r")
    one.run_until_idle()
    assert_exact(one, names(3)[1:])
    assert sum(computed(one, name) for name in names(3)) <= 18 + 18 + 18


@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_lost_stage_changes_no_token(after: int, num_stages: int) -> None:
    one = rig(recovers=True, num_stages=num_stages, async_depth=1)
    one.add("r", PROMPT, n=3, **SEEDED)
    for _ in range(after):
        one.step(timeout_s=1.0)
    one.core.lose_epoch(LOST)
    one.rejoin()
    one.run_until_idle()
    assert_exact(one, names(3))
    assert all(computed(one, name) < 18 + 18 for name in names(3)[1:]), "nor is the prompt computed by each"


def test_a_leader_whose_numbers_are_no_good_leaves_nothing_to_the_others() -> None:
    one = rig()
    one.executor.fail_rows = {step: [0] for step in range(5)}  # the prompt takes plans 1 to 4, behind a probe
    one.add("r", PROMPT, n=3, **SEEDED)
    one.run_until_idle()
    assert one.finish_reason("r") == "error"
    assert_exact(one, names(3)[1:])
    assert computed(one, "r/1") == 18, "it begins with none of the blocks"


def test_a_leader_that_is_preempted_is_waited_for_again() -> None:
    """Two rows fill the pool; the followers are many."""
    one = rig(num_blocks=10, scheduler={"max_num_seqs": 4})
    one.add("r", PROMPT, n=4, **SEEDED | {"max_tokens": 20})
    one.run_until_idle()
    assert one.core.stats().scheduler.num_preemptions > 0
    assert_exact(one, names(4))


def test_a_leader_that_ends_with_its_first_token() -> None:
    one = rig()
    one.add("r", PROMPT, n=3, **SEEDED | {"max_tokens": 1})
    one.run_until_idle()
    assert_exact(one, names(3))
    assert [computed(one, name) for name in names(3)] == [18, 2, 2]


def test_a_flush_while_the_prompt_is_computed_keeps_nobody_waiting() -> None:
    one = rig()
    one.add("r", PROMPT, n=2, **SEEDED)
    one.step(timeout_s=1.0)
    one.core.operations.accept((b"", 1), FlushCache(), one.core.steps_in_flight[1])
    one.run_until_idle()
    assert_exact(one, names(2))
    assert computed(one, "r/1") == 18, "what the first had computed was not to be found any more"


def test_others_behind_them_in_line_get_their_tokens() -> None:
    one = rig()
    one.add("r", PROMPT, n=3, **SEEDED)
    one.add("other", PROMPT[:9], **SEEDED)
    one.run_until_idle()
    assert_exact(one, [*names(3), "other"])


def test_r8_all_may_wait_or_none() -> None:
    one = rig(scheduler={"max_num_seqs": 2, "max_waiting_requests": 3})
    one.add("a", PROMPT, **SEEDED)
    with pytest.raises(OverloadedError):
        one.add("r", PROMPT, n=5, **SEEDED)
    assert one.core.stats().scheduler.num_waiting == 1
    one.add("r", PROMPT, n=4, **SEEDED)
    with pytest.raises(
        InvalidRequestError, match="n is 6; the limit of running and waiting sequences is 5"
    ) as caught:
        one.add("s", PROMPT, n=6, **SEEDED)
    assert (caught.value.param, caught.value.code) == ("n", "out_of_range")
    one.run_until_idle()
    assert_exact(one, names(4))


def test_r8_the_tokens_of_all_are_counted_at_the_door() -> None:
    one = rig(scheduler={"max_num_seqs": 1, "max_waiting_tokens": 80})
    one.add("a", PROMPT, **SEEDED)
    with pytest.raises(OverloadedError, match="the 64 of this one"):  # 18 and 23 times 2
        one.add("r", PROMPT, n=24, **SEEDED)
    one.add("r", PROMPT, n=22, **SEEDED)
    without = rig(eviction=None, scheduler={"max_num_seqs": 1, "max_waiting_tokens": 80})
    without.add("a", PROMPT, **SEEDED)
    with pytest.raises(OverloadedError, match="the 72 of this one"):
        without.add("r", PROMPT, n=4, **SEEDED)


def test_an_id_that_is_in_use_is_refused_with_all_that_follow() -> None:
    one = rig()
    one.add("r/1", PROMPT, **SEEDED)
    with pytest.raises(InvalidRequestError, match="'r/1' is in use"):
        one.add("r", PROMPT, n=2, **SEEDED)
    assert one.core.stats().scheduler.num_waiting == 1


def test_nobody_waits_too_long_whose_request_has_begun() -> None:
    """The prompt takes longer than a request may wait, and there is one row."""
    one = rig(scheduler={"max_num_seqs": 1, "queue_timeout_s": 5.0})
    one.add("r", PROMPT, n=2, **SEEDED)
    one.add("other", PROMPT[:3], **SEEDED)
    one.step(timeout_s=1.0)
    one.clock.advance(6.0)
    one.run_until_idle()
    assert_exact(one, names(2))
    assert one.finish_reason("other") == "error"


def test_all_wait_too_long_when_none_has_begun() -> None:
    one = rig(scheduler={"max_num_seqs": 1, "queue_timeout_s": 5.0})
    one.add("a", PROMPT, **SEEDED)
    one.step(timeout_s=1.0)
    one.add("r", PROMPT, n=3, **SEEDED)
    one.clock.advance(6.0)
    one.run_until_idle()
    assert [one.finish_reason(name) for name in ["a", *names(3)]] == ["length", "error", "error", "error"]


def test_a_pause_lets_those_end_together_that_have_begun() -> None:
    one = rig(scheduler={"max_num_seqs": 1})
    one.add("r", PROMPT, n=2, **SEEDED)
    one.step(timeout_s=1.0)
    one.add("other", PROMPT, n=2, **SEEDED)
    one.core.operations.accept((b"", 1), Pause(mode="wait"), one.core.steps_in_flight[1])
    for _ in range(60):
        one.step(timeout_s=1.0)
    assert_exact(one, names(2))
    assert one.core.operations.take_done(), "it is complete"
    assert not one.updates["other"]
    one.core.operations.accept((b"", 2), Resume(), one.core.steps_in_flight[1])
    one.run_until_idle()
    assert_exact(one, names(2, "other"))


@pytest.mark.parametrize("had", [(5, 5, 5), (9, 4, 9), (4, 9, 0), (17, 3, 17), (0, 17, 2)])
def test_r13_another_core_goes_on_with_the_scores_that_each_had(had: tuple[int, int, int]) -> None:
    """Whoever had fewer than the one that he follows is told what is new, or scores the rest himself."""
    one = rig()
    params = SamplingParams(n=3, prompt_logprobs=1, **SEEDED)
    for asked, num_scores in zip(with_siblings("r", PROMPT, params).alone(), had, strict=True):
        one.core.add_request(asked, [], num_scores)
        one.requests[asked.request_id], one.updates[asked.request_id] = asked, []
    one.run_until_idle()
    for name, num_scores in zip(names(3), had, strict=True):
        assert one.result(name) == one.expected(name)
        assert one.scores(name) == one.expected_scores(name)[num_scores:]


def test_r13_scores_that_have_returned_before_are_not_waited_for() -> None:
    one = rig()
    params = SamplingParams(n=2, prompt_logprobs=1, **SEEDED)
    for asked, num_scores in zip(with_siblings("r", PROMPT, params).alone(), (17, 3), strict=True):
        one.core.add_request(asked, [], num_scores)
        one.requests[asked.request_id], one.updates[asked.request_id] = asked, []
    one.run_until_idle()
    (entered,) = [plan.step_id for plan in one.plans if "r/1" in [new.request_id for new in plan.new_rows]]
    assert entered == one.plans[0].step_id, "the leader's are not told again"


def test_g8_who_has_scores_of_his_own_on_the_way_is_told_no_others() -> None:
    """As after a preemption: each score comes once."""
    queues = RequestQueues()
    leader, follower, late = (state(arrival) for arrival in range(3))
    for one in (leader, follower, late):
        queues.add(one)
    queues.admit(leader, 0)
    follower.leader = late.leader = leader
    follower.num_scores_planned = 2
    result = StepResult(step_id=0, scores=[[TokenLogprobs(-1.0, 1, [], [])] * 3])
    told = list(returned_scores([(leader, ScoredTokens(0, 1, 3))], result, queues))
    assert [request for request, _ in told] == [leader, late]
    assert (follower.num_scores, late.num_scores, late.num_scores_planned) == (0, 3, 3)


def state(arrival: int) -> RequestState:
    return RequestState(
        request_id=f"r{arrival}",
        arrival=arrival,
        arrival_time=0.0,
        prompt_len=5,
        max_len=9,
        stop_ids=frozenset(),
        sampling=msgspec.structs.replace(GREEDY, num_prompt_logprobs=0),
        token_ids=[1, 2, 3, 4, 5],
    )


@pytest.mark.parametrize("leader_is_there", [True, False])
def test_r13_another_core_is_asked_for_each_alone(leader_is_there: bool) -> None:
    """With what the one before had given it. Where the leader has ended, each computes the prompt."""
    whole = rig()
    whole.add("r", PROMPT, n=3, **SEEDED)
    whole.run_until_idle()
    one = rig()
    had = {"r": whole.tokens("r")[:4], "r/1": whole.tokens("r/1")[:2], "r/2": []}
    for asked in with_siblings("r", PROMPT, SamplingParams(n=3, **SEEDED)).alone():
        if leader_is_there or asked.request_id != "r":
            one.core.add_request(asked, had[asked.request_id])
            one.requests[asked.request_id], one.updates[asked.request_id] = asked, []
    one.run_until_idle()
    for name in one.requests:
        assert had[name] + one.tokens(name) == whole.tokens(name)
    again = 18 if leader_is_there else 2 * 18
    assert sum(computed(one, name) for name in one.requests) == again + 2 * 2 * leader_is_there


def test_a_follower_in_front_of_its_leader_waits_for_nobody() -> None:
    one = rig()
    leader, follower = with_siblings("r", PROMPT, SamplingParams(n=2, **SEEDED)).alone()
    for asked in (follower, leader):
        one.core.add_request(asked, [])
        one.requests[asked.request_id], one.updates[asked.request_id] = asked, []
    one.run_until_idle()
    assert_exact(one, names(2))


def test_h4_what_is_in_a_store_is_loaded_once() -> None:
    catalogue = FakeCatalogue()
    first = rig(catalogue=catalogue)
    first.add("a", PROMPT, **SEEDED)
    first.run_until_idle()
    for _ in range(4):  # what is stored is told of by probes
        first.clock.advance(2.0)
        first.step(timeout_s=1.0)
    assert len(catalogue.names) >= 4
    one = rig(catalogue=catalogue)
    one.executor.stored = first.executor.stored
    one.add("r", PROMPT, n=3, **SEEDED)
    one.run_until_idle()
    assert one.core.stats().store.loaded_blocks == 4
    assert_exact(one, names(3))


def random_trace(seed: int) -> None:
    """Random requests with random numbers of choices, aborts, losses and too little of everything."""
    random = Random(seed)
    one = rig(
        recovers=True,
        num_stages=random.randint(1, 3),
        async_depth=random.randint(0, 2),
        latency=random.choice([None, 0, 1, 3]),
        num_blocks=random.choice([12, 16, 40]),
        max_model_len=40,
        scheduler={
            "max_num_seqs": random.choice([1, 3, 8]),
            "prefill_chunk": random.choice([1, 3, 64]),
            "max_num_batched_tokens": random.choice([4, 16, 100]),
        },
    )
    asked: list[str] = []
    aborted: set[str] = set()
    scoring = Random(seed)
    for number in range(40):
        what = random.random()
        if what < 0.2:
            n, length = random.randint(1, 5), random.randint(1, 30)
            more = {"prompt_logprobs": scoring.choice([None, None, 1])}
            one.add(f"r{number}", PROMPT[:2] * 15 if length > 25 else length, n=n, **SEEDED | more)
            asked += names(n, f"r{number}")
        elif what < 0.3 and asked:
            name = random.choice(asked)
            if one.abort(name):
                aborted.add(name)
        elif what < 0.33:
            for update in one.core.lose_epoch(LOST):
                one.updates[update.request_id].append(update)
            one.rejoin()
        else:
            one.settle(random.randint(0, 4))
    one.run_until_idle()
    for name in set(asked) - aborted:
        tokens, reason = one.result(name)
        if reason != "error":  # it was there at two losses
            assert (tokens, reason) == one.expected(name)
            assert one.scores(name) == one.expected_scores(name)


@pytest.mark.parametrize("seed", range(40))
def test_every_sequence_gets_exactly_its_tokens(seed: int) -> None:
    random_trace(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40, 3000))
def test_every_sequence_gets_exactly_its_tokens_many_times(seed: int) -> None:
    random_trace(seed)


def test_a_request_alone_is_what_it_was() -> None:
    request = GenerationRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams())
    assert request.alone() == [request]
