"""F9: a step without memory ends its requests, and those that have begun with what it was to compute."""

from __future__ import annotations

from fakes import CoreRig
from penstock.config.engine import SchedulerConfig
from penstock.errors import PlanMemoryError

ERROR = PlanMemoryError("stage 0 had no memory left for step 1.", remedy="Try again later.", stage=0).info()


def failing(step: int, rig: CoreRig) -> CoreRig:
    rig.executor.fail_steps[step] = ERROR
    return rig


def test_f9_the_requests_of_a_failed_step_end_and_the_others_do_not_notice() -> None:
    """Two stages in turn: each request is in every other step."""
    rig = failing(2, CoreRig(num_stages=2, latency=1))
    rig.add("fails", 3, max_tokens=6, ignore_eos=True)
    rig.step()
    rig.add("lives", 4, max_tokens=6, ignore_eos=True)
    rig.run_until_idle()
    assert rig.updates["fails"][-1].error == ERROR
    assert rig.finish_reason("fails") == "error"
    assert rig.result("lives") == rig.expected("lives", 1)
    assert rig.core.stats().scheduler.failed_steps == 1
    assert rig.allocator.num_free_blocks == rig.allocator.num_blocks


def test_f9_a_chunk_that_samples_nothing_ends_its_request_too() -> None:
    rig = failing(0, CoreRig(scheduler=SchedulerConfig(max_num_seqs=2, prefill_chunk=4)))
    rig.add("fails", 10, max_tokens=2)
    rig.run_until_idle()
    assert rig.updates["fails"][-1].error == ERROR


def test_f9_nobody_finds_what_a_failed_step_was_to_compute() -> None:
    """A request that has begun with it while the step was under way ends, and a later one computes it."""
    rig = CoreRig(num_stages=2, latency=None, eviction="lru")
    prompt = list(range(9))
    rig.add("before", list(range(20, 29)), max_tokens=1, ignore_eos=True)
    rig.step()
    rig.run_until_idle()
    failing(rig.core.steps_in_flight[1], rig)
    rig.add("fails", prompt, max_tokens=2, ignore_eos=True)
    rig.step()
    rig.add("follows", prompt, max_tokens=2, ignore_eos=True)
    rig.add("other", list(range(20, 29)), max_tokens=2, ignore_eos=True)
    rig.step()
    assert rig.plans[-1].start_positions == [8, 8], "both have begun with blocks that were found"
    rig.run_until_idle()
    assert [rig.updates[name][-1].error for name in ("fails", "follows")] == [ERROR, ERROR]
    assert rig.result("other") == rig.expected("other", 3)
    rig.add("later", prompt, max_tokens=2, ignore_eos=True)
    rig.step()
    assert rig.plans[-1].start_positions == [0]
    rig.run_until_idle()
    assert rig.result("later") == rig.expected("later", 4)


def test_f9_scores_and_vectors_of_a_failed_step_end_with_its_error() -> None:
    rig = failing(0, CoreRig())
    rig.add("scored", 5, max_tokens=1, prompt_logprobs=0)
    rig.embed("pooled", 4)
    rig.run_until_idle()
    for name in ("scored", "pooled"):
        (update,) = rig.updates[name]
        assert (update.finish_reason, update.error) == ("error", ERROR)


def test_f9_a_request_that_ended_meanwhile_does_not_end_twice() -> None:
    rig = failing(0, CoreRig(num_stages=2, latency=None))
    rig.add("gone", 3, max_tokens=5)
    rig.step()
    rig.abort("gone")
    rig.run_until_idle()
    assert rig.updates["gone"] == []
