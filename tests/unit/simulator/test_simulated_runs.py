"""The simulator: closed forms of pipelines, determinism, losses, guesses, replicas and wires."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import msgspec
import pytest

from penstock.config.engine import CacheConfig
from penstock.scheduler.cost_model import StageCost
from penstock.simulator.pipe import StageLoss, Wire
from penstock.simulator.replica import EngineSettings
from penstock.simulator.report import as_json, lines
from penstock.simulator.simulation import FinishedRun
from penstock.simulator.timeline import timeline
from penstock.trace.chrome import bubble_report, spans_of
from penstock.trace.phases import BUSY, Phase
from simulated import SMALL, STEP_S, load_of, pipe_of, run_of

HOP_S = 0.002
POINTS = 0.02  # by which a share may differ from its closed form


def bubble_of(run: FinishedRun) -> float:
    bubble: float = as_json(run)["bubble"]
    return bubble


@pytest.mark.parametrize("num_stages", [1, 2, 5, 16])
def test_one_pass_takes_all_stages_and_all_hops(num_stages: int) -> None:
    run = run_of(pipe_of(num_stages, hop_s=HOP_S), load_of(1, output_len=1))
    (account,) = run.accounts
    expected = num_stages * STEP_S + (num_stages - 1) * HOP_S
    assert account.ended_s - account.sent_s == pytest.approx(expected)


@pytest.mark.parametrize("num_stages", [2, 4, 10])
def test_one_request_leaves_all_stages_but_one_idle(num_stages: int) -> None:
    run = run_of(pipe_of(num_stages), load_of(1, output_len=50))
    assert bubble_of(run) == pytest.approx((num_stages - 1) / num_stages, abs=POINTS)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_stage_does_its_overhead_while_the_stage_before_computes(num_stages: int) -> None:
    costs = [StageCost(read=STEP_S, per_token=0.0, overhead=STEP_S / 2)] * num_stages
    run = run_of(pipe_of(num_stages, stages=costs), load_of(1, output_len=50))
    (account,) = run.accounts
    between_s = (account.ended_s - account.first_token_s) / 49
    assert between_s == pytest.approx(STEP_S / 2 + num_stages * STEP_S)
    numbers = as_json(run)
    assert numbers["bubble"] == pytest.approx(1 - 1.5 / (0.5 + num_stages), abs=POINTS)
    for stage in numbers["replicas"][0]["stages"]:
        assert stage["busy"] + stage["overhead"] + stage["bubble"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("num_stages", "count"), [(2, 1), (2, 8), (4, 4), (4, 16), (8, 3)])
def test_micro_batches_that_pass_once_leave_the_bubble_of_gpipe(num_stages: int, count: int) -> None:
    """Each prompt fills a chunk, so that each is a plan of its own."""
    run = run_of(pipe_of(num_stages), load_of(count, prompt_len=32, output_len=1))
    assert run.replicas[0].flow.ledger(run.ended_s).num_steps == count
    assert bubble_of(run) == pytest.approx((num_stages - 1) / (count + num_stages - 1), abs=POINTS)


def test_a_full_pipe_has_no_bubble_but_those_of_its_ends() -> None:
    run = run_of(pipe_of(4, num_blocks=1024), load_of(16, output_len=100))
    assert bubble_of(run) < 0.05


def test_i10_uneven_steps_make_stages_wait_for_the_longer_of_two() -> None:
    even, uneven = (
        run_of(pipe_of(2, num_blocks=1024, max_model_len=2048, spread=spread), load_of(2, output_len=2000))
        for spread in (0.0, 0.5)
    )
    sigma = math.sqrt(math.log1p(0.5**2))
    waiting = 1 - 1 / (1 + math.erf(sigma / 2))
    assert bubble_of(uneven) - bubble_of(even) == pytest.approx(waiting, abs=POINTS)


def test_the_times_of_a_stage_add_up_to_the_run() -> None:
    costs = [StageCost(read=0.01, per_token=1e-4, overhead=0.001), StageCost(read=0.02, per_token=1e-4)]
    pipeline = pipe_of(2, stages=costs, wires=[Wire(latency_s=0.003, per_token_s=1e-4)], plan_s=0.001)
    run = run_of(pipeline, load_of(8, gap_s=0.1), max_kept=1000)
    numbers = as_json(run)
    for stage in numbers["replicas"][0]["stages"]:
        assert stage["busy"] + stage["overhead"] + stage["bubble"] == pytest.approx(1.0, abs=1e-6)
    assert numbers["replicas"][0]["stages"][0]["overhead"] > 0
    assert numbers["replicas"][0]["wires_busy"][0] > 0
    json.dumps(numbers)
    assert len(lines(numbers)) > 5


def test_the_same_seed_gives_the_same_report() -> None:
    pipeline = pipe_of(3, wires=[Wire(latency_s=0.001, jitter_s=0.01)] * 2)

    def report(seed: int) -> bytes:
        settings = msgspec.structs.replace(SMALL, seed=seed, acceptance=0.5)
        return json.dumps(as_json(run_of(pipeline, load_of(10, gap_s=0.01), settings))).encode()

    assert report(1) == report(1)
    assert report(1) != report(2)


def test_requests_at_once_are_bounded() -> None:
    run = run_of(pipe_of(2), load_of(9), max_concurrency=3)
    spans = [(account.sent_s, account.ended_s) for account in run.accounts]
    for moment, _ in spans:
        assert sum(sent <= moment < ended for sent, ended in spans) <= 3


def test_a_lost_stage_interrupts_requests_and_they_go_on() -> None:
    loss = StageLoss(stage=1, at_s=0.2, away_s=1.0)
    run = run_of(pipe_of(2), load_of(4, output_len=40), losses=[loss])
    assert all(account.is_done and account.num_tokens == 40 for account in run.accounts)
    numbers = as_json(run)
    assert (numbers["recovered_requests"], numbers["replicas"][0]["epoch"]) == (4, 1)
    without = run_of(pipe_of(2), load_of(4, output_len=40))
    assert run.ended_s - without.ended_s == pytest.approx(1.0, abs=0.2)
    for stage in numbers["replicas"][0]["stages"]:
        whole = stage["busy"] + stage["overhead"] + stage["bubble"] + stage["lost"]
        assert whole == pytest.approx(1.0, abs=1e-6)
        assert stage["lost"] * numbers["duration"] == pytest.approx(1.0, abs=0.05)


def test_guesses_that_are_accepted_make_one_stream_faster() -> None:
    slow, fast = (
        run_of(pipe_of(1), load_of(1, output_len=60), msgspec.structs.replace(SMALL, acceptance=chance))
        for chance in (0.0, 0.9)
    )
    assert fast.ended_s < 0.6 * slow.ended_s
    drafts = as_json(fast)["replicas"][0]["drafts"]
    assert 0 < drafts["accepted"] <= drafts["tried"]
    assert fast.accounts[0].num_tokens == 60


def test_guesses_keep_the_order_of_a_pipe_with_gaps() -> None:
    """Windows follow each other through the stages, and void ones are dropped."""
    settings = msgspec.structs.replace(SMALL, acceptance=0.8)
    run = run_of(pipe_of(4), load_of(2, output_len=60), settings)
    assert [account.num_tokens for account in run.accounts] == [60, 60]
    run.replicas[0].core.check_invariants()


def test_replicas_share_the_requests() -> None:
    run = run_of(pipe_of(2), load_of(8), num_replicas=2)
    assert [replica["requests"] for replica in as_json(run)["replicas"]] == [4, 4]


def test_prompts_that_begin_alike_are_found() -> None:
    settings = EngineSettings(scheduler=SMALL.scheduler, cache=CacheConfig(enable_prefix_caching=True))
    first, second = load_of(2, prompt_len=32, gap_s=1.0)
    run = run_of(pipe_of(2), [first, replace(second, prompt_token_ids=first.prompt_token_ids)], settings)
    assert [account.num_cached for account in run.accounts] == [0, 28]


def test_too_little_memory_preempts() -> None:
    run = run_of(pipe_of(1, num_blocks=24), load_of(4, prompt_len=8, output_len=40))
    numbers = as_json(run)
    assert numbers["preemptions"] > 0
    assert numbers["replicas"][0]["kv"]["peak_use"] > 0.9
    assert all(account.num_tokens == 40 for account in run.accounts)


def test_what_can_never_run_is_refused_and_booked() -> None:
    run = run_of(pipe_of(1), load_of(1, prompt_len=300))
    numbers = as_json(run)
    assert (numbers["completed"], numbers["failed"]) == (0, 1)
    assert numbers["errors"] == {"context_length_exceeded": 1}


def test_a_wire_between_hosts_is_measured_and_filled() -> None:
    wires, back = [Wire(latency_s=0.05)], Wire(latency_s=0.05)
    far = pipe_of(2, wires=wires, return_wire=back, num_links=1, max_model_len=1024, num_blocks=4096)
    settings = msgspec.structs.replace(
        SMALL, scheduler=msgspec.structs.replace(SMALL.scheduler, max_num_seqs=64, max_num_batched_tokens=256)
    )
    run = run_of(far, load_of(48, output_len=400), settings)
    assert as_json(run)["replicas"][0]["plans_that_fill"] > 8
    assert bubble_of(run) < 0.25


def test_the_timeline_says_what_the_report_says() -> None:
    pipeline = pipe_of(
        2, hop_s=HOP_S, stages=[StageCost(read=0.01, per_token=0), StageCost(read=0.02, per_token=0)]
    )
    run = run_of(pipeline, load_of(6), max_kept=10_000)
    reports = timeline(run)
    busy = [0, 0]
    ends = [0, 0]
    for span in spans_of(reports):
        assert span.start_ns >= ends[span.stage.number], "spans of a stage follow one another"
        ends[span.stage.number] = span.end_ns
        busy[span.stage.number] += (span.end_ns - span.start_ns) * (span.phase in BUSY)
    ledger = run.replicas[0].flow.ledger(run.ended_s)
    assert [seconds / 1e9 for seconds in busy] == pytest.approx(ledger.busy.tolist(), rel=1e-6)
    assert ledger.causes[Phase.WAIT_PREV][1] > 0
    assert len(bubble_report(reports)) == 2
