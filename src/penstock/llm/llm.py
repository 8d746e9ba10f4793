"""`LLM`: the engine for scripts, offline and without an event loop. Arguments and results have vLLM's shapes.

    with LLM("path/to/model", pipeline_parallel_size=2) as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

With the executor backend `inprocess` the stages are threads of this process (`llm.engine_client`); with every
other backend they are processes (`llm.process_client`). Prompts become ids in `llm.prompt_preparer`, ids
become text in `engine.client.outputs`. The logger `penstock` says at INFO what is decided and done at start.
`llm.async_llm` is the same for programs with an event loop.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from penstock.config.engine import (
    DType,
    EngineConfig,
    EvictionPolicy,
    ModelImpl,
    PinThreads,
    Pooling,
    PrefetchPolicy,
    Quantization,
    StorePolicy,
    TiedHead,
)
from penstock.config.executor_backend import PROCESSES, require_backend
from penstock.config.limits import GrammarLimits
from penstock.config.speculation import SpeculativeMethod
from penstock.engine.client.outputs import CompletionOutput, RequestOutput, request_output
from penstock.engine.client.vectors import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    embedding_output,
    pooling_output,
)
from penstock.engine.stats import CoreStats
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.engine.supervisor.reports import LogReporter
from penstock.errors import InvalidRequestError, UsageError
from penstock.executor.base import Executor
from penstock.grammar.proving import GrammarProver
from penstock.llm.arguments import NO_INTER_TOKEN_TARGET_MS, engine_config, refuse_unknown, settled
from penstock.llm.engine_client import EngineClient, InprocessClient, OfflineRequest, RequestResult
from penstock.llm.offline_requests import OfflineRequests
from penstock.llm.process_client import ProcessClient
from penstock.llm.progress import progress_of
from penstock.llm.prompt_preparer import (
    Conversation,
    PreparedPrompt,
    Prompt,
    PromptPreparer,
    at_place,
    chat_options,
    normalised_pooling,
    raw_pooling,
)
from penstock.request import GenerationRequest, PoolingParams, SamplingParams
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.tokenizer.tokenizer import Tokenizer

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

MakeExecutor = Callable[[LaunchPlan], Executor]
Params = TypeVar("Params", SamplingParams, PoolingParams, SamplingParams | None)


class LLM:
    """A model, ready to generate. Its processes end at `shutdown`, at the end of a `with`, or at exit.

    Args:
        model: directory of a Hugging Face style checkpoint, GGUF file, `demo`, or name of a model here.
        dtype: number format of weights and computation; `auto` uses the checkpoint's.
        max_model_len: longest prompt + output in tokens; None uses the model's own limit.
        quantization: format of the weights: `none` keeps the checkpoint's, `int8` is per channel, `int4` in
            groups (CPU). For a checkpoint that is already quantised, use `none` or its own format.
        gguf_dequantize: convert a GGUF file's weights to `dtype` at load; also reads IQ1-IQ3 (extra `gguf`).
        model_impl: layers to run: `penstock`, `transformers` (extra `hf`), or `auto`: ours if they exist.
        pooling: default token states for embeddings: the `last`, the `mean` of all, or `cls`, the first.
        chat_template: file of the chat template, Jinja or JSON with `chat_template`; None uses the model's.
        seed: seed of requests that do not set one.
        record_decisions: file for a log of the scheduler's decisions, which `penstock replay` replays.
        pipeline_parallel_size: number of stages P.
        tensor_parallel_size: ranks that share a stage's layers; "2,1" sets each stage. Or a list: [2, 1].
        enable_expert_parallel: give each rank of a stage whole experts instead of a slice of every expert.
        topology: TOML file with ranks, layers, device and threads of each stage.
        partition: `even`, `last`, `auto` (measured at start), or layers per stage such as "5,6,5,6".
        partition_mix: tokens of a typical request, "PROMPT:OUTPUT"; `partition` `auto` optimises for it.
        async_depth: plans issued beyond those that fill the pipe; `auto` measures whether 1 is faster than 0.
        threads_per_rank: CPU threads of a rank; a list sets each stage or rank: "1,3". None: by the cores.
        device: `cpu`, `cuda` (the host's GPUs in turn), a GPU such as `cuda:1`, or `auto` (`cuda` on a host
            with a GPU); a list such as "cpu,cuda:0" sets each stage or rank.
        tied_head: how the last stage gets a tied embedding: `load` from disk, `transfer` from the first.
        kernels: Penstock's CPU kernels: `auto` uses all, `off` none, "-attention,-head" all but these.
        numeric_class: instruction set of the CPU kernels, such as avx512; `auto`: the best of each host.
        pin_threads: bind each CPU thread to a core; `auto`: if all ranks together have a core per thread.
        heartbeat_limit_s: seconds without a sign of life after which a stage is restarted.
        warm_spare: keep a spare process ready for a lost stage, while all stages run and memory suffices.
        load_timeout_s: seconds in which a stage must load; after them it counts as lost.
        step_timeout_s: seconds for one plan after which a stage counts as lost; None: 60 + 0.1 per token.
        block_size: tokens per block.
        num_blocks: blocks in the pool; None: as many as `kv_cache_bytes` or the free memory allows.
        kv_cache_bytes: KV cache bytes per rank, without `num_blocks`; None: a share of free memory.
        enable_prefix_caching: reuse KV blocks for later requests that begin with the same tokens.
        kv_store: directory or URL (`s3://...`) for blocks that outlive the pool and the process.
        kv_store_bytes: most bytes in a store on disk, on each host.
        kv_store_when_found: 0 stores each block when it is computed; n when n requests have found it.
        kv_store_patience_s: most seconds that a request waits for stored blocks under the policy `timeout`.
        kv_prefetch_policy: how long a request waits for stored blocks: `timeout` (`kv_store_patience_s`),
            `best-effort` (not at all), or `wait-all` (until each has loaded or failed).
        kv_host_bytes: bytes of memory on each host for blocks, with or without a store; its ranks share them.
        kv_write_bytes_per_s: most bytes a second that each rank copies out of the pool; 0: no limit.
        kv_store_policy: `write-through` stores a block at once, `write-back` only when host memory is full.
        eviction_policy: order in which the prefix cache evicts blocks: `lru`, `lfu` or `priority`.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens in one plan.
        prefill_chunk: most prompt tokens of one request in one plan.
        micro_batches: micro-batches of the decoding requests; `auto`: by measured time, P until then.
        inter_token_target_ms: milliseconds between two tokens of a request that the prompts of others should
            not exceed; prompts may always lengthen the plan that they join by half. None by default.
        speculative_method: draft with `suffix` (the text), `draft_model` or `mtp` (a layer); `off`; `auto`.
        num_speculative_tokens: most draft tokens of a request in one step; fewer where more would cost time.
        speculative_config: a JSON object, as in vLLM: {"method": "suffix"}, or {"model": "small"}.
        hosts: number of hosts, including this one; all others run `penstock worker`.
        listen_workers: ADDRESS:PORT where workers join; the port is 7700 if it is left out.
        join_token_file: file of the token that workers join with; written if it does not exist.
        link_ports: first and last port for links from other hosts to this one.
        state_dir: directory of the cluster's identity; None: `~/.local/state/penstock`.
        rejoin_timeout_s: seconds to wait for a lost host; then the others take over its stages.
        ray: how the executor backend `ray` places hosts, as a JSON object (`config.ray.RayOptions`).
        distributed_executor_backend: `mp`, `ray`, `inprocess`, MODULE:CLASS, or what makes an `Executor`.

    Raises:
        UsageError: an argument is unknown or out of range.
        ModelError, NotEnoughMemoryError, PeerError: the model cannot be served; says why.
    """

    # `scripts/settings_text.py` writes the parameters between `model` and `unknown`, and the Args above.
    def __init__(
        self,
        model: str,
        *,
        dtype: DType = "auto",
        max_model_len: int | None = None,
        quantization: Quantization = "none",
        gguf_dequantize: bool = False,
        model_impl: ModelImpl = "auto",
        pooling: Pooling = "last",
        chat_template: str | None = None,
        seed: int = 0,
        record_decisions: str | None = None,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int | str | Sequence[int] = 1,
        enable_expert_parallel: bool = False,
        topology: str | os.PathLike[str] | None = None,
        partition: str = "even",
        partition_mix: str = "512:128",
        async_depth: int | Literal["auto"] = "auto",
        threads_per_rank: int | str | Sequence[int] | None = None,
        device: str = "cpu",
        tied_head: TiedHead = "load",
        kernels: str = "auto",
        numeric_class: str = "auto",
        pin_threads: PinThreads = "auto",
        heartbeat_limit_s: float = 5.0,
        warm_spare: bool = True,
        load_timeout_s: float = 3600.0,
        step_timeout_s: float | None = None,
        block_size: int = 32,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        kv_store: str | None = None,
        kv_store_bytes: int = 16 << 30,
        kv_store_when_found: int = 0,
        kv_store_patience_s: float = 2.0,
        kv_prefetch_policy: PrefetchPolicy = "timeout",
        kv_host_bytes: int = 0,
        kv_write_bytes_per_s: int = 1 << 30,
        kv_store_policy: StorePolicy = "write-through",
        eviction_policy: EvictionPolicy = "lru",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        prefill_chunk: int = 512,
        micro_batches: int | Literal["auto"] = "auto",
        inter_token_target_ms: float = NO_INTER_TOKEN_TARGET_MS,
        speculative_method: SpeculativeMethod = "auto",
        num_speculative_tokens: int = 8,
        speculative_config: str | Mapping[str, Any] | None = None,
        hosts: int = 1,
        listen_workers: str | None = None,
        join_token_file: str | None = None,
        link_ports: str = "7701-7732",
        state_dir: str | None = None,
        rejoin_timeout_s: float = 30.0,
        ray: str = "{}",
        distributed_executor_backend: str | MakeExecutor = "mp",
        **unknown: Any,
    ) -> None:
        given = {**locals()}
        refuse_unknown(unknown, [n for n in inspect.signature(LLM.__init__).parameters if n != "unknown"])
        backend, make_executor = _executor_backend(distributed_executor_backend)
        config, plan = settled(engine_config(given, backend, topology))
        self._text = PromptPreparer.of(plan, config.model)
        self._client = _make_client(config, plan, self._text, make_executor)
        self._requests = OfflineRequests(self._text, self._text.limits(self._client.max_model_len))
        self._grammars = GrammarProver(self._text.grammar_model, GrammarLimits())
        self._finalizer = weakref.finalize(self, _close, self._client, self._grammars)  # at exit too

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, and return the results in the order of the prompts.

        Args:
            prompts: text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`, one or several. If a text has
                the name of a special token, it becomes that token.
            sampling_params: for all prompts, or one per prompt; None takes the model's defaults.
            use_tqdm: show the progress; None: only on a terminal, and only of several prompts.

        Raises:
            InvalidRequestError: a prompt or a sampling value is out of bounds, or prompt and output together
                are too long. The error names the prompt by its index; no prompt has run.
            PenstockError: a request or the engine failed; the other requests were aborted.
        """
        self._require_open()
        return self._generate(self._text.prompts(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of messages), or several, by the model's chat template.

        Args:
            add_generation_prompt: end the prompt with the text that begins an answer.
            continue_final_message: continue the last message, an assistant's, instead of beginning an answer.
            tools: functions that the model may call, in OpenAI's form. Calls are a part of the output's text.
            chat_template_kwargs: further variables of the template.

        Raises what `generate` does; also if the template refuses the messages, or does not support tools.
        """
        self._require_open()
        options = chat_options(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        return self._generate(self._text.conversations(messages, options), sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in their order: a vector, by default of Euclidean length 1.

        Args:
            prompts: as for `generate`.
            pooling_params: for all prompts, or one per prompt; None takes the engine's `pooling`.

        Raises what `generate` does.
        """
        return [
            embedding_output(request.request_id, request.prompt_token_ids, vector)
            for request, vector in self._pooled(prompts, pooling_params or PoolingParams(), use_tqdm)
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling: Pooling | None = None,
        use_tqdm: bool | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the pooled hidden states of each prompt as a numpy array, by default not scaled to length 1.

        Args:
            pooling: which token states to pool, as in `PoolingParams`; only without `pooling_params`.

        Raises what `generate` does.
        """
        return [
            pooling_output(request.request_id, request.prompt_token_ids, vector)
            for request, vector in self._pooled(prompts, raw_pooling(pooling_params, pooling), use_tqdm)
        ]

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of this model."""
        return self._text.tokenizer

    def get_chat_template(self) -> ChatTemplate:
        """Return the chat template of this model."""
        return self._text.chat_template

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling that the checkpoint's `generation_config.json` asks for."""
        return self._text.default_sampling

    def stats(self) -> CoreStats | None:
        """Return the numbers of the engine core, as of its last message; None while there is no core."""
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

    def _generate(
        self,
        prompts: Sequence[PreparedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        sampling, requests = _for_each(sampling_params, len(prompts), "sampling_params"), []
        for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            with at_place(f"prompts[{index}]"):
                requests.append(self._requests.for_text(prompt, params))
        _prove_all(requests, self._grammars)
        results, tokenizer = self._run(requests, use_tqdm), self._text.tokenizer
        return [
            _text_output(request.request, prompt, result, tokenizer)
            for request, prompt, result in zip(requests, prompts, results, strict=True)
        ]

    def _pooled(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams],
        use_tqdm: bool | None,
    ) -> list[tuple[GenerationRequest, bytes]]:
        """Return the request and the vector of each prompt."""
        self._require_open()
        prepared, requests = self._text.prompts(prompts), []
        each = _for_each(pooling_params, len(prepared), "pooling_params")
        for index, (prompt, params) in enumerate(zip(prepared, each, strict=True)):
            with at_place(f"prompts[{index}]"):
                requests.append(self._requests.for_vector(prompt, normalised_pooling(params)))
        results = self._run(requests, use_tqdm)
        pairs = zip(requests, results, strict=True)
        return [(request.request, result.whole.vector) for request, result in pairs]

    def _run(self, requests: Sequence[OfflineRequest], use_tqdm: bool | None) -> list[RequestResult]:
        with progress_of(len(requests), use_tqdm) as progress:
            return self._client.run(requests, progress)


def _prove_all(requests: Sequence[OfflineRequest], grammars: GrammarProver) -> None:
    """Raise `InvalidRequestError` for a grammar that no text can follow, or that takes too long to compile.

    The error names the prompt by its index.
    """
    for index, request in enumerate(requests):
        structured = request.request.sampling.structured_outputs
        if structured is not None:
            with at_place(f"prompts[{index}]"):
                grammars.prove_now(structured)


def _for_each(given: Params | Sequence[Params], count: int, name: str) -> Sequence[Params]:
    """Return the parameters of each prompt.

    Args:
        given: parameters for all prompts, or one for each prompt; None stands for the defaults of all.
        count: number of prompts.
        name: the argument, for errors.
    """
    if given is None or isinstance(given, SamplingParams | PoolingParams):
        return [given] * count
    if len(given) != count:
        raise InvalidRequestError(f"{len(given)} {name} were given for {count} prompts.", param=name)
    return given


def _text_output(
    request: GenerationRequest, prompt: PreparedPrompt, result: RequestResult, tokenizer: Tokenizer
) -> RequestOutput:
    """Return the caller's output for a request for text."""
    return request_output(
        request.request_id,
        prompt.text,
        prompt.token_ids,
        result.sequences,
        tokenizer,
        scored=request.sampling.prompt_logprobs is not None,
        num_cached_tokens=result.num_cached_tokens,
        drafts=result.drafts,
    )


def _close(client: EngineClient, grammars: GrammarProver) -> None:
    grammars.close()
    client.close()


def _executor_backend(given: str | MakeExecutor) -> tuple[str, MakeExecutor | None]:
    """Return the name of the backend, and the caller's function that makes the executor, if given."""
    if callable(given):
        return "inprocess", given
    require_backend(given, (*PROCESSES, "inprocess"))
    return given, None


def _make_client(
    config: EngineConfig, plan: LaunchPlan, text: PromptPreparer, make_executor: MakeExecutor | None
) -> EngineClient:
    """Start the engine, and return its client."""
    if make_executor is not None:
        return InprocessClient(plan, make_executor(plan))
    if config.parallel.backend != "inprocess":
        return ProcessClient(config, plan, text, LogReporter())
    # Here and not above: this imports torch, which only the ranks' processes import with other backends.
    from penstock.executor.inprocess import InprocessExecutor

    return InprocessClient(plan, InprocessExecutor(plan.ranks))
