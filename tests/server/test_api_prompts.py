"""Where prompts are tokenised, and the context that `/v1/models` tells of."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest

from fake_engine import ByteCodec, FakeEngine, fake_model
from live_server import LiveServer
from penstock.config.limits import Limits
from penstock.errors import InvalidRequestError
from penstock.server.http.text_workers import TextWorkers
from penstock.server.openai.prompts import PromptReader


class WatchedCodec(ByteCodec):
    def __init__(self) -> None:
        self.threads: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return super().encode(text)


class CountedWorkers(TextWorkers):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    async def run(self, size, work, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.sizes.append(size)
        return await super().run(size, work, *args, **kwargs)


@pytest.fixture
def workers() -> Iterator[CountedWorkers]:
    made = CountedWorkers()
    yield made
    made.close()


def _reader(codec: WatchedCodec, workers: TextWorkers) -> PromptReader:
    return PromptReader(fake_model(codec=codec), Limits(), 16 * 4096, workers)


def test_many_short_prompts_are_one_long_piece_of_work_off_the_loop(workers: CountedWorkers) -> None:
    codec = WatchedCodec()
    prompts = ["x" * 1000] * 99 + [[1, 2, 3]]
    ids = asyncio.run(_reader(codec, workers).completions(prompts))
    assert ids == [codec.encode("x" * 1000)] * 99 + [[1, 2, 3]]
    assert workers.sizes == [99_003]
    assert all(name.startswith("text") for name in codec.threads[:99])


def test_few_short_prompts_are_done_in_place(workers: CountedWorkers) -> None:
    codec = WatchedCodec()
    asyncio.run(_reader(codec, workers).completions(["abc", "de"]))
    assert codec.threads == [threading.current_thread().name] * 2


def test_nothing_is_tokenised_when_one_prompt_is_too_long(workers: CountedWorkers) -> None:
    codec = WatchedCodec()
    with pytest.raises(InvalidRequestError) as raised:
        asyncio.run(_reader(codec, workers).completions(["abc", "x" * (16 * 4096 + 1)]))
    assert raised.value.code == "context_length_exceeded"
    assert codec.threads == []


def test_models_tell_the_context_that_is_served_now() -> None:
    engine = FakeEngine(max_model_len=5000)
    with LiveServer(engine) as live:
        for served, shown in ((5000, 4096), (512, 512)):
            engine.max_model_len = served
            (card,) = json.loads(live.request("GET", "/v1/models")[1])["data"]
            assert card["max_model_len"] == shown
            assert json.loads(live.request("GET", "/v1/models/fake")[1]) == card
