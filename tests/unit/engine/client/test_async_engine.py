"""Streams of text over a real socket, with a core that does what the test says."""

from __future__ import annotations

import asyncio
import struct

import msgspec
import pytest

from core_client import INFO, STATS, WAIT_S, WELCOME, Rig, read_all, until, update, with_rig
from core_numbers import core_stats
from penstock.batch import StageSpans
from penstock.engine.client.core_health import CORE_AWAY
from penstock.engine.ipc import (
    AWAY_S,
    AbortRequests,
    AddRequest,
    GetTrace,
    Operate,
    Operated,
    SessionsChanged,
    Trace,
)
from penstock.errors import (
    AbortedError,
    ErrorInfo,
    InvalidRequestError,
    NumericalError,
    OverloadedError,
    QuarantinedError,
    UnavailableError,
    WaitTimeoutError,
)
from penstock.operations import (
    Abort,
    CloseSession,
    FlushCache,
    OpenSession,
    Operation,
    OperationDone,
    Pause,
    Resume,
    SlowDown,
)
from penstock.request import PoolingParams, SamplingParams, VectorShape


def test_streams_get_their_own_text_in_order() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        first, second = rig.add("a"), rig.add("b")
        rig.core.tell(update("a", b"x", queue_seconds=0.25, num_cached_tokens=2), update("b", b"1"))
        rig.core.tell(update("b", b"2", "length"), update("a", b"y"))
        rig.core.tell(update("a", b"z", "stop", stop_token_id=122))
        assert await read_all(first) == ("xy", "stop")
        assert await read_all(second) == ("12", "length")
        assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == (3, 3, 2)
        assert first.queue_seconds == 0.25

    with_rig(body)


def test_what_came_between_two_reads_is_merged() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream, other = rig.add("a"), rig.add("b")
        for text in (b"x", b"y", b"z"):
            rig.core.tell(update("a", text))
        rig.core.tell(update("b", b"-", "length"))
        await read_all(other)  # by now the updates of the first have been read from the socket too
        delta = await stream.next()
        assert (delta.text, delta.token_ids) == ("xyz", list(b"xyz"))

    with_rig(body)


def test_d11_a_stop_string_ends_the_stream_and_aborts_in_the_core() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream = rig.add(stop=["END"])
        rig.core.tell(update("r", b"aEN"), update("r", b"Dbc"))
        assert await read_all(stream) == ("a", "stop")
        assert stream.completion_tokens == 4
        assert rig.core.hear() == [AbortRequests(["r"])]
        stream.cancel()  # after the end: nothing
        rig.core.tell(update("r", b"late", "length"))
        again = rig.add("s")
        rig.core.tell(update("s", b"!", "length"))
        assert await read_all(again) == ("!", "length")

    with_rig(body)


def test_a_stop_string_in_the_last_token_needs_no_abort() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream = rig.add(stop=["END"])
        rig.core.tell(update("r", b"END", "length"))
        assert await read_all(stream) == ("", "stop")
        rig.add("s")  # hears exactly one message: there was no abort before

    with_rig(body)


def test_r13_cancel_aborts_once_and_ends_a_waiting_reader() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream = rig.add()
        waiting = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        stream.cancel()
        stream.cancel()
        with pytest.raises(AbortedError):
            await waiting
        assert rig.core.hear() == [AbortRequests(["r"])]

    with_rig(body)


def test_r8_the_error_of_one_request_is_its_own() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        bad, good = rig.add("a"), rig.add("b")
        error = ErrorInfo(kind="NumericalError", message="NaN in the logits", code="numerical")
        rig.core.tell(update("a", b"x"))
        rig.core.tell(update("a", b"", "error", error=error), update("b", b"y", "length"))
        assert await read_all(good) == ("y", "length")
        assert (await bad.next()).text == "x", "what came before the error is not lost"
        with pytest.raises(NumericalError, match="NaN"):
            await bad.next()

    with_rig(body)


def test_r4_streams_go_on_with_another_core() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        streams = [rig.add(name) for name in "ab"]
        rig.core.tell(update("a", b"xy"))
        assert (await streams[0].next()).text == "xy"
        await rig.lose_core()
        status = rig.engine.status()
        assert (status.ready, status.reason) == (False, "the engine core ended; another one starts.")
        assert status.is_recovering
        streams[1].cancel()
        late = rig.engine.add("c", [1], SamplingParams(max_tokens=20))
        await rig.welcome()
        again = [message for message in rig.core.hear(2) if isinstance(message, AddRequest)]
        assert [(one.request.request_id, one.output_ids) for one in again] == [("a", list(b"xy")), ("c", [])]
        assert rig.engine.status().ready
        rig.core.tell(update("a", b"z", "length"), update("c", b"1", "length"))
        assert await read_all(streams[0]) == ("z", "length")
        assert await read_all(late) == ("1", "length"), "it came while there was no core"

    with_rig(body)


def test_r4_a_request_that_was_there_when_two_cores_were_lost_is_not_tried_again() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        poison, other = rig.add("a"), rig.add("b")
        await rig.lose_core()
        await rig.welcome()
        rig.core.hear(2)
        rig.core.tell(update("b", b"x"))
        assert (await other.next()).text == "x"
        await rig.lose_core()
        with pytest.raises(QuarantinedError, match="two engine cores were lost while they had request a, at"):
            await poison.next()
        await rig.welcome()
        (again,) = rig.core.hear()
        assert isinstance(again, AddRequest)
        assert again.request.request_id == "b", "it has gained a token between"

    with_rig(body)


def test_r4_a_core_that_is_lost_before_it_was_asked_is_nobodys_fault() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream = rig.add("a")
        await rig.lose_core()
        for _ in range(3):
            await rig.greeted()
            rig.core.socket.close()  # it never came to a welcome
        await rig.welcome()
        (again,) = rig.core.hear()
        assert isinstance(again, AddRequest)
        rig.core.tell(update("a", b"z", "length"))
        assert await read_all(stream) == ("z", "length")

    with_rig(body)


def test_r5_a_core_that_has_come_is_not_ready_before_it_has_said_how_its_stages_are() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        await rig.lose_core()
        await rig.greeted()
        stream = rig.engine.add("a", [1], SamplingParams())
        rig.core.socket.send(rig.core.client, WELCOME)
        await until(rig.core.overhear)  # the request: the welcome has been taken
        status = rig.engine.status()
        assert (status.ready, status.is_recovering, status.reason) == (False, True, CORE_AWAY.message)
        rig.core.tell()
        await until(lambda: rig.engine.status().ready)
        stream.cancel()

    with_rig(body)


def test_r1_streams_end_when_no_other_core_comes() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream = rig.add()
        await rig.lose_core()
        rig.clock.advance(AWAY_S - 0.1)
        rig.engine.check_core()
        rig.clock.advance(0.1)
        rig.engine.check_core()
        with pytest.raises(UnavailableError, match="down for 60 s"):
            await stream.next()
        await rig.welcome()
        assert rig.engine.status().ready

    with_rig(body)


def test_more_requests_than_the_bound_are_refused_until_one_ends() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        streams = [rig.add(str(number)) for number in range(3)]
        with pytest.raises(OverloadedError, match="3 requests"):
            rig.engine.add("x", [1], SamplingParams())
        rig.core.tell(update("0", b"", "length"))
        await read_all(streams[0])
        streams[0] = rig.add("y")
        streams[1].cancel()
        assert rig.core.hear() == [AbortRequests(["1"])]
        rig.add("z")

    with_rig(body)


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([], {}, "prompt"),
        ([256], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1] * 64, {"max_tokens": None}, "prompt"),
        ([1] * 60, {"max_tokens": 5}, "max_tokens"),
        ([1], {"temperature": 3.0}, "temperature"),
        ([1], {"stop_token_ids": [256]}, "stop_token_ids"),
    ],
)
def test_a_request_out_of_bounds_is_refused_before_it_is_sent(
    prompt: list[int], sampling: dict[str, object], param: str
) -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        with pytest.raises(InvalidRequestError) as raised:
            rig.engine.add("bad", prompt, SamplingParams(**sampling))
        assert raised.value.param == param
        rig.add("good")  # the first message that the core hears

    with_rig(body)


def test_the_core_may_serve_less_than_the_model() -> None:
    async def body(rig: Rig) -> None:
        await rig.start(max_model_len=8)
        assert rig.engine.max_model_len == 8
        with pytest.raises(InvalidRequestError, match="limit for prompt and output together is 8"):
            rig.engine.add("bad", [1] * 8, SamplingParams())

    with_rig(body)


def test_one_id_twice_is_refused() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        rig.add("a")
        with pytest.raises(InvalidRequestError, match="in use"):
            rig.engine.add("a", [1], SamplingParams())

    with_rig(body)


def test_before_the_welcome_requests_are_told_to_wait() -> None:
    async def body(rig: Rig) -> None:
        with pytest.raises(UnavailableError, match="loading"):
            rig.engine.add("a", [1], SamplingParams())
        status = rig.engine.status()
        assert (status.ready, status.reason, status.stats) == (False, "the engine is loading", None)

    with_rig(body)


def test_start_does_not_wait_for_ever() -> None:
    async def body(rig: Rig) -> None:
        with pytest.raises(WaitTimeoutError):
            await rig.engine.start(0.01)

    with_rig(body)


def test_an_engine_is_full_when_as_many_wait_as_may() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        assert not rig.engine.status().is_full
        stream = rig.add()
        waiting = core_stats(STATS, num_waiting=INFO.max_waiting_requests)
        rig.core.tell(update("r", b"x", "length"), stats=waiting)
        await read_all(stream)
        assert rig.engine.status().is_full

    with_rig(body)


def test_d9_readiness_follows_the_age_of_the_last_result() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        ready = rig.engine.status()
        assert ready.ready
        assert ready.since == pytest.approx(1e9 + 100.0)
        rig.clock.advance(5.5)
        stale = rig.engine.status()
        assert (stale.ready, stale.since) == (False, pytest.approx(1e9 + 105.5))
        assert "the engine core has been silent for 5.5 s" in stale.reason
        stream = rig.add()
        rig.core.tell(update("r", b"x", "length"))
        await read_all(stream)
        fresh = rig.engine.status()
        assert fresh.ready
        assert fresh.stats == STATS
        rig.core.tell(stats=core_stats(STATS, stalled_s=5.2))
        other = rig.add("s")
        rig.core.tell(update("s", b"x", "length"), stats=core_stats(STATS, stalled_s=5.2))
        await read_all(other)
        assert not rig.engine.status().ready, "the core is heard, but its stages are not"

    with_rig(body)


def test_r2_streams_of_a_silent_core_end_and_it_may_come_back() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream = rig.add()
        rig.clock.advance(9.9)
        rig.engine.check_core()
        rig.core.tell(update("r", b"x"))
        await stream.next()  # heard: the silence is over
        rig.clock.advance(9.9)
        rig.engine.check_core()
        rig.clock.advance(0.1)
        rig.engine.check_core()
        with pytest.raises(WaitTimeoutError, match="sent nothing for 10 s"):
            await stream.next()
        assert rig.core.hear() == [AbortRequests(["r"])]
        rig.core.tell(update("r", b"late"))
        other = rig.add("s")
        rig.core.tell(update("s", b"y", "length"))
        assert (await other.next()).text == "y"

    with_rig(body)


def test_d6_traces_answer_those_who_asked_in_order() -> None:
    spans = [StageSpans(stage=0, began_ns=n, phases=b"\x06", durations_ns=[1], steps=[]) for n in range(2)]

    async def body(rig: Rig) -> None:
        with pytest.raises(UnavailableError):
            await rig.engine.trace()
        await rig.start()
        first, second, third = (asyncio.ensure_future(rig.engine.trace()) for _ in range(3))
        await asyncio.sleep(0)  # lets them ask
        assert rig.core.hear(3) == [GetTrace()] * 3
        second.cancel()  # a client of the server that has left
        for answer in (spans[:1], [], spans):
            rig.core.socket.send(rig.core.client, Trace(answer))
        assert await first == spans[:1]
        assert await third == spans

    with_rig(body)


def test_news_of_the_ranks_are_those_behind_the_reports_that_were_seen() -> None:
    seen = StageSpans(stage=1, began_ns=7, phases=b"", durations_ns=[], steps=[], tp_rank=2)
    found = msgspec.structs.replace(seen, began_ns=8)

    async def body(rig: Rig) -> None:
        await rig.start()
        news = asyncio.ensure_future(rig.engine.news([seen]))
        await asyncio.sleep(0)
        assert rig.core.hear() == [GetTrace(seen=[(1, 2, 7)])]
        rig.core.socket.send(rig.core.client, Trace([found]))
        assert await news == [found]

    with_rig(body)


def test_a_trace_that_the_core_did_not_live_to_give_is_a_typed_error() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        asked = asyncio.ensure_future(rig.engine.trace())
        await asyncio.sleep(0)
        rig.core.hear()
        rig.core.socket.close()
        with pytest.raises(UnavailableError, match="the engine core ended"):
            await asked

    with_rig(body)


def operated(number: int, error: ErrorInfo | None = None) -> Operated:
    return Operated(number, OperationDone(accepted_step=3, completed_step=4, error=error))


def test_g4_an_operation_is_awaited() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        asked = asyncio.ensure_future(rig.engine.operate(Pause("wait"), WAIT_S))
        await asyncio.sleep(0)
        assert rig.core.hear() == [Operate(0, Pause("wait"))]
        rig.core.socket.send(rig.core.client, operated(0))
        assert await asked == [OperationDone(accepted_step=3, completed_step=4)]
        refused = asyncio.ensure_future(rig.engine.operate(Pause("wait"), WAIT_S))
        await asyncio.sleep(0)
        rig.core.hear()
        rig.core.socket.send(rig.core.client, operated(1, AbortedError("it was resumed").info()))
        with pytest.raises(AbortedError, match="resumed"):
            await refused

    with_rig(body)


def test_g4_whoever_waits_too_long_is_told_that_it_stays_in_force() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        with pytest.raises(WaitTimeoutError, match="remains in force"):
            await rig.engine.operate(Pause("wait"), 0.001)
        rig.core.hear()
        rig.core.socket.send(rig.core.client, operated(0))  # nobody waits for it
        stream = rig.add()
        rig.core.tell(update("r", b"x", "length"))
        assert await read_all(stream) == ("x", "length")

    with_rig(body)


def test_g4_another_core_begins_paused_before_it_hears_of_any_request() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream = rig.add()
        rig.core.tell(stats=core_stats(STATS, paused=True))
        await until(lambda: (rig.engine.status().stats or STATS).scheduler.paused)
        asked = asyncio.ensure_future(rig.engine.operate(Resume(), WAIT_S))
        await asyncio.sleep(0)
        assert rig.core.hear() == [Operate(0, Resume())]
        await rig.lose_core()
        await rig.welcome()
        pause, again, resume = rig.core.hear(3)
        assert (pause, resume) == (Operate(1, Pause("keep")), Operate(0, Resume()))
        assert isinstance(again, AddRequest)
        rig.core.socket.send(rig.core.client, operated(1))
        rig.core.socket.send(rig.core.client, operated(0))
        assert len(await asked) == 1
        rig.core.tell(update("r", b"x", "length"))  # not paused any more
        await read_all(stream)
        await rig.lose_core()
        await rig.welcome()
        assert rig.core.overhear() == []

    with_rig(body)


def test_g4_what_is_asked_while_there_is_no_core_is_for_the_next() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        await rig.lose_core()
        asked = asyncio.ensure_future(rig.engine.operate(Pause("keep"), WAIT_S))
        await rig.welcome()
        assert rig.core.hear() == [Operate(0, Pause("keep"))]
        rig.core.socket.send(rig.core.client, operated(0))
        assert len(await asked) == 1

    with_rig(body)


@pytest.mark.parametrize("operation", [Pause("keep"), Pause("wait"), Resume()])
def test_g4_what_was_answered_holds_for_the_next_core_whatever_else_is_under_way(
    operation: Operation,
) -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        before = core_stats(STATS, paused=isinstance(operation, Resume))
        stream = rig.add()
        rig.core.tell(update("r", b"x", "length"), stats=before)
        await read_all(stream)
        flushed = asyncio.ensure_future(rig.engine.operate(FlushCache(), WAIT_S))
        asked = asyncio.ensure_future(rig.engine.operate(operation, WAIT_S))
        await asyncio.sleep(0)
        assert rig.core.hear(2) == [Operate(0, FlushCache()), Operate(1, operation)]
        rig.core.socket.send(rig.core.client, operated(1))
        await asked
        await rig.lose_core()
        await rig.welcome()
        first = [] if isinstance(operation, Resume) else [Operate(2, Pause("keep"))]
        assert rig.core.hear(1 + len(first)) == [*first, Operate(0, FlushCache())]
        flushed.cancel()

    with_rig(body)


def test_g4_an_operation_whose_caller_has_left_is_asked_for_until_a_core_has_done_it() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        asked = asyncio.ensure_future(rig.engine.operate(FlushCache(), WAIT_S))
        await asyncio.sleep(0)
        assert rig.core.hear() == [Operate(0, FlushCache())]
        asked.cancel()
        await rig.lose_core()
        await rig.welcome()
        assert rig.core.hear() == [Operate(0, FlushCache())]
        behind = asyncio.ensure_future(rig.engine.operate(Resume(), WAIT_S))
        await asyncio.sleep(0)
        assert rig.core.hear() == [Operate(1, Resume())]
        for number in (0, 1):
            rig.core.socket.send(rig.core.client, operated(number))
        await behind
        await rig.lose_core()
        await rig.welcome()
        rig.add()  # the first that the next core hears: it is asked for nothing that is done

    with_rig(body)


def test_g4_another_core_begins_at_the_pace_that_the_last_one_had() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        asked = asyncio.ensure_future(rig.engine.operate(SlowDown(250), WAIT_S))
        await asyncio.sleep(0)
        assert rig.core.hear() == [Operate(0, SlowDown(250))]
        rig.core.tell(stats=STATS)  # from before it knew
        rig.core.socket.send(rig.core.client, operated(0))
        await asked
        await rig.lose_core()
        await rig.welcome()
        assert rig.core.hear() == [Operate(1, SlowDown(250))]
        rig.core.socket.send(rig.core.client, operated(1))
        both = core_stats(STATS, paused=True, plan_interval_ms=40)
        rig.core.tell(stats=both)  # as another front has asked for
        await until(lambda: (rig.engine.status().stats or STATS).plan_interval_ms == 40)
        await rig.lose_core()
        await rig.welcome()
        assert rig.core.hear(2) == [Operate(2, Pause("keep")), Operate(3, SlowDown(40))]
        ended = asyncio.ensure_future(rig.engine.operate(SlowDown(0), WAIT_S))
        await asyncio.sleep(0)
        assert rig.core.hear() == [Operate(4, SlowDown(0))]
        rig.core.socket.send(rig.core.client, operated(4))
        await ended
        await rig.lose_core()
        await rig.welcome()
        assert rig.core.hear() == [Operate(5, Pause("keep"))]

    with_rig(body)


def test_g4_another_core_is_told_of_open_sessions_before_it_hears_of_their_requests() -> None:
    """And of what was asked of them, after those."""

    async def body(rig: Rig) -> None:
        assert rig.engine.sessions is None
        await rig.start()
        a, b, c = OpenSession("a", 64, 30.0), OpenSession("b"), OpenSession("c")
        rig.core.socket.send(rig.core.client, SessionsChanged([a, b, c], []))
        rig.core.socket.send(rig.core.client, SessionsChanged([], ["c"]))
        rig.core.tell()
        await until(lambda: set(rig.engine.sessions or ()) == {"a", "b"})
        rig.add(session_id="a")
        asked = asyncio.ensure_future(rig.engine.operate(CloseSession("b"), WAIT_S))
        await asyncio.sleep(0)
        assert rig.core.hear() == [Operate(0, CloseSession("b"))]
        await rig.lose_core()
        assert set(rig.engine.sessions or ()) == {"a", "b"}
        await rig.welcome()
        first, second, request, last = rig.core.hear(4)
        assert (first, second, last) == (Operate(1, a), Operate(2, b), Operate(0, CloseSession("b")))
        assert isinstance(request, AddRequest)
        assert (request.request.sampling.session_id, request.output_ids) == ("a", [])
        rig.core.socket.send(rig.core.client, SessionsChanged([a], ["b"]))
        rig.core.socket.send(rig.core.client, operated(0))
        assert len(await asked) == 1
        assert set(rig.engine.sessions or ()) == {"a"}

    with_rig(body)


def test_g4_a_session_that_was_closed_when_the_core_went_is_there_to_be_closed_again() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        a, b = OpenSession("a"), OpenSession("b", 64, 30.0)
        rig.core.socket.send(rig.core.client, SessionsChanged([a, b], []))
        rig.core.tell()
        await until(lambda: set(rig.engine.sessions or ()) == {"a", "b"})
        asked = asyncio.ensure_future(rig.engine.operate(CloseSession("b"), WAIT_S))
        await asyncio.sleep(0)
        assert rig.core.hear() == [Operate(0, CloseSession("b"))]
        rig.core.socket.send(rig.core.client, SessionsChanged([], ["a", "b"]))
        await until(lambda: not rig.engine.sessions)
        await rig.lose_core()
        await rig.welcome()
        assert rig.core.hear(2) == [Operate(1, b), Operate(0, CloseSession("b"))], "nobody closes a"
        rig.core.socket.send(rig.core.client, operated(1))
        rig.core.socket.send(rig.core.client, operated(0))
        assert len(await asked) == 1
        await rig.lose_core()
        await rig.welcome()
        rig.add()  # nothing came before it: the session stays closed

    with_rig(body)


def test_g4_whose_opening_is_under_way_is_told_until_it_has_ended_whatever_became_of_who_asked() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        with pytest.raises(WaitTimeoutError):
            await rig.engine.operate(OpenSession("s"), 0.001)
        rig.core.hear()
        assert set(rig.engine.sessions_asked) == {"s"}
        await rig.lose_core()
        assert set(rig.engine.sessions_asked) == {"s"}
        await rig.welcome()
        assert rig.core.hear() == [Operate(0, OpenSession("s"))]
        rig.core.socket.send(rig.core.client, SessionsChanged([OpenSession("s")], []))
        rig.core.socket.send(rig.core.client, operated(0))
        await until(lambda: not rig.engine.sessions_asked)
        rig.core.tell()
        await until(lambda: rig.engine.sessions is not None)
        assert set(rig.engine.sessions or ()) == {"s"}

    with_rig(body)


def test_g4_another_core_hears_of_requests_before_it_is_to_abort_them() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        rig.add()
        asked = asyncio.ensure_future(rig.engine.operate(Pause("abort"), WAIT_S))
        await asyncio.sleep(0)
        rig.core.hear()
        await rig.lose_core()
        await rig.welcome()
        request, again = rig.core.hear(2)
        assert isinstance(request, AddRequest)
        assert again == Operate(0, Pause("abort"))
        rig.core.socket.send(rig.core.client, operated(0))
        await asked

    with_rig(body)


@pytest.mark.parametrize("operation", [Abort(), Pause("abort")], ids=["abort", "pause"])
def test_g4_what_ends_all_ends_nobody_newer_when_it_is_asked_again_of_another_core(
    operation: Operation,
) -> None:
    """The core had done it and had not said so; then two more requests came, and then it was lost, twice."""

    async def body(rig: Rig) -> None:
        await rig.start()
        old, ended = rig.add("old"), rig.add("ended")
        asked = asyncio.ensure_future(rig.engine.operate(operation, WAIT_S))
        await asyncio.sleep(0)
        assert rig.core.hear() == [Operate(0, operation)]
        rig.core.tell(update("ended", b"", "error", error=AbortedError("ended.").info()))
        with pytest.raises(AbortedError):
            await ended.next()
        rig.add("new")
        for _ in range(2):
            await rig.lose_core()
            await rig.welcome()
            first, again, last = rig.core.hear(3)
            assert isinstance(first, AddRequest)
            assert isinstance(last, AddRequest)
            assert (first.request.request_id, again) == ("old", Operate(0, operation))
            assert last.request.request_id == "new"
            rig.core.tell(update("new", b"x"))  # it gains something, and so is tried again
            rig.core.tell(update("old", b"x"))
            await old.next()
        rig.core.socket.send(rig.core.client, operated(0))
        assert len(await asked) == 1

    with_rig(body)


def test_g4_requests_that_come_after_all_were_given_up_are_newer_than_what_was_asked_before() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        streams = [rig.add("a"), rig.add("b")]
        asked = asyncio.ensure_future(rig.engine.operate(Abort(), WAIT_S))
        await asyncio.sleep(0)
        rig.core.hear()
        rig.clock.advance(INFO.silence_limit_s)
        rig.engine.check_core()
        for stream in streams:
            with pytest.raises(WaitTimeoutError):
                await stream.next()
        assert rig.core.hear() == [AbortRequests(["a", "b"])]
        rig.core.tell()
        await until(lambda: rig.engine.status().ready)
        rig.add("new")
        await rig.lose_core()
        await rig.welcome()
        again, request = rig.core.hear(2)
        assert again == Operate(0, Abort())
        assert isinstance(request, AddRequest)
        rig.core.socket.send(rig.core.client, operated(0))
        assert len(await asked) == 1

    with_rig(body)


VECTORS = msgspec.structs.replace(INFO, vector=VectorShape(size=2, cuts=(1,)), pooling="cls")


def test_g3_a_pooled_request_ends_with_one_delta_that_has_the_vector() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream = rig.engine.embed("v", [1, 2, 3], PoolingParams())
        raw = rig.engine.embed("raw", [4], PoolingParams(pooling="mean", normalize=False, dimensions=1))
        first, second = rig.core.hear(2)
        assert isinstance(first, AddRequest)
        assert isinstance(second, AddRequest)
        assert (first.request.pooling, second.request.pooling) == ("cls", "mean")
        vector = struct.pack("<2f", 3.0, 4.0)
        rig.core.tell(*(update(name, b"", "stop", vector=vector) for name in ("v", "raw")))
        delta = await stream.next()
        assert struct.unpack("<2f", delta.vector) == pytest.approx((0.6, 0.8))
        assert (delta.text, delta.token_ids, delta.finish_reason) == ("", [], "stop")
        assert (stream.prompt_tokens, stream.completion_tokens) == (3, 0)
        assert struct.unpack("<1f", (await raw.next()).vector) == (3.0,)

    with_rig(body, VECTORS)


def test_r4_another_core_is_asked_for_the_vector() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream = rig.engine.embed("v", [1, 2, 3], PoolingParams(pooling="mean"))
        (asked,) = rig.core.hear()
        await rig.lose_core()
        await rig.welcome()
        (again,) = rig.core.hear()
        assert isinstance(asked, AddRequest)
        assert isinstance(again, AddRequest)
        assert (again.request, again.output_ids) == (asked.request, [])
        rig.core.tell(update("v", b"", "stop", vector=struct.pack("<2f", 0.0, 0.0)))
        assert struct.unpack("<2f", (await stream.next()).vector) == (0.0, 0.0), "without a direction"

    with_rig(body, VECTORS)


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], PoolingParams(), "prompt"),
        ([256], PoolingParams(), "prompt"),
        ([1] * 65, PoolingParams(), "prompt"),
        ([1], PoolingParams(dimensions=3), "dimensions"),
    ],
)
def test_a_vector_that_cannot_be_is_refused_before_it_is_sent(
    prompt: list[int], params: PoolingParams, param: str
) -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        with pytest.raises(InvalidRequestError) as raised:
            rig.engine.embed("bad", prompt, params)
        assert raised.value.param == param
        rig.engine.embed("good", [1] * 64, PoolingParams(dimensions=1))
        (message,) = rig.core.hear()
        assert isinstance(message, AddRequest)
        assert message.request.request_id == "good"

    with_rig(body, VECTORS)


def test_whoever_knows_that_no_core_will_come_ends_the_streams() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        stream = rig.add()
        rig.engine.lose(UnavailableError("the supervisor of the engine has ended."))
        with pytest.raises(UnavailableError, match="the supervisor of the engine has ended"):
            await stream.next()

    with_rig(body)
