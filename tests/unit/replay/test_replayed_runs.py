"""Replays of recorded cores: equal plans whatever has happened, and the first that differs where one does."""

from __future__ import annotations

import stat
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
import pytest

from drafters import KnowingDrafter, SlowDrafter, SteadyDrafter
from penstock import LLM, SamplingParams
from penstock.batch import ScheduledBatch
from penstock.config.engine import CacheConfig, SchedulerConfig
from penstock.config.speculation import SpeculationConfig
from penstock.decisions.log_file import DecisionFile
from penstock.decisions.records import RequestAdded
from penstock.engine.core import core_assembly
from penstock.errors import OverloadedError, PlanMemoryError
from penstock.operations import Abort, FlushCache, OpenSession, Pause, Resume, SlowDown
from penstock.replay.replayer import Replay, Replayer
from penstock.request import StructuredOutputs
from penstock.scheduler.placement import Placement
from penstock.scheduler.queues import RequestState
from penstock.speculation.drafter import Drafter
from penstock.speculation.suffix import SuffixDrafter
from recorded_runs import CONFIG, SPECULATING, RecordedRun, prompt, recorded

RequestOf = Callable[[int], RequestState]


def replayed(path: Path) -> Replay:
    came = Replayer(path).run()
    assert came.difference is None, came.difference
    assert came.is_whole
    return came


def submitted(run: RecordedRun) -> int:
    return run.core.steps_in_flight[1]


def test_chunked_prompts_and_equal_beginnings(tmp_path: Path) -> None:
    with recorded(tmp_path / "log") as run:
        run.add("a", prompt(30))
        run.step(3)
        run.add("b", [*prompt(17), *prompt(9, start=3)], max_tokens=12)
        run.add("c", prompt(30), max_tokens=0)
        run.step(12)
        run.add("again", [*prompt(30), *run.tokens("a")[:6], 5, 6, 7])
        run.embed("e", prompt(11))
    came = replayed(tmp_path / "log")
    assert (came.num_plans, came.num_requests) == (submitted(run), 5)
    assert run.updates["again"][0].num_cached_tokens == 36, "its beginning was the output of another"


def test_preemption_followers_and_scores(tmp_path: Path) -> None:
    with recorded(tmp_path / "log", num_blocks=11) as run:
        for number in range(3):
            run.add(f"r{number}", prompt(9, start=number), max_tokens=20, ignore_eos=True)
        run.step(8)
        run.add("s", prompt(12, start=5), n=2, prompt_logprobs=2, temperature=1.0, ignore_eos=True)
    assert run.core.stats().scheduler.num_preemptions > 0
    replayed(tmp_path / "log")


def test_stop_ids_end_requests_at_the_same_token(tmp_path: Path) -> None:
    with recorded(tmp_path / "free") as run:
        run.add("a", prompt(5), max_tokens=12, ignore_eos=True)
    stop = run.tokens("a")[6]
    with recorded(tmp_path / "log") as run:
        run.add("a", prompt(5), max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
        run.add("b", prompt(5), max_tokens=12, ignore_eos=True)
    assert run.updates["a"][-1].finish_reason == "stop"
    replayed(tmp_path / "log")


def test_aborts_refusals_and_operations(tmp_path: Path) -> None:
    scheduler = msgspec.structs.replace(CONFIG.scheduler, max_waiting_requests=1)
    with recorded(tmp_path / "log", scheduler=scheduler) as run:
        run.operate(OpenSession("desk"))
        for number in range(5):
            run.add(f"r{number}", prompt(6, start=number), max_tokens=20, session_id="desk" if number else "")
        with pytest.raises(OverloadedError):
            run.add("late", prompt(6))
        run.step(4)
        run.core.abort("r1")
        run.operate(Pause(mode="keep"))
        run.step(2)
        run.operate(Resume())
        run.operate(SlowDown(4))
        run.operate(FlushCache())
        run.step(6)
        run.operate(Abort(["r2"]))
        run.operate(SlowDown(0))
    replayed(tmp_path / "log")


def test_a_lost_stage_and_another_epoch(tmp_path: Path) -> None:
    with recorded(tmp_path / "log") as run:
        run.add("a", prompt(20), max_tokens=10)
        run.add("b", prompt(7, start=1), max_tokens=10)
        run.step(5)
        run.lose_stage()
        run.step(2)
        run.add("c", prompt(20), max_tokens=5)
    assert run.core.stats().scheduler.recovered_requests == 2
    replayed(tmp_path / "log")


def test_a_stage_that_is_lost_when_a_plan_is_sent(tmp_path: Path) -> None:
    with recorded(tmp_path / "log") as run:
        run.add("a", prompt(20), max_tokens=10)
        run.step(3)
        run.executor.lose_at = submitted(run)
        run.step()
        assert not run.core.has_pipe
        run.step(2)
        run.rejoin()
    replayed(tmp_path / "log")


def test_a_stage_without_memory_for_a_step(tmp_path: Path) -> None:
    """Those that end with the step may have no sample in it, as one whose prompt runs in parts."""
    with recorded(tmp_path / "log") as run:
        run.add("a", prompt(20), max_tokens=6, ignore_eos=True)
        run.add("b", prompt(7, start=1), max_tokens=10, ignore_eos=True)
        error = PlanMemoryError("stage 0 had no memory left.", remedy="Try again later.", stage=0).info()
        run.executor.fail_steps[submitted(run)] = error
        run.step(4)
        run.add("c", prompt(20), max_tokens=5)
    assert run.updates["a"][-1].error == error
    assert run.core.stats().scheduler.failed_steps == 1
    replayed(tmp_path / "log")


def test_a_host_that_is_short_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of the recording, and not the one of the replay."""
    free: list[int] = [1 << 30]
    monkeypatch.setattr(core_assembly, "host_available_bytes", lambda: free[-1])
    with recorded(tmp_path / "log") as run:
        run.add("a", prompt(20), max_tokens=20, ignore_eos=True)
        run.step(3)
        free.append(1 << 20)
        run.clock.advance(1.0)
        run.add("b", prompt(7, start=1), max_tokens=10)
        run.step(5)
        held = submitted(run) - 1
        free.append(1 << 30)
        run.clock.advance(1.0)
    free.append(0)
    replayed(tmp_path / "log")
    explanation = Replayer(tmp_path / "log", explain=held).run().explanation
    assert explanation is not None
    assert "b waits: the host has 1 MiB of free memory, less than 256 MiB" in explanation


def test_a_drafter_that_fails_is_switched_off_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, recorded(tmp_path / "log", speculation=SPECULATING) as run:
        run.add("a", prompt(5) * 5, max_tokens=30, ignore_eos=True)
        run.step(6)
        patched.setattr(SuffixDrafter, "propose", lambda drafter, question: 1 / 0)
    replayed(tmp_path / "log")


DRAFTERS: dict[str, Callable[[RequestOf, Callable[[], float]], Drafter]] = {
    "some are wrong": lambda request_of, clock: KnowingDrafter(request_of, 0.8),
    "at once": lambda request_of, clock: SteadyDrafter(request_of, 0.95),
    "elsewhere": lambda request_of, clock: quick(SlowDrafter(request_of, clock)),
}


def quick(drafter: SlowDrafter) -> SlowDrafter:
    """Guesses that come within a step."""
    drafter.token_s = 0.001
    return drafter


@pytest.mark.parametrize("kind", DRAFTERS)
def test_speculation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """One request alone has windows that follow each other; two share the pipe."""
    runs: list[RecordedRun] = []

    def request_of(arrival: int) -> RequestState:
        return next(request for request in runs[0].scheduler._queues if request.arrival == arrival)

    with monkeypatch.context() as patched:
        patched.setattr(
            core_assembly, "_drafter", lambda config, drafting, clock: DRAFTERS[kind](request_of, clock)
        )
        with recorded(tmp_path / "log", speculation=SPECULATING) as run:
            runs.append(run)
            run.add("a", prompt(6), max_tokens=40, ignore_eos=True)
            run.step(20)
            run.add("b", prompt(9, start=1), max_tokens=20, ignore_eos=True)
    speculation = run.core.stats().scheduler.speculation
    assert speculation.num_accepted > 8
    assert (speculation.num_accepted == speculation.num_drafted) == (kind == "elsewhere")
    replayed(tmp_path / "log")


def test_a_grammar_holds_the_last_token_back(tmp_path: Path) -> None:
    with recorded(tmp_path / "log", scheduler=SchedulerConfig(built_grammar_bytes=3 << 20)) as run:
        run.executor.builds_at_once = False
        for number, text in enumerate(["[a-z]+", "[0-9]{1,40}", "[a-z]+"]):
            structured = StructuredOutputs(regex=text)
            run.add(f"r{number}", prompt(6, start=number), structured_outputs=structured)
        run.step(4)
        run.executor.builds_at_once = True
    assert b"[a-z]" not in b"".join(map(msgspec.msgpack.encode, DecisionFile(tmp_path / "log").records()))
    replayed(tmp_path / "log")


def test_the_demo_model_over_two_stages(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with LLM(
        "demo",
        pipeline_parallel_size=2,
        distributed_executor_backend="inprocess",
        threads_per_rank=1,
        num_blocks=64,
        record_decisions=str(path),
    ) as llm:
        sampling = SamplingParams(max_tokens=24, ignore_eos=True)
        llm.generate(["ROMEO: what is", "ROMEO: what is", "the the the the the the"], sampling)
    came = replayed(path)
    assert came.num_requests == 3
    assert came.num_plans > 24
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def changed_order(place: Callable[..., None]) -> Callable[..., None]:
    """The choice under test: who of those that decode comes first."""

    def place_youngest_first(placement: Placement, *arguments: object) -> None:
        draft, decoding, *others = arguments
        assert isinstance(decoding, Collection)
        place(placement, draft, [*decoding][::-1], *others)

    return place_youngest_first


def test_a_scheduler_that_decides_otherwise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(tmp_path / "log") as run:
        run.add("a", prompt(3), max_tokens=20, ignore_eos=True)
        run.step(6)
        run.add("b", prompt(3, start=1), max_tokens=20, ignore_eos=True)
        run.add("c", prompt(3, start=2), max_tokens=20, ignore_eos=True)
    differs = next(
        plan.step_id for plan in run.executor.plans if len(plan.token_from) > 1 and min(plan.token_from) >= 0
    )
    monkeypatch.setattr(Placement, "_place_decodes", changed_order(Placement._place_decodes))
    difference = Replayer(tmp_path / "log").run().difference
    assert difference is not None
    assert difference.step == differs
    recorded_plan, made = difference.recorded, difference.made
    assert isinstance(recorded_plan, ScheduledBatch)
    assert isinstance(made, ScheduledBatch)
    assert recorded_plan.rows == run.executor.plans[differs].rows
    assert sorted(made.rows) != sorted(recorded_plan.rows)
    assert "rows" in [name for name, _, _ in difference.fields()]


def test_an_admission_that_decides_otherwise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(tmp_path / "log") as run:
        run.add("a", prompt(3))
        run.step(3)
        run.add("b", prompt(3))

    def refuse(*arguments: object, **others: object) -> None:
        raise OverloadedError("too many")

    monkeypatch.setattr("penstock.scheduler.admission.Admission.refuse_overload", refuse)
    difference = Replayer(tmp_path / "log").run().difference
    assert difference is not None
    assert difference.admission == "a was admitted when recorded, but is refused now: too many"


def test_it_ends_behind_the_step_that_is_asked_for(tmp_path: Path) -> None:
    with recorded(tmp_path / "log") as run:
        run.add("a", prompt(3), max_tokens=20)
    came = Replayer(tmp_path / "log", until=4).run()
    assert (came.num_plans, came.is_partial, came.difference) == (5, True, None)


def test_no_token_and_no_name_is_in_the_file(tmp_path: Path) -> None:
    """Two prompts that begin alike have the same aliases so far, and the same token elsewhere has others."""
    cache = CacheConfig(block_size=4)
    with recorded(tmp_path / "log", cache=cache, model_path="/models/secret") as run:
        run.add("a", [9, 9, 9, 4, 5], cache_salt="our secret")
        run.add("b", [9, 9, 9, 4, 6], cache_salt="our secret")
        run.add("c", [9, 9, 9, 4, 6], cache_salt="another")
    texts = []
    for record in DecisionFile(tmp_path / "log").records():
        assert b"secret" not in msgspec.msgpack.encode(record)
        if isinstance(record.call, RequestAdded):
            data = record.call.prompt
            texts.append([data[place : place + 4] for place in range(0, len(data), 4)])
    first, second, third = texts
    assert len(set(first)) == 5
    assert first[:4] == second[:4]
    assert first[4] != second[4]
    assert not set(third) & set(second)


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "said"),
    [
        (64, 2, "c waits: all 2 rows are taken"),
        (8, 4, "b waits: it needs 4 KV blocks of the 4 that are free, besides 1 that"),
        (8, 4, "c waits behind b"),
    ],
)
def test_a_plan_is_explained(tmp_path: Path, num_blocks: int, max_num_seqs: int, said: str) -> None:
    scheduler = msgspec.structs.replace(CONFIG.scheduler, max_num_seqs=max_num_seqs)
    with recorded(tmp_path / "log", num_blocks=num_blocks, scheduler=scheduler) as run:
        for number, name in enumerate("abc"):
            run.add(name, prompt(14, start=number), max_tokens=12, ignore_eos=True)
    step = next(plan.step_id for plan in run.executor.plans if plan.token_from[:1] >= [0])
    explanation = Replayer(tmp_path / "log", explain=step).run().explanation
    assert explanation is not None
    assert any(said in line for line in explanation), "\n".join(explanation)
    assert any("a: decodes position 14" in line for line in explanation), "\n".join(explanation)


def test_guesses_of_the_last_stage(tmp_path: Path) -> None:
    speculation = SpeculationConfig(speculative_method="mtp", num_speculative_tokens=4)
    with recorded(tmp_path / "log", speculation=speculation, guess_share=0.05) as run:
        run.add("a", prompt(6), max_tokens=40, ignore_eos=True)
        run.step(20)
        run.add("b", prompt(9, start=1), max_tokens=20, ignore_eos=True)
    assert any(plan.mtp for plan in run.executor.plans)
    assert run.core.stats().scheduler.speculation.num_drafted > 0
    replayed(tmp_path / "log")
