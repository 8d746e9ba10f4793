"""What plans ask of an MTP layer on the last stage, and what becomes of its guesses."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import CoreRig
from penstock.batch import KNOWN, ScheduledBatch
from penstock.config.engine import SchedulerConfig
from penstock.speculation.mtp import MTPDrafter


def rig_of(**given: Any) -> CoreRig:
    options = {"drafter": lambda _: MTPDrafter(0.05), "num_drafts": 3, "eos_token_ids": (), "num_blocks": 64}
    return CoreRig(**(options | given))


def asked(plans: list[ScheduledBatch]) -> list[dict[int, int]]:
    return [plan.mtp for plan in plans if plan.rows]


def test_right_guesses_are_a_step_each_for_four_tokens() -> None:
    rig = rig_of()
    rig.add("r", 3, max_tokens=17)
    rig.run_until_idle()
    assert rig.result("r") == rig.expected("r")
    assert [len(update.token_ids) for update in rig.updates["r"]] == [1, 4, 4, 4, 4]
    told = rig.core.stats().scheduler.speculation
    assert (told.drafter, told.num_drafted, told.num_accepted) == ("mtp", 12, 12)
    assert asked(rig.plans)[0] == {0: 3}


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("error", [0, 1])
def test_whatever_is_guessed_the_tokens_are_right(num_stages: int, error: int) -> None:
    rig = rig_of(num_stages=num_stages)
    rig.executor.replica.guess_error = error
    for index in range(5):
        rig.add(f"r{index}", 2 + 5 * index, max_tokens=30)
    rig.run_until_idle()
    for index in range(5):
        assert rig.result(f"r{index}") == rig.expected(f"r{index}")
    told = rig.core.stats().scheduler.speculation
    assert told.num_accepted == (0 if error else told.num_drafted)


def test_a_prompt_in_chunks_is_read_and_guessed_behind() -> None:
    rig = rig_of(scheduler=SchedulerConfig(max_num_batched_tokens=8, prefill_chunk=8))
    rig.add("r", 20, max_tokens=4)
    rig.run_until_idle()
    assert asked(rig.plans)[:2] == [{0: 0}, {0: 0}]
    assert len(rig.plans[0].rows) == 1


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_last_token_needs_no_guess(max_tokens: int) -> None:
    rig = rig_of()
    rig.add("r", 3, max_tokens=max_tokens)
    rig.run_until_idle()
    assert not any(plan.mtp for plan in rig.plans)


def test_no_more_is_guessed_than_a_request_may_still_say() -> None:
    rig = rig_of()
    rig.add("r", 3, max_tokens=4)
    rig.run_until_idle()
    assert asked(rig.plans)[0] == {0: 2}


def test_a_request_that_does_without_is_left_out() -> None:
    rig = rig_of()
    rig.add("without", 3, max_tokens=9, speculative=False)
    rig.add("with", 3, max_tokens=9)
    rig.run_until_idle()
    names = {new.row: new.request_id for plan in rig.plans for new in plan.new_rows}
    assert {names[plan.rows[index]] for plan in rig.plans for index in plan.mtp} == {"with"}
    assert rig.result("without") == rig.expected("without")


def test_beside_scored_prompts_and_vectors_rows_are_read() -> None:
    rig = rig_of()
    rig.add("scored", 5, max_tokens=9, prompt_logprobs=1)
    rig.embed("vector", 6)
    rig.run_until_idle()
    assert rig.plans[0].scored
    assert rig.plans[0].mtp == {0: 3}
    assert rig.result("scored") == rig.expected("scored")


def test_beside_prompts_decodes_are_read_and_nothing_is_guessed_of_them() -> None:
    rig = rig_of(scheduler=SchedulerConfig(max_num_batched_tokens=8, prefill_chunk=4))
    rig.add("first", 3, max_tokens=30)
    while not rig.updates["first"]:
        rig.step()
    rig.add("second", 30, max_tokens=3)
    rig.run_until_idle()
    mixed = [plan for plan in rig.plans if len(plan.rows) == 2 and plan.num_tokens[1] == 4]
    assert len(mixed) > 3
    assert all(plan.mtp[0] == 0 for plan in mixed[1:])


def test_no_more_is_guessed_than_one_more_than_is_sent() -> None:
    """Where each request has its plan, and steps of several tokens are dear."""
    rig = rig_of(num_blocks=256)
    for index in range(16):
        rig.add(f"r{index}", 4, max_tokens=20)
    rig.run_until_idle()
    for plan in rig.plans:
        if plan.rows and KNOWN not in plan.token_from:
            assert all(count <= 1 + len(plan.drafts.get(index, ())) for index, count in plan.mtp.items())


def test_wrong_guesses_are_asked_for_now_and_then() -> None:
    rig = rig_of(max_model_len=700, num_blocks=256)
    rig.executor.replica.guess_error = 1
    rig.add("r", 3, max_tokens=690)
    rig.run_until_idle()
    lengths = [plan.start_positions[0] for plan in rig.plans if plan.mtp]
    assert len(lengths) < 130
    assert any(256 <= length < 300 for length in lengths)
    assert any(512 <= length < 560 for length in lengths)
    assert not any(100 < length < 250 for length in lengths)
