"""Who leaves the outputs of an `AsyncLLM` early: when the request is aborted, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from penstock.engine.client.outputs import OutputAssembler, RequestOutput
from penstock.engine.client.siblings import with_siblings
from penstock.engine.client.streams import OpenStreams, RequestStream
from penstock.llm import async_llm
from penstock.llm.async_llm import AsyncLLM
from penstock.llm.prompt_preparer import PreparedPrompt
from penstock.request import RequestUpdate, SamplingParams
from penstock.tokenizer.detokenizer import NoText


class OpenEngine:
    """An engine that runs: each request gets one token, and then goes on until it is aborted."""

    def __init__(self) -> None:
        self.engine = self.text = self
        self.tokenizer = None
        self.aborted: list[str] = []
        self._streams = OpenStreams(self.aborted.append)

    def require_alive(self) -> None: ...

    def prompt(self, *_of: Any) -> PreparedPrompt:
        return PreparedPrompt(text="x", token_ids=[1])

    conversation = prompt

    def sampling_for(self, _prompt: PreparedPrompt, sampling: SamplingParams | None) -> SamplingParams:
        return sampling or SamplingParams()

    async def prove(self, _sampling: SamplingParams) -> None: ...

    def add_all(self, name: str, token_ids: list[int], sampling: SamplingParams) -> list[RequestStream]:
        request = with_siblings(name, token_ids, sampling)
        streams = self._streams.open(request, lambda one: OutputAssembler(one.sampling, NoText()))
        self._streams.deliver([RequestUpdate(request_id=name, token_ids=[5])])
        return streams

    async def end(self) -> None: ...


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate("x", request_id="mine"),
        lambda llm: llm.chat([{"role": "user", "content": "x"}], request_id="mine"),
    ],
    ids=["generate", "chat"],
)
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_whose_outputs_are_closed_is_aborted_at_once(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[AsyncLLM], AsyncGenerator[RequestOutput, None]], n: int
) -> None:
    """Before the caller goes on: the id is free again then, for one."""

    async def run() -> None:
        engine = OpenEngine()

        async def start(config: object) -> OpenEngine:
            return engine

        monkeypatch.setattr(async_llm, "_start", start)
        monkeypatch.setattr(OpenEngine, "sampling_for", lambda *_of: SamplingParams(n=n))
        llm = AsyncLLM("demo")
        async with aclosing(ask(llm)) as outputs:
            await anext(outputs)
            assert engine.aborted == []
        assert engine.aborted == ["mine", "mine/1", "mine/2"][:n]
        await llm.close()

    asyncio.run(run())
