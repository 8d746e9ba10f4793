"""What becomes of requests when their core is lost, as far as the client decides it (row R4)."""

from __future__ import annotations

import asyncio

import pytest

from core_client import STATS, WAIT_S, WELCOME, Rig, read_all, until, update, with_rig
from core_numbers import core_stats
from penstock.engine.ipc import AWAY_S, AddRequest, Hello
from penstock.errors import ErrorInfo, QuarantinedError, StageLostError, UnavailableError, WaitTimeoutError
from penstock.operations import Pause
from penstock.request import RequestUpdate, SamplingParams, TokenLogprobs
from penstock.scheduler.admission import derive_seed

SAMPLING = SamplingParams(max_tokens=20)


def seeds_of(messages: list[object]) -> list[int | None]:
    return [message.request.sampling.seed for message in messages if isinstance(message, AddRequest)]


def test_r4_a_request_without_a_seed_goes_on_by_the_one_that_it_had() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        first = rig.engine.add("a", [1, 2, 3], SAMPLING)
        rig.engine.add("b", [1, 2, 3], SAMPLING)
        assert seeds_of(rig.core.hear(2)) == [derive_seed(0, 0), derive_seed(0, 1)]
        rig.core.tell(update("a", b"x", "stop"))
        await read_all(first)
        await rig.lose_core()
        await rig.welcome()
        assert seeds_of(rig.core.hear()) == [derive_seed(0, 1)]
        rig.engine.add("c", [1, 2, 3], SAMPLING)
        assert seeds_of(rig.core.hear()) == [derive_seed(0, 2)]

    with_rig(body)


def test_g8_r4_another_core_hears_of_the_scores_that_have_come_and_they_are_progress() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream = rig.add(seed=8, prompt_logprobs=0)
        score = TokenLogprobs(-1.0, 1, [], [])
        for count, sum_of_counts in ((2, 2), (3, 5)):
            rig.core.tell(RequestUpdate(request_id="r", prompt_logprobs=[score] * count))
            assert len((await stream.next()).prompt_logprobs) == count
            await rig.lose_core()
            await rig.welcome()
            (message,) = rig.core.hear()
            assert isinstance(message, AddRequest)
            assert (message.output_ids, message.num_scores) == ([], sum_of_counts)
        await rig.lose_core()
        with pytest.raises(QuarantinedError):
            await stream.next()

    with_rig(body)


def test_r4_another_core_is_greeted_until_it_answers() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        await rig.lose_core()
        await rig.greeted()
        for _ in range(3):
            rig.engine.check_core()
            assert rig.core.hear(greeted=False) == [Hello()]
        await rig.answered()
        rig.engine.check_core()
        stream = rig.add()  # the next that the core hears
        rig.core.tell(update("r", b"x", "length"))
        assert await read_all(stream) == ("x", "length")

    with_rig(body)


def test_r2_words_that_waited_while_this_process_was_stopped_count() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream = rig.add()
        rig.clock.advance(100.0)
        rig.engine.check_core()  # nothing has been read yet, as before the transport's thread has run
        rig.core.tell(update("r", b"x"))
        assert (await stream.next()).text == "x"
        rig.clock.advance(9.9)
        rig.engine.check_core()
        rig.clock.advance(0.1)
        rig.engine.check_core()
        with pytest.raises(WaitTimeoutError, match="sent nothing for 10 s"):
            await stream.next()

    with_rig(body)


def test_r4_whoever_waits_for_a_core_goes_on_when_there_is_one() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        await rig.engine.wait_for_core()
        await rig.lose_core()
        waiting = [asyncio.ensure_future(rig.engine.wait_for_core(AWAY_S)) for _ in range(2)]
        with pytest.raises(WaitTimeoutError, match=r"did not answer in 0\.01 s"):
            await rig.engine.wait_for_core(0.01)
        waiting[0].cancel()
        await rig.welcome()
        await waiting[1]
        rig.add()

    with_rig(body)


def test_r1_whoever_waits_for_a_core_that_will_not_come_hears_the_cause() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        await rig.lose_core()
        waiting = asyncio.ensure_future(rig.engine.wait_for_core())
        await asyncio.sleep(0)
        rig.engine.lose(StageLostError("stage 1 was killed by signal 9"))
        with pytest.raises(StageLostError, match="stage 1 was killed"):
            await waiting

    with_rig(body)


@pytest.mark.parametrize("has_core", [True, False])
def test_r1_whoever_waits_for_an_operation_hears_that_no_core_will_come(has_core: bool) -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        if not has_core:
            await rig.lose_core()
        waiting = [asyncio.ensure_future(rig.engine.operate(Pause("wait"), WAIT_S)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        rig.engine.lose(StageLostError("stage 1 was killed by signal 9"))
        with pytest.raises(StageLostError, match="stage 1 was killed"):
            await waiting[1]
        assert waiting[0].cancelled()
        assert not rig.engine.sessions_asked

    with_rig(body)


def test_r1_whoever_waits_for_an_operation_hears_that_the_client_is_closed() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        waiting = asyncio.ensure_future(rig.engine.operate(Pause("wait"), WAIT_S))
        await asyncio.sleep(0)
        rig.engine.close()
        with pytest.raises(UnavailableError, match="the engine client was closed"):
            await waiting

    with_rig(body)


@pytest.mark.parametrize("has_core", [True, False])
def test_r1_what_is_asked_after_the_end_hears_the_first_cause_at_once(has_core: bool) -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        if not has_core:
            await rig.lose_core()
        rig.engine.lose(StageLostError("stage 1 was killed by signal 9"))
        rig.engine.close()
        assert not rig.engine.status().ready
        assert not rig.engine.status().is_recovering
        assert "stage 1 was killed" in rig.engine.status().reason
        with pytest.raises(StageLostError, match="stage 1 was killed"):
            rig.engine.add("late", [1], SAMPLING)
        for question in (rig.engine.operate(Pause("wait"), WAIT_S), rig.engine.trace()):
            with pytest.raises(StageLostError, match="stage 1 was killed"):
                await question
        if not has_core:
            with pytest.raises(StageLostError, match="stage 1 was killed"):
                await rig.engine.wait_for_core()

    with_rig(body)


def test_numbers_stay_while_there_is_no_core_but_not_those_of_its_only_replica() -> None:
    async def body(rig: Rig) -> None:
        assert rig.engine.status().stats is None
        await rig.start()
        rig.core.tell(stats=core_stats(generated_tokens=3, num_running=1))
        await until(lambda: (rig.engine.status().stats or STATS).scheduler.num_running)
        await rig.lose_core()
        await rig.greeted()
        rig.core.socket.send(rig.core.client, WELCOME)
        await rig.engine.wait_for_core(WAIT_S)
        stats = rig.engine.status().stats
        assert stats is not None
        assert (stats.scheduler.generated_tokens, stats.scheduler.num_running) == (3, 0)
        assert [status.stats for status in rig.engine.statuses()] == [None]

    with_rig(body)


def test_r5_a_request_waits_for_a_stage_that_comes_back_but_not_for_one_that_was_tried_in_vain() -> None:
    """Issue 25, point 3."""
    loss = ErrorInfo(kind="StageLostError", message="stage 1 was killed.", stage=1)

    async def body(rig: Rig) -> None:
        with pytest.raises(UnavailableError, match="still loading"):
            rig.engine.add("early", [1], SAMPLING)
        await rig.start()
        rig.core.tell(stats=core_stats(loss=loss))
        await until(lambda: not rig.engine.status().ready)
        assert rig.engine.status().is_recovering
        rig.add("patient")
        rig.core.tell(stats=core_stats(loss=loss, is_loss_lasting=True))
        await until(lambda: not rig.engine.status().is_recovering)
        with pytest.raises(UnavailableError, match="stage 1 was killed"):
            rig.engine.add("late", [1], SAMPLING)

    with_rig(body)


def test_r5_a_request_does_not_wait_for_a_core_that_has_not_come_for_a_minute() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        await rig.lose_core()
        rig.clock.advance(AWAY_S)
        assert not rig.engine.status().is_recovering
        with pytest.raises(UnavailableError, match="the engine core ended"):
            rig.engine.add("late", [1], SAMPLING)

    with_rig(body)
