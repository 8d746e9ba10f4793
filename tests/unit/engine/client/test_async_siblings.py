"""Several sequences of one prompt through the asynchronous front: one message, each alone to another core."""

from __future__ import annotations

import msgspec
import pytest

from core_client import INFO, Rig, read_all, until, update, with_rig
from penstock.engine.client.siblings import sibling_seed
from penstock.engine.core.core_clients import refusals
from penstock.engine.ipc import AbortRequests, AddRequest
from penstock.errors import OverloadedError
from penstock.request import SamplingParams
from penstock.scheduler.admission import derive_seed

ROOM = msgspec.structs.replace(INFO, max_num_seqs=4, max_waiting_requests=0)
THREE = SamplingParams(n=3, seed=5, max_tokens=20)


def test_all_go_to_the_core_in_one_message_and_the_first_counts_the_prompt() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        streams = rig.engine.add_all("r", [1, 2, 3], THREE)
        (message,) = rig.core.hear()
        assert isinstance(message, AddRequest)
        asked = message.request.alone()
        assert [one.request_id for one in asked] == [stream.request_id for stream in streams]
        assert [one.sampling.seed for one in asked] == [sibling_seed(5, index) for index in range(3)]
        assert [one.follows for one in asked] == ["", "r", "r"]
        assert rig.engine.tokens_ahead < 3 + 3 * 17, "the prompt is ahead of a newcomer once"
        for one in asked:
            rig.core.tell(update(one.request_id, b"x", "length", queue_seconds=0.5, num_cached_tokens=2))
        for stream in streams:
            assert await read_all(stream) == ("x", "length")
        assert [stream.prompt_tokens for stream in streams] == [3, 0, 0]
        assert [stream.cached_tokens for stream in streams] == [2, 0, 0]
        assert [stream.queue_seconds for stream in streams] == [0.5] * 3

    with_rig(body, ROOM)


def test_r4_another_core_is_asked_for_each_that_lives_and_told_whom_it_follows() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        streams = rig.engine.add_all("r", [1, 2, 3], THREE)
        rig.core.hear()
        rig.core.tell(update("r", b"ab"), update("r/1", b"c", "length"))
        assert (await streams[0].next()).text == "ab"
        assert await read_all(streams[1]) == ("c", "length")
        await rig.lose_core()
        await rig.welcome()
        again = rig.core.hear(2)
        assert [(m.request.request_id, m.request.follows, m.output_ids) for m in again] == [
            ("r", "", list(b"ab")),
            ("r/2", "r", []),
        ]
        assert again[1].request.sampling.seed == sibling_seed(5, 2)
        assert not again[0].request.followers

    with_rig(body, ROOM)


def test_r4_sequences_without_a_seed_keep_the_one_that_the_front_has_drawn() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        rig.add("a")
        rig.engine.add_all("r", [1, 2, 3], SamplingParams(n=2))
        (message,) = rig.core.hear()
        assert isinstance(message, AddRequest)
        drawn = [derive_seed(0, place) for place in range(4)]
        assert [one.sampling.seed for one in message.request.alone()] == drawn[1:3]
        await rig.lose_core()
        await rig.welcome()
        assert [m.request.sampling.seed for m in rig.core.hear(3)] == drawn[:3]
        rig.engine.add("b", [1], SamplingParams())
        assert [m.request.sampling.seed for m in rig.core.hear()] == drawn[3:]

    with_rig(body, ROOM)


def test_r8_the_front_takes_all_or_none() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        rig.add("a")
        rig.add("b")
        with pytest.raises(OverloadedError):
            rig.engine.add_all("r", [1, 2, 3], THREE)
        assert not rig.core.overhear()
        rig.engine.add_all("s", [1], SamplingParams(n=2))

    with_rig(body, ROOM)


def test_r8_what_the_core_refuses_ends_each() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        streams = rig.engine.add_all("r", [1, 2, 3], THREE)
        (message,) = rig.core.hear()
        rig.core.tell(*refusals(message.request, OverloadedError("full")))
        for stream in streams:
            with pytest.raises(OverloadedError, match="full"):
                await stream.next()
        assert rig.engine.tokens_ahead == 0

    with_rig(body, ROOM)


def test_r13_one_that_is_cancelled_leaves_the_others() -> None:
    async def body(rig: Rig) -> None:
        await rig.start()
        streams = rig.engine.add_all("r", [1, 2, 3], THREE)
        rig.core.hear()
        streams[0].cancel()
        assert rig.core.hear() == [AbortRequests(["r"])]
        rig.core.tell(update("r/1", b"c", "length"))
        assert await read_all(streams[1]) == ("c", "length")
        await until(lambda: rig.engine.tokens_ahead == 16)

    with_rig(body, ROOM)
