"""Predictions of a pipe whose stages take known times, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.engine import CacheConfig, ModelConfig, SchedulerConfig
from penstock.layouts.device_text import parse_devices
from penstock.layouts.devices import Link
from penstock.layouts.estimate import estimate
from penstock.layouts.layout import Layout, StageSite
from penstock.layouts.model_sizes import read_sizes
from penstock.layouts.prediction import Load, Prediction, Turns, TurnTime, predict
from penstock.layouts.stage_times import EFFICIENCY, ObservedTimes, StageTimes
from penstock.planner.mix import Mix
from penstock.scheduler.cost_model import StageCost, StepShape

LOAD = Load(
    concurrency=1, mix=Mix(64, 2), max_model_len=256, scheduler=SchedulerConfig(), cache=CacheConfig()
)
SIZES = read_sizes(ModelConfig(model="demo"))
NO_WAY = Link(kind="memory", bytes_per_s=1e18, latency_s=0.0)
ROW_S, READ_S = 0.001, 0.008
COST = StageCost(read=READ_S, per_token=ROW_S)
QUICK = StageCost(read=ROW_S, per_token=ROW_S)


def of(times: list[StageTimes], load: Load = LOAD, link: Link = NO_WAY) -> Prediction:
    return predict(times, [link] * len(times), 10_000, load, SIZES)


def test_i10_one_request_passes_all_stages_for_each_token() -> None:
    predicted = of([COST] * 3)
    assert predicted.time_per_token_s == pytest.approx(3 * READ_S)
    assert predicted.bubble == pytest.approx(2 / 3)
    assert predicted.tokens_per_s == pytest.approx(1 / (3 * READ_S))


def test_i10_a_link_delays_each_token_once_for_each_way_there_and_back() -> None:
    slow = Link(kind="memory", bytes_per_s=1e18, latency_s=0.005)
    assert of([COST] * 3, link=slow).time_per_token_s == pytest.approx(3 * READ_S + 3 * 0.005)


def test_micro_batches_fill_the_pipe_unless_fewer_read_the_weights_less_often() -> None:
    many = of([COST] * 2, replace(LOAD, concurrency=32))
    assert (many.micro_batches, many.running) == (2, 32)
    assert many.time_per_token_s == pytest.approx(2 * 16 * ROW_S)
    few = of(
        [StageCost(read=READ_S, per_token=0.0), StageCost(read=1e-5, per_token=1e-6)],
        replace(LOAD, concurrency=4),
    )
    assert few.micro_batches == 1  # two would read the first stage's weights twice in a cycle


def test_requests_that_find_no_memory_wait() -> None:
    crowded = predict([COST], [NO_WAY], 200, replace(LOAD, concurrency=32), SIZES)
    assert crowded.running == 200 // LOAD.context


def test_a_wire_between_hosts_holds_plans_and_the_first_token_comes_back_over_it() -> None:
    wire = Link(kind="network", bytes_per_s=1e18, latency_s=0.05)
    load = replace(LOAD, concurrency=60)
    far, near = of([QUICK] * 2, load, wire), of([QUICK] * 2, load)
    assert (far.micro_batches, near.micro_batches) == (32, 2)
    assert far.time_per_token_s == pytest.approx(0.1 + 2 * 2 * ROW_S)
    assert far.prefill_s - near.prefill_s == pytest.approx(2 * 0.05)
    # Eight chunks of 8 tokens, each beside 2 decodes; the last stage works for one plan more.
    assert far.ttft_s == pytest.approx(2 * 0.05 + (8 + 1) * (8 + 2) * ROW_S)
    # Half of a plan of 30 decodes, then chunks of 20, 20, 20 and 4 tokens beside 30 decodes.
    assert near.ttft_s == pytest.approx((15 + 3 * 50 + 50 + 34) * ROW_S)


def test_a_prompt_that_comes_while_all_decodes_are_in_one_plan_begins_alone() -> None:
    predicted = of([QUICK] * 2, replace(LOAD, concurrency=2))
    # The next decode waits at the first stage for its token. Of eight chunks of 8, all but the first share.
    assert predicted.prefill_s == pytest.approx((8 + 1) * 8 * ROW_S)
    assert predicted.ttft_s == pytest.approx((2 / 2 + 1 + 8 + 8 * (8 + 1)) * ROW_S)


def test_turns_between_steps_lengthen_them_and_are_bubbles() -> None:
    load = replace(
        LOAD, concurrency=4, turns=Turns(alone=TurnTime(0.001, 0.0005), request_s=0.1, others_s=0.01)
    )
    predicted, plain = of([COST], load), of([COST], replace(LOAD, concurrency=4))
    assert predicted.time_per_token_s == pytest.approx(READ_S + 0.001 + 4 * 0.0005)
    assert predicted.bubble == pytest.approx(0.003 / 0.011)
    step_s = READ_S + 0.001 + 3 * 0.0005  # a plan of three decodes; the stage computes for a part of it
    met_s = READ_S / 2 * (READ_S / step_s)
    waits_less_s = READ_S / 2 - met_s
    assert predicted.ttft_s == pytest.approx(plain.ttft_s - waits_less_s + 3**0.5 * 0.01, abs=1e-5)
    assert predicted.prefill_s == pytest.approx(plain.prefill_s + 0.1)


def test_the_first_token_waits_for_plans_that_are_ahead() -> None:
    load = replace(LOAD, concurrency=5)
    plain, ahead = of([COST], load), of([COST], replace(load, plans_ahead=1))
    assert ahead.ttft_s - plain.ttft_s == pytest.approx(READ_S)  # a step of four decodes
    uneven = of([COST], replace(load, spread=0.5))
    assert uneven.ttft_s - plain.ttft_s == pytest.approx(READ_S * 0.25 / 2)
    assert uneven.time_per_token_s == pytest.approx(plain.time_per_token_s, rel=0.02)


def test_over_a_wire_a_prompt_waits_for_the_decodes_that_wait_for_their_tokens() -> None:
    wire = Link(kind="network", bytes_per_s=1e18, latency_s=0.004)
    load = replace(LOAD, concurrency=2)
    plain, ahead = (of([QUICK] * 2, replace(load, plans_ahead=count), wire) for count in (0, 1))
    assert ahead.ttft_s - plain.ttft_s == pytest.approx(0.008 + 2 * ROW_S)  # a cycle of one decode
    # Half a cycle, the decode that waits, and chunks of 8 tokens of which the last seven share a plan.
    assert plain.ttft_s == pytest.approx(0.010 / 2 + (1 + 8 + 7 * 9 + 9) * ROW_S + 0.008)


def test_over_a_long_wire_no_decode_waits_for_its_token_at_the_first_stage() -> None:
    wire = Link(kind="network", bytes_per_s=1e18, latency_s=0.05)
    load = replace(LOAD, concurrency=2)
    plain, ahead = (of([QUICK] * 2, replace(load, plans_ahead=count), wire) for count in (0, 1))
    assert plain.micro_batches == 1
    assert ahead.ttft_s == plain.ttft_s
    # A decode under way may hold up its chunks: of 8 tokens, the last seven beside a decode.
    own_s = (8 + 7 * 9 + 9) * ROW_S + 0.1
    assert own_s <= plain.ttft_s <= own_s + ROW_S


def test_the_times_of_a_prompt_spread_as_those_of_other_steps_do() -> None:
    even, uneven = (of([QUICK] * 2, replace(LOAD, spread=spread)) for spread in (0.0, 0.4))
    assert 1.05 < uneven.prefill_s / even.prefill_s < 1.25  # stages wait for the longer of two chunks
    alone, spread = (of([QUICK], replace(LOAD, spread=spread)) for spread in (0.0, 0.4))
    assert spread.prefill_s == pytest.approx(alone.prefill_s)


def test_what_decodes_beside_a_chunk_attend_to_takes_as_long_as_in_decodes() -> None:
    times = ObservedTimes(
        cost=COST,
        per_attended=1e-5,
        decodes=((1, 0.010), (4, 0.013)),
        per_chunk_attended=1e-7,
        chunks=((16, 0.020), (64, 0.050)),
    )
    assert times.seconds(StepShape(40, 1000, 1)) == pytest.approx(0.035 + 1e-4)
    load = replace(LOAD, concurrency=2)
    beside = of([times], load).ttft_s
    fewer = of([replace(times, per_attended=0.0)], load).ttft_s
    decode_s = 1e-5 * LOAD.context
    # The prompt comes in the middle of a decode, and one decode is beside its chunk.
    assert beside - fewer == pytest.approx(1.5 * decode_s, rel=0.01)


def test_observed_decodes_are_interpolated_and_prompts_go_by_the_cost() -> None:
    times = ObservedTimes(cost=COST, per_attended=1e-6, decodes=((1, 0.010), (4, 0.013)))
    assert times.seconds(StepShape(2, 100, 2)) == pytest.approx(0.011 + 1e-4)
    assert times.seconds(StepShape(32, 0, 1)) == pytest.approx(32 * ROW_S)
    assert of([times]).time_per_token_s == pytest.approx(0.010 + 65e-6)


def test_beyond_what_was_observed_decodes_grow_as_the_cost_does() -> None:
    times = ObservedTimes(cost=COST, per_attended=1e-6, decodes=((4, 0.013),))
    assert times.seconds(StepShape(1, 0, 1)) == pytest.approx(0.013)  # reading decides, for four rows and one
    more = COST.seconds(StepShape(64, 0, 64)) - COST.seconds(StepShape(4, 0, 4))
    assert more > 0.0
    assert times.seconds(StepShape(64, 100, 64)) == pytest.approx(0.013 + more + 1e-4)


def test_a_stage_of_devices_reads_its_weights_and_sums_over_its_ranks() -> None:
    devices = parse_devices("a100-80g:2")
    host = devices.hosts[0]
    own = EFFICIENCY["cuda"]
    found = {}
    for num_ranks in (1, 2):
        site = StageSite(host=host.name, device=host.devices[0], num_ranks=num_ranks, link=host.link)
        made = estimate(Layout(replica_sites=((site,),)), SIZES, devices, LOAD)
        assert made is not None
        found[num_ranks] = made
    layers = SIZES.spec.num_layers
    fixed_s = own.step_s + layers * own.layer_s
    rate = 2039e9 * own.reads
    reads_s = (SIZES.weight_bytes + 65 * SIZES.of_rank(0, layers).kv_bytes_per_token) / rate
    assert found[1].predicted.time_per_token_s == pytest.approx(fixed_s + reads_s, rel=1e-3)
    summed = found[2].ranks[0]
    assert summed.all_reduce_bytes_per_step == 2 * layers * SIZES.spec.hidden_size * SIZES.item_bytes
    assert summed.all_reduce_latency_s == pytest.approx(2 * layers * 10e-6)
    assert found[1].ranks[0].all_reduce_bytes_per_step == 0
