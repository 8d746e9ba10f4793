"""vLLM's CPU build, offline, as its CPU guide sets it up. Started by `cpu_peers.py`; see `peer_protocol`.

Left to itself it binds to one core; here it is bound to as many as it has threads, and tcmalloc and Intel's
OpenMP are preloaded. A preload is read when a process starts, so the script starts itself over once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peer_protocol import Loaded, Settings, read_settings, serve

KV_CACHE_GIB = "4"
MAX_BATCHED_TOKENS = 2048
PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
MARK = "PENSTOCK_PEER_PRELOADED"


def library_folders() -> Iterable[Path]:
    """Where a preloaded library may lie: in this Python environment first, then in the system."""
    yield Path(sys.prefix, "lib")
    yield from Path("/usr/lib").glob("*-linux-gnu")
    yield from map(Path, ("/usr/lib64", "/usr/lib", "/usr/local/lib"))


def find_library(name: str) -> Path | None:
    candidates = (folder / name for folder in library_folders())
    return next((path for path in candidates if path.exists()), None)


def bound_cores(threads: int, processes: int) -> str:
    """The first cores that we may use, `threads` for each of vLLM's processes, as its variable wants them."""
    cores = list(map(str, sorted(os.sched_getaffinity(0))))
    return "|".join(",".join(cores[process * threads :][:threads]) for process in range(processes))


def environment(threads: int, processes: int) -> dict[str, str]:
    """What vLLM needs to be told before its process starts."""
    found = [str(path) for path in map(find_library, PRELOADED) if path is not None]
    return {
        "LD_PRELOAD": ":".join(found),
        "VLLM_CPU_OMP_THREADS_BIND": bound_cores(threads, processes),
        "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def start_over(settings: Settings) -> None:
    """Replace this process by itself with the environment that vLLM needs."""
    os.environ.update(environment(settings.threads, settings.stages * settings.ranks) | {MARK: "1"})
    os.execv(sys.executable, [sys.executable, *sys.argv])


def speculative_config(guesses: int) -> dict[str, Any] | None:
    """Lengths of n-grams as in vLLM's own example."""
    lengths = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    return {"method": "ngram", "num_speculative_tokens": guesses, **lengths} if guesses else None


class Vllm:
    """vLLM's engine; its core is a child process, and its stages are that one's."""

    def __init__(self, settings: Settings) -> None:
        from vllm import LLM

        self._llm: Any = LLM(
            str(settings.model),
            dtype="bfloat16",
            pipeline_parallel_size=settings.stages,
            tensor_parallel_size=settings.ranks,
            max_model_len=settings.max_len,
            max_num_seqs=settings.max_batch,
            max_num_batched_tokens=settings.chunk or MAX_BATCHED_TOKENS,
            enable_prefix_caching=False,
            speculative_config=speculative_config(settings.guesses),
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    def close(self) -> None:
        del self._llm


def load(settings: Settings) -> Loaded:
    missing = [name for name in PRELOADED if find_library(name) is None]
    notes = [f"cores {bound_cores(settings.threads, settings.stages * settings.ranks)} bound"]
    notes += [f"{name} not found and not preloaded" for name in missing]
    return Loaded(generator=Vllm(settings), packages=("vllm-cpu", "vllm", "torch"), notes=tuple(notes))


if __name__ == "__main__":
    if MARK not in os.environ:
        start_over(read_settings())
    serve(load)
