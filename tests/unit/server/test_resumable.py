"""Streams that outlive their connection: what is kept, for how long, for whom, and how readers follow."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from fakes import FakeClock
from penstock.errors import NotFoundError
from penstock.server.answers import resumable
from penstock.server.answers.outlet import DIRECT
from penstock.server.answers.resumable import (
    KEPT_S,
    PATIENCE_S,
    RESUMABLE_HEADER,
    STALL_S,
    EventsGoneError,
    KeptStream,
    ResumableStreams,
    StreamName,
)
from penstock.server.http.request_record import open_record

NAME = StreamName(b"key", "request")
START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]}


def body(*events: str, more: bool = True) -> Message:
    text = "".join(f"{event}\n\n" for event in events)
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


class Client:
    """A connection: what it has got, and when it leaves."""

    def __init__(self) -> None:
        self.head: Message | None = None
        self.got = b""
        self.is_complete = False
        self.has_left = asyncio.Event()
        self.may_take = asyncio.Event()
        self.may_take.set()

    async def send(self, message: Message) -> None:
        await self.may_take.wait()
        if message["type"] == "http.response.start":
            self.head = message
        else:
            self.got += message["body"]
            self.is_complete = not message["more_body"]

    async def receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    @property
    def events(self) -> list[str]:
        return [block for block in self.got.decode().split("\n\n") if block]


async def turn(times: int = 12) -> None:
    """Let all tasks go as far as they can."""
    for _ in range(times):
        await asyncio.sleep(0)


class Bed:
    """Streams, one clock, and the answer that a test writes by hand."""

    def __init__(self, max_streams: int = 4) -> None:
        self.clock = FakeClock()
        self._alarms: list[tuple[float, asyncio.Event]] = []
        self.streams = ResumableStreams(max_streams, self.clock, self.sleep)

    async def sleep(self, seconds: float) -> None:
        alarm = asyncio.Event()
        self._alarms.append((self.clock.now + seconds, alarm))
        await alarm.wait()

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.ring()
        await turn()

    def ring(self) -> None:
        """Wake all who have slept long enough."""
        for at, alarm in self._alarms:
            if at <= self.clock.now:
                alarm.set()

    def request(self, request_id: str = "request", key: str = "key", asks: bool = True) -> Request:
        headers = [(b"x-request-id", request_id.encode()), (b"authorization", f"Bearer {key}".encode())]
        if asks:
            headers.append((RESUMABLE_HEADER.encode(), b"true"))
        scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        open_record(scope, 0.0)
        return Request(scope)

    def begin(self, client: Client, request: Request | None = None) -> Answer:
        return Answer(self, client, request or self.request())


class Answer:
    """A response that is written step by step."""

    def __init__(self, bed: Bed, client: Client, request: Request) -> None:
        self.was_left = False
        self._end: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._send: Send
        outlet = bed.streams.outlet(request)
        self.task = asyncio.create_task(outlet.carry(self._respond, {}, client.receive, client.send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait({leaving, self._end}, return_when=asyncio.FIRST_COMPLETED)
        self.was_left = leaving.done()
        leaving.cancel()
        if self._end.done() and self._end.result() is not None:
            raise self._end.result()  # type: ignore[misc]

    async def write(self, *messages: Message) -> None:
        await turn()
        for message in messages:
            await self._send(message)
        await turn()

    async def end(self, error: Exception | None = None) -> None:
        await turn()
        self._end.set_result(error)
        await turn()


async def turn_until_done(task: asyncio.Task[Any], times: int = 200) -> None:
    for _ in range(times):
        if task.done():
            return
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def test_only_requests_that_ask_are_kept_and_none_where_it_is_off() -> None:
    bed = Bed()
    assert bed.streams.outlet(bed.request(asks=False)) is DIRECT
    assert bed.streams.outlet(bed.request()) is not DIRECT
    assert Bed(max_streams=0).streams.outlet(bed.request()) is DIRECT


def test_events_are_numbered_and_a_client_comes_back_behind_its_last() -> None:
    async def work() -> None:
        bed, first = Bed(), Client()
        answer = bed.begin(first)
        await answer.write(START, body("data: a", "data: b"), body("data: c"))
        assert first.events == ["id: 1\ndata: a", "id: 2\ndata: b", "id: 3\ndata: c"]
        assert first.head is not None
        assert (b"x-own", b"1") in first.head["headers"]
        assert (RESUMABLE_HEADER.encode(), b"true") in first.head["headers"]
        first.has_left.set()
        await answer.write(body("data: d"))
        assert len(first.events) == 3
        second, stream = Client(), bed.streams.find(bed.streams.name_of(bed.request(), "request"))
        stream.require(2)
        reading = asyncio.create_task(stream.read(2, second.receive, second.send))
        await answer.write(body("data: e", more=False))
        await answer.end()
        await asyncio.gather(reading, answer.task)
        assert second.events == ["id: 3\ndata: c", "id: 4\ndata: d", "id: 5\ndata: e"]
        assert second.is_complete
        assert second.head is not None
        assert (b"content-type", b"text/event-stream; charset=utf-8") in second.head["headers"]
        assert not answer.was_left

    run(work())


def test_comments_have_no_number_and_go_to_those_who_read() -> None:
    async def work() -> None:
        bed, client = Bed(), Client()
        answer = bed.begin(client)
        await answer.write(START, body(": ping"))
        await answer.write(body("data: a"))
        assert client.events == [": ping", "id: 1\ndata: a"]
        await answer.end()
        await answer.task

    run(work())


def test_an_answer_that_nobody_reads_is_given_up_after_a_while() -> None:
    async def work() -> None:
        bed, client = Bed(), Client()
        answer = bed.begin(client)
        await answer.write(START, body("data: a"))
        await bed.advance(10 * PATIENCE_S)
        assert not answer.task.done(), "its client is there"
        client.has_left.set()
        await turn()
        await bed.advance(PATIENCE_S - 1)
        assert not answer.task.done()
        await bed.advance(1)
        await answer.task
        assert answer.was_left

    run(work())


def test_who_comes_back_in_time_keeps_it_alive() -> None:
    async def work() -> None:
        bed, client, other = Bed(), Client(), Client()
        answer = bed.begin(client)
        await answer.write(START, body("data: a"))
        client.has_left.set()
        await turn()
        await bed.advance(PATIENCE_S - 1)
        stream = bed.streams.find(bed.streams.name_of(bed.request(), "request"))
        reading = asyncio.create_task(stream.read(1, other.receive, other.send))
        await turn()
        await bed.advance(10 * PATIENCE_S)
        assert not answer.task.done()
        other.has_left.set()
        await reading
        await turn()
        await bed.advance(PATIENCE_S)
        await answer.task
        assert answer.was_left

    run(work())


def test_a_stream_that_is_stopped_ends_at_once() -> None:
    async def work() -> None:
        bed, client = Bed(), Client()
        answer = bed.begin(client)
        await answer.write(START, body("data: a"))
        bed.streams.find(bed.streams.name_of(bed.request(), "request")).stop()
        await answer.task
        assert answer.was_left

    run(work())


def test_another_key_or_id_finds_nothing_and_age_ends_it() -> None:
    async def work() -> None:
        bed, client = Bed(), Client()
        answer = bed.begin(client)
        await answer.write(START, body("data: a", more=False))
        await answer.end()
        await answer.task
        own = bed.streams.name_of(bed.request(), "request")
        assert bed.streams.find(own).ended_at == bed.clock.now
        for other in (bed.streams.name_of(bed.request(key="other"), "request"), own._replace(request_id="s")):
            with pytest.raises(NotFoundError):
                bed.streams.find(other)
        await bed.advance(KEPT_S)
        bed.streams.find(own)
        await bed.advance(1)
        with pytest.raises(NotFoundError):
            bed.streams.find(own)
        assert len(bed.streams) == 0

    run(work())


def test_what_fails_before_its_first_byte_raises_and_is_not_kept() -> None:
    async def work() -> None:
        bed, client = Bed(), Client()
        answer = bed.begin(client)
        await answer.end(RuntimeError("no room"))
        with pytest.raises(RuntimeError, match="no room"):
            await answer.task
        assert client.head is None
        assert len(bed.streams) == 0

    run(work())


def test_as_many_are_kept_as_may_be_and_the_oldest_that_has_ended_goes_first() -> None:
    async def work() -> None:
        bed = Bed(max_streams=2)
        streams = {name: bed.streams.open(StreamName(b"", name)) for name in ("a", "b", "c")}
        assert streams["a"] is not None
        assert streams["b"] is not None
        assert streams["c"] is None, "both run"
        for name in ("b", "a"):
            stream = streams[name]
            assert stream is not None
            await stream.send(START)
            bed.streams.end(StreamName(b"", name), stream)
            bed.clock.advance(1)
        assert bed.streams.open(StreamName(b"", "c")) is not None
        bed.streams.find(StreamName(b"", "a"))
        with pytest.raises(NotFoundError):
            bed.streams.find(StreamName(b"", "b"))

    run(work())


def test_a_second_request_of_the_same_id_does_not_get_at_the_first() -> None:
    async def work() -> None:
        bed, first, second = Bed(), Client(), Client()
        one = bed.begin(first)
        await one.write(START, body("data: a"))
        other = bed.begin(second)
        await other.write(START, body("data: b"))
        assert second.events == ["data: b"], "it goes straight to its connection"
        assert first.events == ["id: 1\ndata: a"]
        for answer in (one, other):
            await answer.end()
            await answer.task

    run(work())


def test_the_oldest_events_go_when_there_are_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_STREAM_BYTES", 60)

    async def work() -> None:
        stream = KeptStream(FakeClock())
        await stream.send(START)
        for number in range(1, 11):
            await stream.send(body(f"data: {number:04}"))
        stream.require(7)
        stream.require(10)
        with pytest.raises(EventsGoneError, match="3 to 7"):
            stream.require(2)
        with pytest.raises(NotFoundError):
            stream.require(11)
        stream.end()
        client = Client()
        await stream.read(7, client.receive, client.send)
        assert client.events == ["id: 8\ndata: 0008", "id: 9\ndata: 0009", "id: 10\ndata: 0010"]

    run(work())


def test_an_answer_waits_for_a_reader_that_is_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_LAG", 3)

    async def work() -> None:
        bed, client = Bed(), Client()
        answer = bed.begin(client)
        await answer.write(START, body("data: 0"))
        client.may_take.clear()
        await answer.write(body("data: 1"))  # the reader holds this one
        writing = asyncio.create_task(answer.write(*(body(f"data: {number}") for number in range(2, 9))))
        await turn(60)
        assert not writing.done()
        client.may_take.set()
        await writing
        assert [event.rpartition(" ")[2] for event in client.events] == [str(number) for number in range(9)]
        await answer.end()
        await answer.task

    run(work())


def test_no_reader_misses_an_event_that_is_too_long_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last event of a long response has all of it, and may alone have more bytes than are kept."""
    monkeypatch.setattr(resumable, "MAX_STREAM_BYTES", 60)

    async def work() -> None:
        bed, client = Bed(), Client()
        answer = bed.begin(client)
        await answer.write(START, body("data: a"), body("data: " + 100 * "b"), body("data: c", more=False))
        assert client.events == ["id: 1\ndata: a", "id: 2\ndata: " + 100 * "b", "id: 3\ndata: c"]
        stream = bed.streams.find(bed.streams.name_of(bed.request(), "request"))
        stream.require(2)
        with pytest.raises(EventsGoneError, match="2 to 2"):
            stream.require(1)
        await answer.end()
        await answer.task

    run(work())


def test_an_answer_waits_until_a_slow_reader_has_what_is_no_longer_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resumable, "MAX_STREAM_BYTES", 60)
    texts = [f"{number:020}" for number in range(12)]  # each event has 34 or 35 bytes

    async def work() -> None:
        bed, client = Bed(), Client()
        answer = bed.begin(client)
        await answer.write(START, body(f"data: {texts[0]}"))
        client.may_take.clear()
        writing = asyncio.create_task(answer.write(*(body(f"data: {text}") for text in texts[1:])))
        await turn(60)
        assert not writing.done()
        client.may_take.set()
        await turn_until_done(writing)
        assert [event.rpartition(" ")[2] for event in client.events] == texts
        await answer.end()
        await answer.task

    run(work())


@pytest.mark.parametrize("num_turns", range(8))
def test_an_answer_that_is_stopped_ends_at_whatever_moment_it_is(
    monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """It went on to its end if it was stopped while it ended its wait for a slow reader."""
    monkeypatch.setattr(resumable, "MAX_STREAM_BYTES", 60)

    async def work() -> None:
        bed = Bed()
        two = Two(bed)
        await two.begin("data: 0")
        two.first.may_take.clear()
        writing = two.write(range(1, 12))
        await turn(60)
        bed.clock.advance(STALL_S)
        bed.ring()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await two.end()

    run(work())


class Two:
    """An answer that two clients read; the second one has come back for it."""

    def __init__(self, bed: Bed) -> None:
        self.first, self.second = Client(), Client()
        self.answer = bed.begin(self.first)
        self._bed = bed
        self.reading: asyncio.Task[None]

    async def begin(self, *events: str) -> None:
        await self.answer.write(START, body(*events))
        stream = self._bed.streams.find(self._bed.streams.name_of(self._bed.request(), "request"))
        self.reading = asyncio.create_task(stream.read(0, self.second.receive, self.second.send))
        await turn()

    def write(self, numbers: range) -> asyncio.Task[None]:
        return asyncio.create_task(self.answer.write(*(body(f"data: {number:020}") for number in numbers)))

    async def end(self) -> None:
        await self.answer.end()
        for client in (self.first, self.second):
            client.may_take.set()
        await turn(60)
        await asyncio.gather(self.answer.task, self.reading)


def numbers_of(client: Client) -> list[int]:
    return [int(event.rpartition(" ")[2]) for event in client.events if event.startswith("id: ")]


def test_a_client_that_takes_nothing_does_not_hold_up_one_that_has_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when its network is gone: the connection of before takes nothing, and nobody has noticed its end."""
    monkeypatch.setattr(resumable, "MAX_LAG", 3)

    async def work() -> None:
        two = Two(Bed())
        await two.begin("data: 0")
        two.first.may_take.clear()
        writing = two.write(range(1, 40))
        await turn_until_done(writing)
        assert writing.done()
        assert numbers_of(two.second) == list(range(40))
        await two.end()
        assert numbers_of(two.first) == list(range(40)), "what is kept, it gets"

    run(work())


def test_an_answer_goes_on_without_a_stalled_reader_when_another_has_what_is_no_longer_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resumable, "MAX_STREAM_BYTES", 60)  # each event has 34 or 35 bytes

    async def work() -> None:
        bed = Bed()
        two = Two(bed)
        await two.begin("data: 0")
        two.first.may_take.clear()
        writing = two.write(range(1, 12))
        await turn(60)
        await bed.advance(STALL_S - 1)
        assert not writing.done()
        assert numbers_of(two.second) == list(range(5)), "the first one may go on yet"
        await bed.advance(1)
        await turn_until_done(writing)
        assert writing.done()
        assert numbers_of(two.second) == list(range(12))
        await two.end()
        assert numbers_of(two.first) == [0, 1, 2], "the last two were on their way"
        assert two.first.is_complete
        (error,) = two.first.events[3:]
        assert error.startswith('event: error\ndata: {"error":{"message":"This client read too slowly, ')
        assert error.endswith('"type":"invalid_request_error","param":null,"code":"events_gone"}}')
        assert two.second.is_complete
        assert len(two.second.events) == 12

    run(work())


def test_two_readers_of_whom_neither_stalls_both_get_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_STREAM_BYTES", 60)

    async def work() -> None:
        bed = Bed()
        two = Two(bed)
        await two.begin("data: 0")
        await bed.advance(10 * STALL_S)  # while nothing comes, nobody stalls
        for number in range(1, 8):
            two.first.may_take.clear()
            writing = two.write(range(4 * number - 3, 4 * number + 1))
            await turn(60)
            assert not writing.done()
            await bed.advance(STALL_S - 0.5)
            two.first.may_take.set()
            await turn_until_done(writing)
            assert writing.done()
        await two.end()
        for client in (two.first, two.second):
            assert numbers_of(client) == list(range(29))

    run(work())


def test_a_reader_that_was_left_behind_does_not_keep_an_answer_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_STREAM_BYTES", 60)

    async def work() -> None:
        bed = Bed()
        two = Two(bed)
        await two.begin("data: 0")
        two.first.may_take.clear()
        writing = two.write(range(1, 12))
        await turn(60)
        await bed.advance(STALL_S)
        await turn_until_done(writing)
        two.second.has_left.set()
        await two.reading
        await turn()
        await bed.advance(PATIENCE_S - 1)
        two.first.has_left.set()  # its connection is given up
        await turn()
        assert not two.answer.task.done()
        await bed.advance(1)
        await two.answer.task
        assert two.answer.was_left

    run(work())
