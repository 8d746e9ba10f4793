"""The end of an `AsyncLLM`, without an engine: who waits for it, and what becomes of it where nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.llm import async_llm
from penstock.llm.async_llm import AsyncLLM

WAIT_S = 30.0  # a bound for hangs, never waited for


class HandEngine:
    """In place of an engine that runs; it ends when the test lets it."""

    def __init__(self) -> None:
        self.ends, self.may_end = asyncio.Event(), asyncio.Event()
        self.num_ends = 0

    def require_alive(self) -> None: ...

    async def end(self) -> None:
        self.num_ends += 1
        self.ends.set()
        await self.may_end.wait()


def with_engine(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[AsyncLLM, HandEngine], Awaitable[None]]
) -> None:
    async def run() -> None:
        engine = HandEngine()

        async def start(config: object) -> HandEngine:
            return engine

        monkeypatch.setattr(async_llm, "_start", start)
        llm = AsyncLLM("demo")
        await llm.start()
        await asyncio.wait_for(body(llm, engine), WAIT_S)

    asyncio.run(run())


def test_all_who_close_it_wait_for_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: AsyncLLM, engine: HandEngine) -> None:
        closing = [asyncio.ensure_future(llm.close()) for _ in range(2)]
        await engine.ends.wait()
        assert not any(each.done() for each in closing)
        engine.may_end.set()
        await asyncio.gather(*closing)
        await llm.close()
        assert engine.num_ends == 1

    with_engine(monkeypatch, body)


@pytest.mark.parametrize("num_turns", range(6))
def test_it_ends_also_where_the_task_that_closes_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """However far the close has come: after each turn of the event loop."""

    async def body(llm: AsyncLLM, engine: HandEngine) -> None:
        closing = asyncio.ensure_future(llm.close())
        await asyncio.sleep(0)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        engine.may_end.set()
        await llm.close()
        assert engine.num_ends == 1

    with_engine(monkeypatch, body)
