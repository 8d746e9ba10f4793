"""Flags of vLLM, SGLang and llama.cpp that have another name here, or are not here at all.

The command line answers an unknown flag from this table, before it looks for a flag of ours that is spelled
alike. `docs/flags.md` shows the table. `config.refused_settings` has the settings that the command line and
`LLM` both refuse by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import UsageError

VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"

_BYTES = "bytes, and not a share of the memory"
_FIRST_WORD = "the model is the first word: penstock serve MODEL"
_DOWNLOAD = "`penstock pull` downloads a model of the hub, or `penstock serve ORG/NAME --download` first"
_IN_DIRECTORY = "it is read from the model's directory"
_NO_CODE = "code that a checkpoint brings is never run"
_IN_REQUESTS = "set it in requests; defaults come from the model's generation_config.json"
_ALWAYS = "this is always on"
_CHUNKS = "prompts are always computed in chunks, of --prefill-chunk tokens at most"
_IN_ORDER = "requests begin in the order in which they come"
_NO_ADAPTERS = "adapters (LoRA) are not supported"
_TEXT_ALONE = "models read and write text only"
_ONE_HOST = "for several hosts, see --hosts and `penstock worker`"
_ON_CPUS = "stages hold their weights where they compute"
_ONE_BACKEND = "Penstock chooses it by device and model"
_NO_GRAPHS = "nothing is captured or compiled"
_OWN_TYPE = "KV blocks have the dtype of the model"
_NO_SWITCH = "no switch is needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """A flag that users of another engine know.

    Attributes:
        engines: the engines that have the flag.
        ours: the flag to use here; "": Penstock has none.
        remark: how our flag differs, which may be "", or why Penstock has none.
    """

    engines: tuple[str, ...]
    ours: str
    remark: str

    def answer(self, typed: str) -> UsageError:
        """Return the error for this flag on our command line.

        Args:
            typed: the flag as the user typed it.
        """
        whose = " and ".join(self.engines)
        if self.ours:
            remark = f" ({self.remark})" if self.remark else ""
            return UsageError(
                f"{typed} is a flag of {whose}; here it is `{self.ours}`{remark}.",
                remedy=f"Use `{self.ours}`.",
                param=self.ours,
                code="foreign_flag",
            )
        return UsageError(
            f"{typed} is a flag of {whose} that Penstock does not have: {self.remark}.",
            remedy="Leave it out.",
            param=typed,
            code="foreign_flag",
        )


# name -> (the flag here or "", remark)
_OF_VLLM: Mapping[str, tuple[str, str]] = {
    "--model": ("", _FIRST_WORD),
    "-q": ("--quantization", "int8 or int4; a quantised checkpoint needs no flag"),
    "-ep": ("--enable-expert-parallel", ""),
    "--gpu-memory-utilization": ("--kv-cache-bytes", _BYTES),
    "--kv-cache-dtype": ("", _OWN_TYPE),
    "--swap-space": ("--kv-host-bytes", "bytes"),
    "--kv-offloading-size": ("--kv-host-bytes", "bytes"),
    "--cpu-offload-gb": ("", _ON_CPUS),
    "--kv-transfer-config": ("--kv-store", "a directory or URL"),
    "--enable-chunked-prefill": ("", _CHUNKS),
    "--no-enable-chunked-prefill": ("", _CHUNKS),
    "--long-prefill-token-threshold": ("--prefill-chunk", ""),
    "--async-scheduling": ("--async-depth", "0 switches it off"),
    "--no-async-scheduling": ("--async-depth", "0 switches it off"),
    "--scheduling-policy": ("", _IN_ORDER),
    "--enforce-eager": ("", _NO_GRAPHS),
    "--compilation-config": ("", _NO_GRAPHS),
    "-O": ("", _NO_GRAPHS),
    "--cudagraph-capture-sizes": ("", _NO_GRAPHS),
    "--tokenizer": ("", _IN_DIRECTORY),
    "--tokenizer-mode": ("", _IN_DIRECTORY),
    "--skip-tokenizer-init": ("", "a model without tokenizer.json takes token ids"),
    "--hf-config-path": ("", _IN_DIRECTORY),
    "--hf-overrides": ("", "change config.json in a copy of the model's directory"),
    "--generation-config": ("", _IN_DIRECTORY),
    "--override-generation-config": ("", "change generation_config.json in a copy of the model's directory"),
    "--trust-remote-code": ("", _NO_CODE),
    "--revision": ("", _DOWNLOAD),
    "--download-dir": ("", _DOWNLOAD),
    "--hf-token": ("", _DOWNLOAD),
    "--load-format": ("", "weights are read from safetensors"),
    "--enable-auto-tool-choice": ("", f"{_NO_SWITCH}; --tool-parser selects the format"),
    "--tool-parser-plugin": ("", "--tool-parser takes one of the known formats"),
    "--enable-reasoning": ("", f"{_NO_SWITCH}; --reasoning-parser selects the format"),
    "--structured-outputs-config": ("", _ONE_BACKEND),
    "--guided-decoding-backend": ("", _ONE_BACKEND),
    "--attention-backend": ("", _ONE_BACKEND),
    "--task": ("", "every model serves texts and embeddings"),
    "--runner": ("", "every model serves texts and embeddings"),
    "--convert": ("", "every model serves texts and embeddings"),
    "--pooler-config": ("--pooling", "last, mean or cls"),
    "--override-pooler-config": ("--pooling", "last, mean or cls"),
    "--enable-lora": ("", _NO_ADAPTERS),
    "--lora-modules": ("", _NO_ADAPTERS),
    "--max-loras": ("", _NO_ADAPTERS),
    "--limit-mm-per-prompt": ("", _TEXT_ALONE),
    "--mm-processor-kwargs": ("", _TEXT_ALONE),
    "--disable-log-requests": ("", "the log has a line for each request, without its text"),
    "--enable-log-requests": ("", "the log has a line for each request, without its text"),
    "--uvicorn-log-level": ("", "the log is not filtered by level; --log-format is text or json"),
    "--allowed-methods": ("--allowed-origins", "its methods and headers follow"),
    "--allowed-headers": ("--allowed-origins", "its methods and headers follow"),
    "--api-server-count": ("", "there is one process for HTTP"),
    "--data-parallel-address": ("", _ONE_HOST),
    "--data-parallel-size-local": ("", _ONE_HOST),
    "--nnodes": ("", _ONE_HOST),
    "--node-rank": ("", _ONE_HOST),
    "--master-addr": ("", _ONE_HOST),
}
_OF_SGLANG: Mapping[str, tuple[str, str]] = {
    "--model-path": ("", _FIRST_WORD),
    "--tp-size": ("--tensor-parallel-size", ""),
    "--pp-size": ("--pipeline-parallel-size", ""),
    "--dp-size": ("--data-parallel-size", ""),
    "--ep-size": ("--enable-expert-parallel", "over the ranks of a stage"),
    "--expert-parallel-size": ("--enable-expert-parallel", "over the ranks of a stage"),
    "--context-length": ("--max-model-len", ""),
    "--mem-fraction-static": ("--kv-cache-bytes", _BYTES),
    "--max-total-tokens": ("--num-blocks", "blocks of --block-size tokens"),
    "--max-running-requests": ("--max-num-seqs", ""),
    "--max-queued-requests": ("--max-waiting-requests", ""),
    "--chunked-prefill-size": ("--prefill-chunk", ""),
    "--max-prefill-tokens": ("--max-num-batched-tokens", "decoding requests are counted too"),
    "--page-size": ("--block-size", ""),
    "--disable-radix-cache": ("--no-enable-prefix-caching", ""),
    "--radix-eviction-policy": ("--eviction-policy", ""),
    "--enable-hierarchical-cache": ("--kv-host-bytes", "bytes"),
    "--hicache-size": ("--kv-host-bytes", "bytes"),
    "--hicache-ratio": ("--kv-host-bytes", _BYTES),
    "--hicache-storage-backend": ("--kv-store", "a directory or URL"),
    "--hicache-write-policy": ("--kv-store-policy", "write-through or write-back"),
    "--kv-cache-dtype": ("", _OWN_TYPE),
    "--random-seed": ("--seed", ""),
    "--watchdog-timeout": ("--step-timeout", ""),
    "--dist-timeout": ("--load-timeout", ""),
    "--admin-api-key": ("--admin-key", ""),
    "--pp-max-micro-batch-size": ("--micro-batches", "a number, not a size"),
    "--pp-async-batch-depth": ("--async-depth", ""),
    "--schedule-policy": ("", _IN_ORDER),
    "--schedule-conservativeness": ("", "requests that no longer fit are computed again later"),
    "--tokenizer-path": ("", _IN_DIRECTORY),
    "--tokenizer-mode": ("", _IN_DIRECTORY),
    "--skip-tokenizer-init": ("", "a model without tokenizer.json takes token ids"),
    "--trust-remote-code": ("", _NO_CODE),
    "--revision": ("", _DOWNLOAD),
    "--download-dir": ("", _DOWNLOAD),
    "--load-format": ("", "weights are read from safetensors"),
    "--attention-backend": ("", _ONE_BACKEND),
    "--sampling-backend": ("", _ONE_BACKEND),
    "--grammar-backend": ("", _ONE_BACKEND),
    "--disable-cuda-graph": ("", _NO_GRAPHS),
    "--cuda-graph-max-bs": ("", _NO_GRAPHS),
    "--enable-torch-compile": ("", _NO_GRAPHS),
    "--enable-metrics": ("", f"{_ALWAYS}: /metrics"),
    "--enable-mixed-chunk": ("", _ALWAYS),
    "--is-embedding": ("", "every model serves texts and embeddings"),
    "--log-level": ("", "the log is not filtered by level; --log-format is text or json"),
    "--speculative-algorithm": ("--speculative-method", "suffix, draft_model, mtp or off"),
    "--speculative-num-steps": ("--num-speculative-tokens", ""),
    "--speculative-draft-model-path": ("--speculative-model", ""),
    "--enable-lora": ("", _NO_ADAPTERS),
    "--lora-paths": ("", _NO_ADAPTERS),
    "--enable-multimodal": ("", _TEXT_ALONE),
    "--enable-dp-attention": ("", "--data-parallel-size runs whole pipelines side by side"),
    "--cpu-offload-gb": ("", _ON_CPUS),
    "--dist-init-addr": ("", _ONE_HOST),
    "--nnodes": ("", _ONE_HOST),
    "--node-rank": ("", _ONE_HOST),
}
_OF_LLAMA_CPP: Mapping[str, tuple[str, str]] = {
    "--model": ("", _FIRST_WORD),
    "-m": ("", _FIRST_WORD),
    "-hf": ("", _DOWNLOAD),
    "--hf-repo": ("", _DOWNLOAD),
    "-a": ("--served-model-name", ""),
    "--alias": ("--served-model-name", ""),
    "-c": ("--max-model-len", "per request; --num-blocks is for all requests"),
    "--ctx-size": ("--max-model-len", "per request; --num-blocks is for all requests"),
    "-np": ("--max-num-seqs", ""),
    "--parallel": ("--max-num-seqs", ""),
    "-b": ("--max-num-batched-tokens", ""),
    "--batch-size": ("--max-num-batched-tokens", ""),
    "-ub": ("--prefill-chunk", ""),
    "--ubatch-size": ("--prefill-chunk", ""),
    "-t": ("--threads-per-rank", ""),
    "--threads": ("--threads-per-rank", ""),
    "-tb": ("--threads-per-rank", ""),
    "--threads-batch": ("--threads-per-rank", ""),
    "-ngl": ("--device", "cpu, cuda, or one for each stage: cpu,cuda:0"),
    "--gpu-layers": ("--device", "cpu, cuda, or one for each stage: cpu,cuda:0"),
    "--n-gpu-layers": ("--device", "cpu, cuda, or one for each stage: cpu,cuda:0"),
    "-dev": ("--device", "cpu, cuda, or one for each stage: cpu,cuda:0"),
    "-mg": ("--device", "a GPU is cuda:N"),
    "--main-gpu": ("--device", "a GPU is cuda:N"),
    "-sm": ("--pipeline-parallel-size", "by layers; --tensor-parallel-size cuts each layer"),
    "--split-mode": ("--pipeline-parallel-size", "by layers; --tensor-parallel-size cuts each layer"),
    "-ts": ("--partition", "layers of each stage"),
    "--tensor-split": ("--partition", "layers of each stage"),
    "--rpc": ("", _ONE_HOST),
    "--numa": ("--pin-threads", "auto, on or off"),
    "--cpu-mask": ("--pin-threads", "auto, on or off"),
    "-ctk": ("", _OWN_TYPE),
    "-ctv": ("", _OWN_TYPE),
    "--cache-type-k": ("", _OWN_TYPE),
    "--cache-type-v": ("", _OWN_TYPE),
    "-fa": ("", _ONE_BACKEND),
    "--flash-attn": ("", _ONE_BACKEND),
    "-cb": ("", _ALWAYS),
    "--cont-batching": ("", _ALWAYS),
    "--cache-reuse": ("", "--enable-prefix-caching is on"),
    "--mlock": ("", "weights are read into memory and stay there"),
    "--no-mmap": ("", "weights are read into memory and stay there"),
    "--jinja": ("", _ALWAYS),
    "--chat-template-file": ("--chat-template", ""),
    "--reasoning-format": ("--reasoning-parser", ""),
    "--reasoning-budget": ("", "max_tokens of a request bounds reasoning and answer together"),
    "--ssl-key-file": ("--ssl-keyfile", ""),
    "--ssl-cert-file": ("--ssl-certfile", ""),
    "-to": ("--write-timeout", "and --body-timeout"),
    "--timeout": ("--write-timeout", "and --body-timeout"),
    "--embedding": ("", "every model serves texts and embeddings"),
    "--embeddings": ("", "every model serves texts and embeddings"),
    "--metrics": ("", f"{_ALWAYS}: /metrics"),
    "--slots": ("", f"{_ALWAYS}: /debug/pipeline"),
    "-s": ("--seed", ""),
    "-n": ("", f"max_tokens: {_IN_REQUESTS}"),
    "--n-predict": ("", f"max_tokens: {_IN_REQUESTS}"),
    "--predict": ("", f"max_tokens: {_IN_REQUESTS}"),
    "--temp": ("", _IN_REQUESTS),
    "--top-k": ("", _IN_REQUESTS),
    "--top-p": ("", _IN_REQUESTS),
    "--min-p": ("", _IN_REQUESTS),
    "--repeat-penalty": ("", _IN_REQUESTS),
    "--grammar": ("", "requests bring their grammars"),
    "--json-schema": ("", "requests bring their schemas"),
    "--rope-scaling": ("", "it is read from config.json"),
    "--rope-freq-base": ("", "it is read from config.json"),
    "--lora": ("", _NO_ADAPTERS),
    "--mmproj": ("", _TEXT_ALONE),
    "-md": ("--speculative-model", ""),
    "--model-draft": ("--speculative-model", ""),
}


def _merged() -> dict[str, ForeignFlag]:
    """Return the three tables as one; a flag that several engines have means the same in all of them."""
    merged: dict[str, ForeignFlag] = {}
    for engine, table in ((VLLM, _OF_VLLM), (SGLANG, _OF_SGLANG), (LLAMA_CPP, _OF_LLAMA_CPP)):
        for name, (ours, remark) in table.items():
            engines = (*merged[name].engines, engine) if name in merged else (engine,)
            merged[name] = ForeignFlag(engines=engines, ours=ours, remark=remark)
    return merged


FOREIGN_FLAGS: Mapping[str, ForeignFlag] = _merged()
