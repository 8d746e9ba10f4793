"""`LLM`: the synchronous, offline face of the engine. Shapes of arguments and results are vLLM's.

    with LLM("path/to/model", pipeline_parallel_size=2) as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

The stages are processes of their own (`mp`) or threads of this one (`inprocess`). Tokenising, detokenising
and stop strings happen here; everything else is the engine's (`engine.client`). What is decided and done at
start is logged at INFO by the logger `penstock`.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from penstock.config import (
    Backend,
    CacheConfig,
    DType,
    EngineConfig,
    EvictionPolicy,
    GrammarLimits,
    ModelConfig,
    ModelImpl,
    ParallelConfig,
    PinThreads,
    Quantization,
    SchedulerConfig,
    StorePolicy,
    TiedHead,
)
from penstock.engine.auto_partition import settle_partition
from penstock.engine.client import EngineClient, InprocessClient, ProcessClient
from penstock.engine.host import Host
from penstock.engine.launch import LaunchPlan, resolve
from penstock.engine.outputs import (
    CompletionOutput,
    OutputAssembler,
    RequestOutput,
    TextDelta,
    completion_output,
    merge_deltas,
    output_assembler,
    prompt_logprobs,
)
from penstock.engine.refused_settings import refuse_if_known, refuse_replicas, require_backend
from penstock.engine.reports import LogReporter
from penstock.engine.request_check import RequestLimits
from penstock.engine.siblings import with_siblings
from penstock.engine.stats import CoreStats
from penstock.engine.topology import with_topology
from penstock.errors import InvalidRequestError, UsageError, error_from_info
from penstock.executor.base import Executor
from penstock.grammar.proving import GrammarModel, GrammarProver
from penstock.request import GenerationRequest, RequestUpdate, SamplingParams
from penstock.tokenizer.chat_template import ChatTemplate, load_chat_template
from penstock.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

Prompt = str | Mapping[str, Any]
MakeExecutor = Callable[[LaunchPlan], Executor]
POLL_S = 1.0
# Here the caller is the queue: it may hold any number, for any time.
_NO_BOUNDS = {"max_waiting_requests": 1 << 31, "max_waiting_tokens": 1 << 62, "queue_timeout_s": 1e12}
_PARTS = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
}
NO_INTER_TOKEN_TARGET_MS = 1e9


class LLM:
    """A model, ready to generate. Ends its processes at `shutdown`, at the end of a `with`, or at exit.

    Args:
        model: directory of a checkpoint, `demo`, or a hub name already downloaded.
        pipeline_parallel_size: number of stages.
        tensor_parallel_size: ranks that share a stage's layers, or of each stage, such as "2,1" or [2, 1].
        enable_expert_parallel: ranks of a stage have whole experts, and not each a part of all.
        topology: TOML file of unlike stages, in place of their number, ranks, layers, devices and threads.
        dtype: of weights and computation; "auto" takes the checkpoint's.
        max_model_len: longest prompt + output in tokens; None takes the model's own.
        seed: of requests that bring none.
        async_depth: plans issued ahead of the pipe; "auto" measures whether one is faster than none.
        prefill_chunk: prompt tokens of one request in one step at most.
        micro_batches: that decoding requests are split into; "auto" chooses by time.
        inter_token_target_ms: milliseconds between two tokens of a request that others' prompts should keep.
            No target by default: the caller waits for the whole anyway.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of one step at most.
        block_size: tokens per KV block.
        num_blocks, kv_cache_bytes: size of the KV pool; None takes a share of the free memory.
        enable_prefix_caching: keep keys and values of what was computed, for prompts that begin the same.
        eviction_policy: what of it is given up first: `lru`, `lfu` or `priority`.
        kv_store: directory or URL where KV blocks are kept beyond the pool and this process; None: nowhere.
        kv_store_bytes: of that directory at most.
        kv_store_when_found: a block is stored when it was found so often; 0: when it is computed.
        kv_store_patience_s: how long a request may wait for its blocks.
        kv_host_bytes: of host memory for KV blocks in front of the store, or without one; for GPUs.
        kv_write_bytes_per_s: of each rank, that are copied out of the pool at most; 0: no bound.
        kv_store_policy: a block goes to the store at once, or when host memory is full.
        partition: `even`, `last`, `auto` (measured at start), or layers per stage such as "5,6,5,6".
        partition_mix: tokens of a typical request, "PROMPT:OUTPUT", for which `auto` chooses.
        device: `cpu`, `cuda`, `auto`, or one for each stage or rank such as "cpu,cuda:0".
        distributed_executor_backend: `mp` (a process per rank), `inprocess` (a thread per rank), or what
            makes an `executor.base.Executor` of a `LaunchPlan`.
        threads_per_rank: CPU threads of a rank, or of each, such as "1,3" or [1, 3]; None shares the cores
            among the ranks.
        heartbeat_limit_s: a stage without a sign of life for this long is started again.
        load_timeout_s: a stage that has not loaded after this long counts as lost.
        step_timeout_s: longest time of one stage for one plan; None allows what a slow machine needs.
        tied_head: the last stage `load`s a tied embedding from the checkpoint, or gets it by `transfer`.
        quantization: weights are held as the checkpoint has them (`none`), or as `int8` or `int4` (CPU).
        model_impl: whose layers run: `penstock`, `transformers` (of the extra `penstock[hf]`), or `auto`:
            ours where there are any.
        kernels: our own CPU kernels: `auto`, `off`, or names switched off such as "-attention,-head".
        pin_threads: bind CPU threads to cores: `auto` (where they fit), `on` or `off`.

    Raises:
        UsageError: an argument is unknown or out of range.
        ModelError, NotEnoughMemoryError, PeerError: the model cannot be served; says why.
    """

    def __init__(
        self,
        model: str,
        *,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int | str | Sequence[int] = 1,
        enable_expert_parallel: bool = False,
        topology: str | os.PathLike[str] | None = None,
        dtype: DType = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
        async_depth: int | Literal["auto"] = "auto",
        prefill_chunk: int = 512,
        micro_batches: int | Literal["auto"] = "auto",
        inter_token_target_ms: float = NO_INTER_TOKEN_TARGET_MS,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        block_size: int = 32,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        eviction_policy: EvictionPolicy = "lru",
        kv_store: str | None = None,
        kv_store_bytes: int = 16 << 30,
        kv_store_when_found: int = 0,
        kv_store_patience_s: float = 2.0,
        kv_host_bytes: int = 0,
        kv_write_bytes_per_s: int = 1 << 30,
        kv_store_policy: StorePolicy = "write-through",
        partition: str = "even",
        partition_mix: str = "512:128",
        device: str = "cpu",
        distributed_executor_backend: Backend | MakeExecutor = "mp",
        threads_per_rank: int | str | Sequence[int] | None = None,
        tied_head: TiedHead = "load",
        heartbeat_limit_s: float = 5.0,
        load_timeout_s: float = 3600.0,
        step_timeout_s: float | None = None,
        quantization: Quantization = "none",
        model_impl: ModelImpl = "auto",
        kernels: str = "auto",
        pin_threads: PinThreads = "auto",
        **unknown: Any,
    ) -> None:
        given = {**locals()}
        _refuse_unknown(unknown)
        backend, make_executor = _executor_backend(distributed_executor_backend)
        given |= _NO_BOUNDS | {"model": str(model), "backend": backend}
        self._start(_engine_config(given), topology, make_executor)

    def _start(
        self,
        config: EngineConfig,
        topology: str | os.PathLike[str] | None,
        make_executor: MakeExecutor | None,
    ) -> None:
        if topology is not None:
            parallel = with_topology(config.parallel, topology)
            config = msgspec.structs.replace(config, parallel=parallel)
        host = Host.detect()
        config = settle_partition(config, host, LogReporter())
        plan = resolve(config, host)
        directory = Path(plan.model_path)
        self._tokenizer = load_tokenizer(directory)
        self._chat_template = load_chat_template(directory, self._tokenizer)
        self._default_sampling = default_sampling(plan.spec.generation_defaults)
        self._client = _make_client(config, plan, make_executor)
        self._limits = RequestLimits(
            max_model_len=self._client.max_model_len, vocab_size=plan.spec.vocab_size
        )
        self._numbers = itertools.count()
        model = GrammarModel(directory=directory, eos_token_ids=plan.spec.eos_token_ids)
        self._grammars = GrammarProver(model, GrammarLimits())
        self._finalizer = weakref.finalize(self, _close, self._client, self._grammars)  # at exit too

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue each prompt; results are in the order of the prompts.

        Args:
            prompts: text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`, one or several. Special tokens
                written in a text mean themselves.
            sampling_params: for all prompts, or one per prompt; None takes the model's defaults.
            use_tqdm: show a progress bar.

        Raises:
            InvalidRequestError: a prompt or a sampling value is out of bounds; nothing has run.
            PenstockError: a request or the engine failed; the others were aborted.
        """
        self._require_open()
        single = isinstance(prompts, str | Mapping)
        entries: Sequence[Any] = [prompts] if single else list(prompts)
        prepared = [self._prepare(entry) for entry in entries]
        return self._run(prepared, self._sampling_for(len(prepared), sampling_params), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of messages), or several, by the model's chat template."""
        self._require_open()
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        options = {"add_generation_prompt": add_generation_prompt} | dict(chat_template_kwargs or {})
        prepared = []
        for conversation in conversations:
            text = self._chat_template.render(conversation, **options)
            prepared.append((text, self._chat_template.encode(conversation, **options)))
        return self._run(prepared, self._sampling_for(len(prepared), sampling_params), use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of this model."""
        return self._tokenizer

    def get_chat_template(self) -> ChatTemplate:
        """The chat template of this model."""
        return self._chat_template

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling that the checkpoint's `generation_config.json` asks for."""
        return self._default_sampling

    def stats(self) -> CoreStats | None:
        """Numbers of the engine core, as of its last message."""
        return self._client.stats()

    def shutdown(self) -> None:
        """End the engine and wait until nothing of it is left. May be called twice."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise UsageError("this LLM has been shut down.", remedy="Make a new one.")

    def _prepare(self, prompt: Any) -> tuple[str | None, list[int]]:
        """(text, token ids) of one prompt."""
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode_trusted(prompt)
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return prompt.get("prompt"), [_token_id(value) for value in prompt["prompt_token_ids"]]
        if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], self._tokenizer.encode_trusted(prompt["prompt"])
        raise InvalidRequestError(
            f"a prompt is a text or a mapping with prompt_token_ids, got {type(prompt).__name__}.",
            remedy='Write {"prompt_token_ids": [...]} for token ids.',
            param="prompts",
        )

    def _sampling_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [_normalised(given or self._default_sampling)] * count
        if len(given) != count:
            raise InvalidRequestError(
                f"{len(given)} sampling_params were given for {count} prompts.", param="sampling_params"
            )
        return [_normalised(params) for params in given]

    def _run(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling: Sequence[SamplingParams],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        for (_, token_ids), params in zip(prompts, sampling, strict=True):
            self._limits.check(token_ids, params)
            if params.structured_outputs is not None:
                self._grammars.prove_now(params.structured_outputs)
        requests = [
            with_siblings(str(next(self._numbers)), token_ids, params)
            for (_, token_ids), params in zip(prompts, sampling, strict=True)
        ]
        groups = [[_Pending(one, self._tokenizer) for one in request.alone()] for request in requests]
        pending = {entry.request.request_id: entry for group in groups for entry in group}
        try:
            for request in requests:
                self._client.add(request)
            self._collect(pending, _progress_bar(len(pending)) if use_tqdm else _NoProgress())
        finally:
            if pending:  # an error or an interrupt: let nothing run on
                self._client.abort(list(pending))
        return [
            _request_output(group, text, self._tokenizer)
            for group, (text, _) in zip(groups, prompts, strict=True)
        ]

    def _collect(self, pending: dict[str, _Pending], progress: _NoProgress) -> None:
        """Wait until none is pending."""
        with progress:
            while pending:
                for update in self._client.poll(POLL_S):
                    entry = pending.get(update.request_id)
                    if entry is not None and entry.take(update):
                        del pending[update.request_id]
                        if entry.must_abort:
                            self._client.abort([update.request_id])
                        progress.advance()


class _Pending:
    """One sequence on its way, and what has come of it."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        self.must_abort = False  # ended by a stop string, which the core does not know
        self._assembler: OutputAssembler = output_assembler(
            tokenizer, request.prompt_token_ids, request.sampling
        )
        self.deltas: list[TextDelta] = []
        self.num_cached_tokens = 0

    def take(self, update: RequestUpdate) -> bool:
        """Whether the request has ended. Raises its error."""
        if update.error is not None:
            raise error_from_info(update.error)
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        delta = self._assembler.append(update)
        self.deltas.append(delta)
        self.must_abort = delta.finish_reason is not None and update.finish_reason is None
        return delta.finish_reason is not None


def _request_output(group: Sequence[_Pending], text: str | None, tokenizer: Tokenizer) -> RequestOutput:
    """The result of a prompt, from all its sequences."""
    first = group[0]
    scores, token_ids = None, first.request.prompt_token_ids
    if first.request.sampling.prompt_logprobs is not None:
        scores = prompt_logprobs(token_ids, merge_deltas(first.deltas).prompt_logprobs, tokenizer)
    return RequestOutput(
        request_id=first.request.request_id,
        prompt=text,
        prompt_token_ids=token_ids,
        outputs=[completion_output(entry.deltas, tokenizer, index) for index, entry in enumerate(group)],
        finished=True,
        num_cached_tokens=first.num_cached_tokens,
        prompt_logprobs=scores,
    )


class _NoProgress:
    """Shows nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def advance(self) -> None:
        pass


class _RichProgress(_NoProgress):
    """A bar on standard error."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True))
        self._task = self._bar.add_task("prompts", total=total)

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self) -> None:
        self._bar.advance(self._task)


def _progress_bar(total: int) -> _NoProgress:
    return _RichProgress(total)


def _close(client: EngineClient, grammars: GrammarProver) -> None:
    grammars.close()
    client.close()


def default_sampling(defaults: Mapping[str, float]) -> SamplingParams:
    """`SamplingParams` with the values that a checkpoint asks for."""
    values: dict[str, Any] = dict(defaults)
    if "top_k" in values:
        values["top_k"] = int(values["top_k"])
    return SamplingParams(**values)


def _normalised(sampling: SamplingParams) -> SamplingParams:
    """The same values with the types that a wire would give them (a temperature of 0 becomes 0.0)."""
    try:
        return msgspec.convert(msgspec.to_builtins(sampling), SamplingParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequestError(f"sampling_params: {error}.", param="sampling_params") from error


def _token_id(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return int(value.__index__())  # numpy and torch scalars
    except (AttributeError, TypeError) as error:
        raise InvalidRequestError(
            f"prompt_token_ids must be integers, got {type(value).__name__}.", param="prompt_token_ids"
        ) from error


def _engine_config(given: Mapping[str, Any]) -> EngineConfig:
    """The configuration of the arguments that are fields of it, types and ranges checked."""
    values: dict[str, Any] = {
        part: {name: given[name] for name in fields.__struct_fields__ if name in given}
        for part, fields in _PARTS.items()
    }
    values["seed"] = given["seed"]
    try:
        return msgspec.convert(values, EngineConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UsageError):  # a range, checked by its owner
            raise error.__cause__ from None
        raise UsageError(f"an argument of LLM has the wrong type or value: {error}.") from error


def _refuse_unknown(unknown: Mapping[str, Any]) -> None:
    if not unknown:
        return
    name = next(iter(unknown))
    refuse_if_known(name)
    if name == "data_parallel_size":
        refuse_replicas()
    known = [parameter for parameter in inspect.signature(LLM.__init__).parameters if parameter != "unknown"]
    nearest = difflib.get_close_matches(name, known, n=1)
    remedy = f"Did you mean {nearest[0]}?" if nearest else "See help(penstock.LLM)."
    raise UsageError(f"LLM has no argument {name!r}.", remedy=remedy, param=name, code="unknown_argument")


def _executor_backend(given: str | MakeExecutor) -> tuple[str, MakeExecutor | None]:
    """Where ranks run, and what makes the executor if it is the caller's own."""
    if callable(given):
        return "inprocess", given
    require_backend(given, ("mp", "inprocess"))
    return given, None


def _make_client(config: EngineConfig, plan: LaunchPlan, make_executor: MakeExecutor | None) -> EngineClient:
    if make_executor is not None:
        return InprocessClient(plan, make_executor(plan))
    if config.parallel.backend == "mp":
        return ProcessClient(config, LogReporter())
    # Here and not above: this imports torch, which the processes of the other backend do for themselves.
    from penstock.executor.inprocess import InprocessExecutor

    return InprocessClient(plan, InprocessExecutor(plan.ranks))
