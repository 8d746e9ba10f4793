"""The stage loop in whole pipes of threads, with a model that is arithmetic: exact, or a typed error."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hand_core import (
    VOCAB,
    ArithmeticModel,
    Crew,
    HandCore,
    Part,
    Wanted,
    arithmetic_tokens,
    make_plan,
    new_row,
)
from penstock.batch import (
    GUESSED,
    AllocateKV,
    PlanMeta,
    RewoundRow,
    ScheduledBatch,
    Shutdown,
    StepResult,
    encode,
)
from penstock.distributed.group import MemoryGroup, meet
from penstock.errors import (
    LinkClosedError,
    NumericalError,
    PeerError,
    ProtocolError,
    StageLostError,
    WaitTimeoutError,
)
from penstock.models.intermediate import IntermediateTensors
from penstock.pipeline.decision_log import DecisionLog
from penstock.pipeline.links.plan_channel import QueueChannel
from penstock.pipeline.stage import Stage, plans_from
from penstock.pipeline.token_return import SampleReceiver
from penstock.runner.request_rows import RequestRows
from penstock.trace.phases import Phase
from stage_pipe import BLOCK, NUM_BLOCKS, NUM_ROWS, Pipe
from tensor_ranks import joined


def random_requests(seed: int, count: int = 9) -> list[Wanted]:
    rng = random.Random(seed)
    return [
        Wanted([rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], rng.randint(1, 12))
        for _ in range(count)
    ]


LAYOUTS = [
    (1, 0, "memory"),
    (2, 0, "memory"),
    (2, 2, "shared memory"),
    (3, 1, "memory"),
    (3, 0, "shared memory"),
    (5, 1, "shared memory"),
]


@pytest.mark.parametrize(("num_stages", "async_depth", "carrier"), LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 5, 32])
def test_d3_d4_d5_tokens_are_exact_in_every_layout(
    num_stages: int, async_depth: int, carrier: str, chunk: int
) -> None:
    pipe = Pipe(num_stages, carrier=carrier, num_frames=async_depth + 1)
    requests = random_requests(seed=chunk)
    core = HandCore(
        num_stages=num_stages,
        depth=num_stages + async_depth,
        num_rows=NUM_ROWS,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        chunk=chunk,
    )
    core.generate(pipe, requests)
    pipe.submit_plan(make_plan(core.step, consume_through=core.returned))  # all ranks come to rest
    pipe.poll_results(20.0)
    pipe.shutdown()
    for request in requests:
        assert request.output == arithmetic_tokens(request.prompt, request.count, num_stages)
    assert len({str(live_rows(runner.rows)) for runner in pipe.runners}) == 1  # D3, E6: at rest all agree
    assert live_rows(pipe.runners[0].rows)
    ends, between = {0, num_stages - 1}, range(1, num_stages - 1)
    assert len({str(known_ids(pipe.runners[stage].rows)) for stage in ends}) == 1
    assert not any(pipe.runners[stage].rows.token_ids.size for stage in between)


@pytest.mark.parametrize("num_stages", [2, 6, 8, 10])
def test_c10_each_stage_receives_each_sample_once_from_the_last_one(
    num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: Counter[tuple[str, int]] = Counter()
    receive = SampleReceiver._receive

    def counted(receiver: SampleReceiver, pending: Any) -> bytes:
        received[receiver._name, pending.step_id] += 1
        return receive(receiver, pending)

    monkeypatch.setattr(SampleReceiver, "_receive", counted)
    pipe = Pipe(num_stages, carrier="shared memory")
    requests = random_requests(seed=num_stages)
    core = core_for(num_stages, depth=num_stages)
    core.generate(pipe, requests)
    come_to_rest(core, pipe)
    for request in requests:
        assert request.output == arithmetic_tokens(request.prompt, request.count, num_stages)
    sampled = [result.step_id for result in core.results if result.token_ids]
    assert received == Counter((str(stage), step) for stage in range(num_stages - 1) for step in sampled)


@pytest.mark.parametrize("async_depth", [0, 1, 2])
def test_f4_a_step_has_one_order_at_every_depth(async_depth: int) -> None:
    """Inputs are begun before their samples are waited for, and nothing is sent before it is computed."""
    num_stages = 3
    pipe = Pipe(num_stages, num_frames=async_depth + 1)
    traces = [traced(stage) for stage in pipe.stages]
    core = core_for(num_stages, depth=num_stages + async_depth)
    core.generate(pipe, random_requests(seed=async_depth))
    come_to_rest(core, pipe)
    for trace in traces:
        assert trace == ["begin", "samples", "complete", "take", "forward", "put"] * (core.step + 1)


def traced(stage: Stage) -> list[str]:
    """What a stage does from now on, in order."""
    trace: list[str] = []

    def watched(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*given: Any) -> Any:
            trace.append(name)
            return act(*given)

        return watch

    runner: Any = stage._runner
    source: Any = stage._source
    sink: Any = stage._sink
    runner.begin, runner.complete = watched("begin", runner.begin), watched("complete", runner.complete)
    sink.consume_samples = watched("samples", sink.consume_samples)
    source.take_tensors = watched("take", source.take_tensors)
    stage._compute = watched("forward", stage._compute)
    stage._pass_on = watched("put", stage._pass_on)
    return trace


def core_for(num_stages: int, depth: int) -> HandCore:
    return HandCore(
        num_stages=num_stages,
        depth=depth,
        num_rows=NUM_ROWS,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        chunk=5,
    )


def come_to_rest(core: HandCore, pipe: Pipe) -> None:
    """Have all stages take every sample, and end them."""
    pipe.submit_plan(make_plan(core.step, consume_through=core.returned))
    pipe.poll_results(20.0)
    pipe.shutdown()


def live_rows(rows: RequestRows) -> dict[int, tuple[object, ...]]:
    """All that a table knows about the rows that a request holds, but for the ids."""
    return {
        row: (
            rows.request_ids[row],
            rows.total_len[row],
            rows.num_computed[row],
            rows.sampled_step[row],
            list(rows.tables.first(row, rows.tables.num_blocks[row])),
        )
        for row, generation in enumerate(rows.generation)
        if generation >= 0
    }


def known_ids(rows: RequestRows) -> dict[int, list[int]]:
    """The ids of the rows that a request holds."""
    held = [row for row, generation in enumerate(rows.generation) if generation >= 0]
    return {row: rows.token_ids[row, : rows.total_len[row]].tolist() for row in held}


def test_d9_an_empty_plan_crosses_every_stage_and_gives_a_result() -> None:
    seen: list[tuple[int, int]] = []

    class Watched(ArithmeticModel):
        def __init__(self, stage: int) -> None:
            self.stage = stage

        def forward(
            self, tensors: IntermediateTensors, positions: torch.Tensor, *rest: object
        ) -> IntermediateTensors:
            seen.append((self.stage, len(tensors["hidden_states"])))
            return super().forward(tensors, positions, *rest)

    pipe = Pipe(3, models=[Watched(stage) for stage in range(3)])
    for step in range(2):
        pipe.submit_plan(make_plan(step))
        assert pipe.poll_results(20.0) == [StepResult(step_id=step, digest=pipe.log.digest)]
    pipe.shutdown()
    assert seen == [(0, 0), (1, 0), (2, 0)] * 2


def test_d18_the_ranks_of_a_stage_meet_for_a_plan_that_gives_them_nothing_to_exchange() -> None:
    """Else its result would be there while one of them stands still, and prove nothing of it."""
    pipe = Pipe(2)
    groups = joined([MemoryGroup(rank, 2, name="stage 1", timeout_s=20.0) for rank in (0, 1)])
    pipe.stages[1]._group = groups[0]
    pipe.submit_plan(make_plan(0))
    assert pipe.core_endpoints[-1].recv(0.05) is None, "the other rank of the last stage has not come"
    meet(groups[1])
    assert [result.step_id for result in pipe.poll_results(20.0)] == [0]
    pipe.shutdown()


@pytest.mark.parametrize("why", [{}, {"starved": True}, {"held": True}])
@pytest.mark.parametrize("carrier", ["memory", "ring"])
def test_d6_every_stage_says_where_its_time_went(carrier: str, why: dict[str, bool]) -> None:
    pipe = Pipe(3, carrier=carrier)
    pipe.submit_plan(ScheduledBatch(step_id=0, meta=PlanMeta(**why)))
    pipe.poll_results(20.0)
    pipe.shutdown()
    visited = []
    for clock in pipe.clocks:
        wall_ns, _, phase_ns = clock.totals()
        assert wall_ns == sum(phase_ns)
        is_last = clock is pipe.clocks[-1]
        is_held = "held" in why and not is_last  # the last stage has sent what the others waited for
        assert phase_ns[Phase.NO_WORK] == 1 + ("starved" in why)  # one tick is from before the stage ran
        assert phase_ns[Phase.WAIT_PLAN] == 2 - ("starved" in why) - is_held  # one is for the shutdown
        assert phase_ns[Phase.WAIT_NEXT] == is_held + (not is_last)
        visited.append({phase for phase in Phase if phase_ns[phase]})
    every = {Phase.NO_WORK, Phase.WAIT_PLAN, Phase.TAKE, Phase.FORWARD, Phase.PUT, Phase.COMM}
    assert visited[0] == every | {Phase.WAIT_TOKEN, Phase.WAIT_NEXT}
    assert visited[1] == every | {Phase.WAIT_TOKEN, Phase.WAIT_NEXT, Phase.WAIT_PREV}
    assert visited[2] == every | {Phase.WAIT_PREV, Phase.SAMPLE}


def test_d10_a_preempted_request_goes_on_where_it_was() -> None:
    pipe = Pipe(2)
    prompt = [5, 6, 7]
    expected = arithmetic_tokens(prompt, 4, 2)
    part = Part(row=0, num_tokens=3, start=0, blocks=[0])
    pipe.submit_plan(make_plan(0, [part], new_rows=[new_row(0, prompt)]))
    (first,) = pipe.poll_results(20.0)
    pipe.submit_plan(make_plan(1, [Part(row=0, start=3, token_from=0)]))
    (second,) = pipe.poll_results(20.0)
    known = prompt + first.token_ids[0] + second.token_ids[0]
    again = new_row(3, known, generation=1, prompt_len=3)  # its row and block went to someone else
    other = new_row(0, [9], generation=1)
    parts = [Part(row=0, start=0, blocks=[0]), Part(row=3, num_tokens=5, start=0, blocks=[7, 2])]
    pipe.submit_plan(make_plan(2, parts, freed_rows=[0], new_rows=[other, again], consume_through=1))
    (third,) = pipe.poll_results(20.0)
    pipe.submit_plan(make_plan(3, [Part(row=3, start=5, token_from=2)]))
    (fourth,) = pipe.poll_results(20.0)
    pipe.shutdown()
    assert known[3:] + third.token_ids[1] + fourth.token_ids[0] == expected
    assert third.token_ids[0] == arithmetic_tokens([9], 1, 2)


class Failing(ArithmeticModel):
    """Fails in a step with three tokens."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def forward(
        self, tensors: IntermediateTensors, positions: torch.Tensor, *rest: object
    ) -> IntermediateTensors:
        if len(positions) == 3:
            raise self.error
        return super().forward(tensors, positions, *rest)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_any_failure_in_a_step_ends_the_stage_and_wakes_the_others(failing: int) -> None:
    models = [ArithmeticModel() for _ in range(3)]
    models[failing] = Failing(RuntimeError("boom"))
    pipe = Pipe(3, models=models)
    pipe.submit_plan(make_plan(0))
    pipe.poll_results(20.0)
    enter = new_row(0, [1, 2, 3])
    pipe.submit_plan(make_plan(1, [Part(row=0, num_tokens=3, start=0, blocks=[0])], new_rows=[enter]))
    pipe.submit_plan(make_plan(2, [Part(row=0, start=3, token_from=1)]))
    with pytest.raises(
        StageLostError, match=f"stage {failing} failed in step 1: RuntimeError: boom"
    ) as caught:
        pipe.crew.join()
    assert caught.value.stage == failing
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert len(pipe.crew.errors) == 3
    assert all(isinstance(error, LinkClosedError) for error in pipe.crew.errors[1:])


def test_an_error_of_ours_keeps_its_kind_and_gains_its_stage() -> None:
    pipe = Pipe(1, models=[Failing(NumericalError("bad numbers"))])
    pipe.submit_plan(
        make_plan(0, [Part(row=0, num_tokens=3, start=0, blocks=[0])], new_rows=[new_row(0, [1] * 3)])
    )
    with pytest.raises(NumericalError, match="bad numbers") as caught:
        pipe.crew.join()
    assert caught.value.stage == 0


def test_dr1_stages_that_see_different_plans_notice_at_once() -> None:
    pipe = Pipe(2)
    enter = [new_row(0, [1, 2, 3], name="the-request")]
    pipe.core_endpoints[0].send(
        encode(make_plan(0, [Part(row=0, num_tokens=3, start=0, blocks=[0])], new_rows=enter))
    )
    pipe.core_endpoints[1].send(
        encode(make_plan(0, [Part(row=0, num_tokens=2, start=0, blocks=[0])], new_rows=enter))
    )
    pipe.core_endpoints[0].send(encode(Shutdown()))
    with pytest.raises(ProtocolError, match=r"stage 0 -> stage 1.*step 0.*num_tokens.*the-request") as caught:
        pipe.crew.join()
    assert caught.value.stage == 1


def test_a_stage_that_hears_nothing_from_its_neighbour_says_so() -> None:
    pipe = Pipe(2, timeout_s=0.01)
    pipe.core_endpoints[1].send(encode(make_plan(0)))
    with pytest.raises(LinkClosedError):
        pipe.poll_results(20.0)
    pipe.core_endpoints[0].send(encode(Shutdown()))
    with pytest.raises(WaitTimeoutError, match=r"stage 0 -> stage 1.*hidden states of step 0") as caught:
        pipe.crew.join()
    assert caught.value.stage == 1


def test_dr1_a_lost_repeated_changed_or_foreign_message_is_refused() -> None:
    plan = make_plan(0)
    changed = ScheduledBatch(step_id=0, freed_rows=[1], digest=plan.digest)
    wrong = {
        "lost": ([encode(make_plan(1))], r"\(0, 0\), found \(0, 1\)"),
        "repeated": ([encode(plan), encode(plan)], r"\(0, 1\), found \(0, 0\)"),
        "changed": ([encode(changed)], "step 0 does not continue.*digest"),
        "foreign": ([encode(AllocateKV(num_blocks=3))], "the plan of step 0, found AllocateKV"),
        "broken": ([encode(plan)[:-1]], "from the core cannot be read.*the plan of step 0"),
    }
    for frames, complaint in wrong.values():
        core, rank = QueueChannel.pair()
        for frame in frames:
            core.send(frame)
        with pytest.raises(ProtocolError, match=complaint):
            list(plans_from(rank))


def test_d4_a_stage_that_another_plan_reached_is_caught_in_that_very_step() -> None:
    """The other plan is sealed as the core would have sealed it: only the neighbours can tell."""
    pipe = Pipe(3)
    pipe.submit_plan(make_plan(0, [Part(row=0, start=0, blocks=[0])], new_rows=[new_row(0, [5], name="who")]))
    pipe.poll_results(20.0)
    other = DecisionLog()
    other.digest, other.next_step = pipe.log.digest, 1
    parts = [Part(row=0, start=1, blocks=[], token_from=0)]
    pipe.core_endpoints[1].send(encode(other.seal(make_plan(1, parts, freed_rows=[3]))))
    frame = encode(pipe.log.seal(make_plan(1, parts)))
    for channel in (pipe.core_endpoints[0], pipe.core_endpoints[2]):
        channel.send(frame)
    pipe.core_endpoints[0].send(encode(Shutdown()))
    with pytest.raises(PeerError):
        pipe.crew.join()
    (found,) = [error for error in pipe.crew.errors if isinstance(error, ProtocolError)]
    assert re.search(r"stage 0 -> stage 1 .*for step 1: digest.*Requests of the step: who", found.message)
    assert found.stage == 1


def test_d4_a_stage_with_another_past_refuses_a_plan_that_all_others_take() -> None:
    pipe = Pipe(1)
    enter = new_row(0, [5], name="who")
    pipe.core_endpoints[0].send(encode(make_plan(0, [Part(row=0, start=0, blocks=[0])], new_rows=[enter])))
    pipe.poll_results(20.0)
    pipe.log.seal(make_plan(0))
    pipe.submit_plan(make_plan(1, [Part(row=0, start=1, token_from=0)]))
    with pytest.raises(ProtocolError, match=r"plan of step 1 does not continue.*Requests of the step: who"):
        pipe.crew.join()


def test_the_end_of_the_core_names_the_plan_that_was_due() -> None:
    core, rank = QueueChannel.pair("core - stage 3")
    core.send(encode(make_plan(0)))
    core.close()
    with pytest.raises(LinkClosedError, match=r"core - stage 3.*is closed.*plan of step 1"):
        list(plans_from(rank))


def test_plans_end_at_the_shutdown_and_with_the_core() -> None:
    core, rank = QueueChannel.pair()
    log = DecisionLog()
    for message in (log.seal(make_plan(0)), log.seal(make_plan(1)), Shutdown()):
        core.send(encode(message))
    assert [plan.step_id for plan in plans_from(rank)] == [0, 1]
    core, rank = QueueChannel.pair()
    crew = Crew()
    crew.start(core.close)
    with pytest.raises(LinkClosedError):
        list(plans_from(rank))
    crew.join()


def test_c7_a_later_stage_receives_into_buffers_of_a_fixed_address() -> None:
    addresses = set()

    class Watched(ArithmeticModel):
        def forward(
            self, tensors: IntermediateTensors, positions: torch.Tensor, *rest: object
        ) -> IntermediateTensors:
            addresses.add((tensors["hidden_states"].data_ptr(), tensors["residual"].data_ptr()))
            return super().forward(tensors, positions, *rest)

    pipe = Pipe(2, models=[ArithmeticModel(), Watched()])
    parts = [Part(row=0, num_tokens=n, start=s, blocks=b) for n, s, b in ((9, 0, [0, 1, 2]), (2, 9, []))]
    pipe.submit_plan(make_plan(0, parts[:1], new_rows=[new_row(0, list(range(11)))]))
    pipe.submit_plan(make_plan(1, parts[1:], consume_through=0))
    pipe.poll_results(20.0)
    pipe.poll_results(20.0)
    pipe.shutdown()
    assert len(addresses) == 1


class Gated(ArithmeticModel):
    """Notes the tokens of each step that it computes, and holds up the one that begins with a given token."""

    def __init__(self, held: int = -1) -> None:
        self.held = held
        self.computed: list[list[int]] = []
        self.has_come, self.may_go = threading.Event(), threading.Event()

    def forward(
        self, tensors: IntermediateTensors, positions: torch.Tensor, *rest: object
    ) -> IntermediateTensors:
        tokens = tensors["hidden_states"][:, 0].int().tolist()
        self.computed.append(tokens)
        if tokens[0] == self.held:
            self.has_come.set()
            assert self.may_go.wait(20.0)
        return super().forward(tensors, positions, *rest)


def guessed(step_id: int, start: int, draft_ids: Sequence[int]) -> ScheduledBatch:
    part = Part(row=0, num_tokens=len(draft_ids), start=start, token_from=GUESSED, drafts=draft_ids)
    return make_plan(step_id, [part])


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("held", [False, True])
def test_a_stage_computes_at_most_one_void_window_once_it_has_the_plan_that_rewinds(
    num_stages: int, held: bool
) -> None:
    prompt = [5, 6, 7]
    first, second, third, *others = arithmetic_tokens(prompt, 6, num_stages)
    wrong = [token for token in range(50, 90) if token not in (first, second, third, *others)]
    models = [Gated(wrong[0] if held and not stage else -1) for stage in range(num_stages)]
    pipe = Pipe(num_stages, models=models)
    enter = new_row(0, prompt)
    pipe.submit_plan(make_plan(0, [Part(row=0, num_tokens=3, start=0, blocks=range(5))], new_rows=[enter]))
    assert pipe.poll_results(20.0)[0].token_ids == [[first]]
    base = Part(row=0, num_tokens=2, start=3, token_from=0, drafts=[second])
    pipe.submit_plan(make_plan(1, [base], consume_through=0))
    if held:
        pipe.submit_plan(guessed(2, 5, wrong[:2]))
        assert models[0].has_come.wait(20.0)
    assert pipe.poll_results(20.0)[0].token_ids == [[second, third]]
    if not held:
        pipe.submit_plan(guessed(2, 5, [third, wrong[0]]))
        assert pipe.poll_results(20.0)[0].num_rejected == [1]
    newest = [*prompt, *arithmetic_tokens(prompt, 3 if held else 4, num_stages)]
    void = range(3, 6)
    for step in void:
        pipe.submit_plan(guessed(step, 2 * step + 1, wrong[step : step + 2]))
    rewound = RewoundRow(row=0, step=1 if held else 2, num_tokens=len(newest), newest_ids=newest[-3:])
    right = Part(row=0, start=len(newest) - 1, token_from=rewound.step)
    pipe.submit_plan(make_plan(6, [right], rewound=[rewound], consume_through=1))
    models[0].may_go.set()
    results = [pipe.poll_results(20.0)[0] for _ in range(4 if not held else 5)]
    pipe.shutdown()
    assert all((result.token_ids, result.num_rejected) == ([[]], [2]) for result in results[:-1])
    assert results[-1].token_ids == [arithmetic_tokens(newest, 1, num_stages)]
    for model in models[:-1]:
        assert sum(tokens[0] in wrong for tokens in model.computed) <= 1
    assert not any(tokens[0] in wrong for tokens in models[-1].computed), "the last stage knows by itself"


def test_a_guess_that_is_right_is_computed_and_sampled() -> None:
    pipe = Pipe(2)
    expected = arithmetic_tokens([5, 6, 7], 6, 2)
    enter = new_row(0, [5, 6, 7])
    pipe.submit_plan(make_plan(0, [Part(row=0, num_tokens=3, start=0, blocks=range(5))], new_rows=[enter]))
    pipe.submit_plan(guessed(1, 3, expected[:2]))
    pipe.submit_plan(guessed(2, 5, expected[2:4]))
    pipe.submit_plan(make_plan(3, [Part(row=0, start=7, token_from=2)]))
    results = [pipe.poll_results(20.0)[0].token_ids for _ in range(4)]
    pipe.shutdown()
    assert results == [[expected[:1]], [expected[1:3]], [expected[3:5]], [expected[5:]]]


def test_a_guessed_window_beside_another_row_is_refused() -> None:
    pipe = Pipe(2)
    enter = [new_row(0, [5]), new_row(1, [6])]
    parts = [Part(row=row, start=0, blocks=[row]) for row in (0, 1)]
    pipe.submit_plan(make_plan(0, parts, new_rows=enter))
    both = [Part(row=0, start=1, token_from=GUESSED, drafts=[3]), Part(row=1, start=1, token_from=0)]
    pipe.submit_plan(make_plan(1, both))
    with pytest.raises(ProtocolError, match="has a guessed input but shares the plan with other rows"):
        pipe.crew.join()
