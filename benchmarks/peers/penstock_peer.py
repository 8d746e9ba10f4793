"""Penstock through `LLM.generate`. Started by `cpu_peers.py`; see `peer_protocol`.

Forms of the weights are those of `--quantization`, or those of llama.cpp: then the file that `llama_peer` has
made of the checkpoint is served.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast, get_args

from peer_protocol import Loaded, Settings, serve

from penstock.config.engine import Quantization, SchedulerConfig
from penstock.config.speculation import SpeculationConfig
from penstock.llm.llm import LLM, SamplingParams

KV_CACHE_BYTES = 1 << 30


class Penstock:
    """The engine with its defaults; its processes are children of this one."""

    def __init__(self, settings: Settings) -> None:
        model, quantization = model_of(settings)
        self._llm = LLM(
            str(model),
            dtype="bfloat16",
            quantization=quantization,
            threads_per_rank=settings.threads,
            pipeline_parallel_size=settings.stages,
            tensor_parallel_size=settings.ranks,
            partition=settings.partition,
            prefill_chunk=settings.chunk or SchedulerConfig().prefill_chunk,
            max_model_len=settings.max_len,
            max_num_seqs=settings.max_batch,
            kv_cache_bytes=KV_CACHE_BYTES,
            speculative_method="suffix" if settings.guesses else "off",
            num_speculative_tokens=settings.guesses or SpeculationConfig().num_speculative_tokens,
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    def close(self) -> None:
        self._llm.shutdown()


def model_of(settings: Settings) -> tuple[Path, Quantization]:
    """What is served, and what is done to its weights."""
    form = settings.weights or "none"
    if form in get_args(Quantization):
        return settings.model, cast(Quantization, form)
    file = settings.gguf_file(form)
    if not file.exists():
        raise SystemExit(f"penstock: {file} is not there; llama:{form} makes it")
    return file, "none"


def load(settings: Settings) -> Loaded:
    return Loaded(generator=Penstock(settings), packages=("penstock", "torch"))


if __name__ == "__main__":
    serve(load)
