"""`AsyncLLM`: an engine for a program with an event loop; outputs come while they are generated.

    async with AsyncLLM("path/to/model", pipeline_parallel_size=2) as llm:
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

It starts the same supervisor as `LLM`. Its client of the core is `engine.client.async_engine`, as
for `LLM` and the server. Prompts become ids as for `LLM` (`llm.prompt_preparer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any

from penstock.config.engine import EngineConfig, Pooling
from penstock.config.executor_backend import require_backend
from penstock.config.limits import GrammarLimits
from penstock.engine.client.core_health import EngineStatus
from penstock.engine.client.outputs import (
    RequestOutput,
    TextDelta,
    merge_deltas,
    request_output,
    total_drafts,
)
from penstock.engine.client.streams import RequestStream
from penstock.engine.client.vectors import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    embedding_output,
    pooling_output,
)
from penstock.engine.supervisor.reports import LogReporter
from penstock.errors import UnavailableError, UsageError
from penstock.grammar.proving import GrammarProver
from penstock.llm.arguments import engine_config, refuse_unknown, settled
from penstock.llm.llm import LLM
from penstock.llm.prompt_preparer import (
    Conversation,
    PreparedPrompt,
    Prompt,
    PromptPreparer,
    chat_options,
    normalised_pooling,
    raw_pooling,
)
from penstock.llm.supervised_engine import SupervisedEngine, engine_info
from penstock.llm.supervisor_process import SupervisorProcess
from penstock.request import PoolingParams, SamplingParams
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.tokenizer.tokenizer import Tokenizer


class AsyncLLM:
    """A model, ready to generate. An object belongs to one event loop.

    The engine starts at the first use, at `start`, or at the entry of `async with`. Its processes end at
    `close`, at the exit of `async with`, or with this process.

    Args:
        model: as for `LLM`.
        settings: arguments of `LLM`, with the same defaults. The executor backend cannot be `inprocess`, nor
            a function that makes an `Executor`.

    Raises:
        UsageError: an argument is unknown or out of range.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._config = _config_of(model, settings)
        self._starting: asyncio.Task[_Running] | None = None
        self._numbers = itertools.count()
        self._streams: dict[str, list[RequestStream]] = {}  # by request id: a stream for each sequence
        self._ending: asyncio.Task[None] | None = None  # from the first `close` on

    async def start(self) -> None:
        """Return when the engine is ready.

        Raises:
            ModelError, NotEnoughMemoryError, PeerError: the model cannot be served; says why.
        """
        await self._running()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt; each output has all that was generated so far.

        An output has all `n` sequences of the request. The last output is `finished`. If the caller leaves
        the loop over the outputs early, the request is aborted when Python finalises the generator; with
        `contextlib.aclosing` it is aborted at once. It is also aborted if the caller's task is cancelled.

        Args:
            prompt: text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`.
            sampling_params: None takes the model's defaults.
            request_id: name of the request, by which `abort` finds it; no other live request may have it.
                None makes a name.

        Raises:
            InvalidRequestError: the prompt or a sampling value is out of bounds, or the id is in use.
            AbortedError: `abort` was called for this request.
            PenstockError: the request or the engine failed.
        """
        running = await self._running()
        prepared = await _off_the_loop(prompt, running.text.prompt, prompt)
        async with self._outputs(running, prepared, sampling_params, request_id) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, which the model's chat template makes a prompt of.

        The options of the template are those of `LLM.chat`; all else is as in `generate`.
        """
        options = chat_options(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        running = await self._running()
        prepared = await _off_the_loop(messages, running.text.conversation, messages, options)
        async with self._outputs(running, prepared, sampling_params, request_id) as outputs:
            async for output in outputs:
                yield output

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
    ) -> EmbeddingRequestOutput:
        """Return the embedding of one prompt, as `LLM.embed` does. Cancelling the task aborts the request."""
        name, ids, delta = await self._pooled(prompt, pooling_params or PoolingParams(), request_id)
        return embedding_output(name, ids, delta.vector)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling: Pooling | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Return the pooled hidden states of one prompt, as `LLM.encode` does."""
        params = raw_pooling(pooling_params, pooling)
        name, ids, delta = await self._pooled(prompt, params, request_id)
        return pooling_output(name, ids, delta.vector)

    def abort(self, request_id: str) -> None:
        """End a request; the caller that reads its outputs gets an `AbortedError`. Ignore an unknown id."""
        for stream in self._streams.get(request_id, ()):
            stream.cancel()

    async def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of this model."""
        return (await self._running()).text.tokenizer

    async def get_chat_template(self) -> ChatTemplate:
        """Return the chat template of this model."""
        return (await self._running()).text.chat_template

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling that the checkpoint's `generation_config.json` asks for."""
        return (await self._running()).text.default_sampling

    async def status(self) -> EngineStatus:
        """Return whether the engine is ready, and if not, why; and the last numbers of the core."""
        return (await self._running()).engine.status()

    async def close(self) -> None:
        """End the engine and wait until nothing of it is left. May be called again, at any time.

        Open requests end with an error. The engine ends even if the task that calls this is cancelled.
        """
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(_end(self._starting))
        await asyncio.shield(self._ending)

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _running(self) -> _Running:
        """Return the running engine; start it first if no caller has. All callers wait for the same start."""
        if self._ending is not None:
            raise UsageError("this AsyncLLM has been closed.", remedy="Make a new one.")
        if self._starting is None or (self._starting.done() and self._starting.cancelled()):
            self._starting = asyncio.get_running_loop().create_task(_start(self._config))
        starting = self._starting
        try:
            running = await asyncio.shield(starting)
        except asyncio.CancelledError:
            if self._ending is not None and starting.cancelled():  # `close` cancelled the start
                raise UnavailableError("this AsyncLLM was closed while it started.") from None
            raise
        running.require_alive()
        return running

    def _outputs(
        self,
        running: _Running,
        prompt: PreparedPrompt,
        sampling: SamplingParams | None,
        request_id: str | None,
    ) -> contextlib.aclosing[AsyncGenerator[RequestOutput, None]]:
        """Return the outputs of a request, which is aborted as soon as they are closed."""
        return contextlib.aclosing(self._stream(running, prompt, sampling, request_id))

    async def _stream(
        self,
        running: _Running,
        prompt: PreparedPrompt,
        sampling: SamplingParams | None,
        request_id: str | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        params = running.sampling_for(prompt, sampling)
        name = self._name(request_id)
        await running.prove(params)
        streams = self._streams[name] = running.engine.add_all(name, prompt.token_ids, params)
        wholes = [TextDelta("", []) for _ in streams]
        try:
            async with contextlib.aclosing(_news(streams)) as news:
                async for deltas in news:
                    for index, delta in deltas.items():
                        wholes[index] = merge_deltas([wholes[index], delta])
                    if not any(delta.token_ids or delta.finish_reason for delta in deltas.values()):
                        continue  # scores of the prompt alone: the next output has them, with its tokens
                    yield request_output(
                        name,
                        prompt.text,
                        prompt.token_ids,
                        wholes,
                        running.text.tokenizer,
                        scored=params.prompt_logprobs is not None,
                        num_cached_tokens=streams[0].cached_tokens,
                        drafts=total_drafts(stream.drafts for stream in streams),
                    )
        finally:
            self._release(name, streams)

    async def _pooled(
        self, prompt: Prompt, params: PoolingParams, request_id: str | None
    ) -> tuple[str, list[int], TextDelta]:
        """Return the request's id, the prompt's ids, and the delta with the vector."""
        running = await self._running()
        prepared = await _off_the_loop(prompt, running.text.prompt, prompt)
        name = self._name(request_id)
        stream = running.engine.embed(name, prepared.token_ids, normalised_pooling(params))
        streams = self._streams[name] = [stream]
        try:
            return name, prepared.token_ids, await stream.next()
        finally:
            self._release(name, streams)

    def _release(self, name: str, streams: list[RequestStream]) -> None:
        """Forget a request that is no longer read, and abort those of its sequences that still run."""
        for stream in streams:
            stream.cancel()
        if self._streams.get(name) is streams:
            del self._streams[name]

    def _name(self, request_id: str | None) -> str:
        return f"request-{next(self._numbers)}" if request_id is None else request_id


class _Running:
    """An engine that runs, with the parts that prepare and check its requests."""

    def __init__(
        self, supervisor: SupervisorProcess, supervised: SupervisedEngine, text: PromptPreparer
    ) -> None:
        self.engine = supervised.client
        self.text = text
        self._supervisor, self._supervised = supervisor, supervised
        self._limits = text.limits(self.engine.max_model_len)
        self._grammars = GrammarProver(text.grammar_model, GrammarLimits())

    def sampling_for(self, prompt: PreparedPrompt, sampling: SamplingParams | None) -> SamplingParams:
        """Return the caller's sampling, or the model's defaults as far as they fit."""
        return self.text.sampling_for(sampling, self._limits, len(prompt.token_ids))

    async def prove(self, sampling: SamplingParams) -> None:
        """Check the grammar of a request, if it has one. Raises what `GrammarProver.prove` does."""
        if sampling.structured_outputs is not None:
            await self._grammars.prove(sampling.structured_outputs)

    def require_alive(self) -> None:
        """Raise the first cause once the engine is lost for good."""
        self._supervised.require_alive()

    async def end(self) -> None:
        """End the engine, and return when nothing of it is left."""
        self._supervised.leave()
        self._grammars.close()
        await asyncio.to_thread(self._supervisor.end)


async def _start(config: EngineConfig) -> _Running:
    """Start the engine and return when it is ready. After an error no process of it is left.

    What would block the event loop runs in threads.
    """
    config, plan = await asyncio.to_thread(settled, config)
    text = await asyncio.to_thread(PromptPreparer.of, plan, config.model)
    supervisor = SupervisorProcess(config, LogReporter())
    try:
        address = await asyncio.to_thread(supervisor.wait_until_ready)
        info = engine_info(config, plan, text)
        return _Running(supervisor, await SupervisedEngine.open(supervisor, address, text, info), text)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(supervisor.end))
        raise


async def _end(starting: asyncio.Task[_Running] | None) -> None:
    """End the engine that this task has started, or is starting; None: no start was asked for."""
    if starting is None:
        return
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().end()


async def _news(streams: Sequence[RequestStream]) -> AsyncGenerator[dict[int, TextDelta], None]:
    """Yield what has arrived, as deltas by the index of their stream, until all streams have ended.

    Raises the error of the first stream that fails.
    """
    if len(streams) == 1:
        while True:
            delta = await streams[0].next()
            yield {0: delta}
            if delta.finish_reason is not None:
                return
    waiting = {asyncio.ensure_future(stream.next()): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            deltas = {waiting.pop(task): task.result() for task in done}
            for index in [index for index, delta in deltas.items() if delta.finish_reason is None]:
                waiting[asyncio.ensure_future(streams[index].next())] = index
            yield dict(sorted(deltas.items()))
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


_INLINE_CHARACTERS = 16 << 10


async def _off_the_loop(text: object, prepare: Any, *arguments: Any) -> PreparedPrompt:
    """Return the prompt that `prepare` makes of the arguments; a long one in a thread, not to block the loop.

    Args:
        text: the prompt or the conversation, whose length decides.
    """
    if isinstance(text, Mapping):
        text = text.get("prompt")
    if len(str(text)) <= _INLINE_CHARACTERS:
        prepared: PreparedPrompt = prepare(*arguments)
        return prepared
    return await asyncio.to_thread(prepare, *arguments)


def _config_of(model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration of these settings; their names and defaults come from `LLM`'s signature."""
    parameters = inspect.signature(LLM.__init__).parameters
    known = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    unknown = {name: value for name, value in settings.items() if name not in known}
    refuse_unknown(unknown, list(known))
    given = {**known, **settings, "model": model}
    backend = given["distributed_executor_backend"]
    backend = require_backend(backend if isinstance(backend, str) else "a caller's own executor")
    topology: str | os.PathLike[str] | None = given["topology"]
    return engine_config(given, backend, topology)
