"""A stream outside of an engine: what its reader waits for, and what it gets."""

from __future__ import annotations

import asyncio

import pytest

from core_client import ByteTokenizer, update
from penstock.engine.client.outputs import MAX_NUMBERS_AT_ONCE, TextDelta, output_assembler
from penstock.engine.client.streams import OpenStreams, RequestStream
from penstock.errors import AbortedError, ErrorInfo, NumericalError
from penstock.request import Follower, GenerationRequest, RequestUpdate, SamplingParams, TokenLogprobs

FAILED = ErrorInfo(kind="NumericalError", message="NaN in the logits", code="numerical")


class Rig:
    """Open streams, and the ids that were aborted in the core."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.open_streams = OpenStreams(self.aborted.append)

    def open(self, name: str = "r", *followers: str, **sampling: object) -> list[RequestStream]:
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(**sampling),
            followers=[Follower(follower, 0) for follower in followers],
        )
        return self.open_streams.open(
            request, lambda one: output_assembler(ByteTokenizer(), [1, 2, 3], one.sampling)
        )

    def deliver(self, *updates: RequestUpdate) -> list[str]:
        """Ids of the streams that have ended."""
        return [stream.request_id for stream in self.open_streams.deliver(updates)]


def test_whoever_waits_for_the_whole_is_woken_once_and_gets_all_of_it() -> None:
    async def body() -> None:
        rig = Rig()
        (stream,) = rig.open()
        whole = asyncio.ensure_future(stream.whole())
        for text in (b"x", b"y"):
            assert rig.deliver(update("r", text)) == []
            await asyncio.sleep(0)
            assert not whole.done()
        assert rig.deliver(update("r", b"z", "length")) == ["r"]
        delta = await whole
        assert (delta.text, delta.token_ids, delta.finish_reason) == ("xyz", list(b"xyz"), "length")
        assert len(rig.open_streams) == 0

    asyncio.run(body())


def test_the_whole_of_a_request_that_failed_is_its_error() -> None:
    async def body() -> None:
        rig = Rig()
        (stream,) = rig.open()
        whole = asyncio.ensure_future(stream.whole())
        await asyncio.sleep(0)
        rig.deliver(update("r", b"x"))
        assert rig.deliver(update("r", b"", "error", error=FAILED)) == ["r"]
        with pytest.raises(NumericalError, match="NaN"):
            await whole

    asyncio.run(body())


def test_r13_all_that_are_cancelled_are_aborted_once_and_have_no_whole() -> None:
    rig = Rig()
    first, second, other = (*rig.open("r", "r/1"), *rig.open("s"))
    rig.deliver(update("r", b"x"), update("s", b"y", "length"))
    rig.open_streams.cancel_all()
    rig.open_streams.cancel_all()
    other.cancel()
    assert rig.aborted == ["r", "r/1"]
    for stream in (first, second):
        with pytest.raises(AbortedError):
            stream.result()
    assert other.result().text == "y"


def test_d11_a_stop_string_aborts_in_the_core_what_it_ends() -> None:
    rig = Rig()
    (stream,) = rig.open(stop=["END"])
    assert rig.deliver(update("r", b"aEND..")) == ["r"]
    assert rig.aborted == ["r"]
    assert rig.deliver(update("r", b"late", "length")) == []
    assert stream.result().text == "a"


def test_the_prompt_counts_with_the_first_of_several_sequences() -> None:
    rig = Rig()
    first, second = rig.open("r", "r/1")
    rig.deliver(
        update("r", b"x", queue_seconds=0.5, num_cached_tokens=2),
        update("r/1", b"x", queue_seconds=0.5, num_cached_tokens=3),
    )
    assert [(one.prompt_tokens, one.cached_tokens) for one in (first, second)] == [(3, 2), (0, 0)]
    request = GenerationRequest(
        request_id="r/1", prompt_token_ids=[1], followers=[Follower("s", 0), Follower("r", 0)]
    )
    assert rig.open_streams.ids_in_use(request) == {"r", "r/1"}


def scores(count: int, num_top: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(place), 1, [7] * num_top, [-1.0] * num_top) for place in range(count)]


async def read_to_the_end(stream: RequestStream) -> tuple[list[TextDelta], list[int]]:
    """Its deltas, and how often the event loop had turned when each was read."""
    turns, deltas, seen = 0, [], []

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.ensure_future(turn())
    while not deltas or deltas[-1].finish_reason is None:
        deltas.append(await stream.next())
        seen.append(turns)
    others.cancel()
    return deltas, seen


def test_a_late_reader_gets_much_in_pieces_and_others_have_their_turn_between() -> None:
    """Issue 25, point 18. One event of 4,000 tokens with 20 log-probabilities each took the loop 0.13 s."""

    async def body() -> None:
        rig = Rig()
        (stream,) = rig.open(logprobs=20)
        for place in range(400):
            rig.deliver(update("r", b"x", "length" if place == 399 else None, logprobs=scores(1, 20)))
        deltas, seen = await read_to_the_end(stream)
        most = MAX_NUMBERS_AT_ONCE // 22  # an id, its value and 20 others
        assert [len(delta.token_ids) for delta in deltas] == [most, most, 400 - 2 * most]
        assert [len(delta.logprobs or []) for delta in deltas] == [most, most, 400 - 2 * most]
        assert "".join(delta.text for delta in deltas) == "x" * 400
        assert len(set(seen)) == len(seen), "the loop turns between any two"

    asyncio.run(body())


def test_the_scores_of_a_prompt_that_come_at_once_are_read_in_pieces() -> None:
    """Issue 25, point 18."""

    async def body() -> None:
        rig = Rig()
        (stream,) = rig.open(prompt_logprobs=20)
        given = scores(1000, 20)
        rig.deliver(update("r", b"", prompt_logprobs=given), update("r", b"x", "length"))
        deltas, seen = await read_to_the_end(stream)
        assert [entry for delta in deltas for entry in delta.prompt_logprobs] == given
        assert max(len(delta.prompt_logprobs) for delta in deltas) == MAX_NUMBERS_AT_ONCE // 21
        assert (deltas[-1].text, deltas[-1].finish_reason) == ("x", "length")
        assert len(set(seen)) == len(seen)

    asyncio.run(body())


def test_plain_text_that_came_meanwhile_is_one_delta_and_so_is_the_whole() -> None:
    """Issue 25, point 18."""

    async def body() -> None:
        rig = Rig()
        late, whole = (*rig.open("r"), *rig.open("s", logprobs=20))
        for place in range(1000):
            reason = "length" if place == 999 else None
            rig.deliver(update("r", b"x", reason), update("s", b"x", reason, logprobs=scores(1, 20)))
        deltas, _ = await read_to_the_end(late)
        assert [len(delta.text) for delta in deltas] == [1000]
        assert len((await whole.whole()).logprobs or []) == 1000

    asyncio.run(body())
