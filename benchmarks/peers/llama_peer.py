"""llama.cpp by the low-level binding of `llama-cpp-python`. Started by `cpu_peers.py`; see `peer_protocol`.

As in llama.cpp's own batched benchmark, the token that follows is drawn at random and not chosen from the
logits: every step computes logits for each sequence, but sampling costs nothing here. Its pipeline is a model
over RPC servers (`llama_rpc`), one for each stage. A form of the weights, such as `q4_k_m`, is a file of its
own, which llama.cpp makes of the first one.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
from gguf_writer import write_gguf
from llama_rpc import RpcServers, ServersElsewhere, devices
from peer_protocol import FIRST_ID, Loaded, Settings, serve

BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512
ALL_LAYERS = 999
CELL_MULTIPLE = 256  # llama.cpp rounds the cells of a sequence up to this

Token = tuple[int, int, int, bool]  # id, position, sequence, whether its logits are wanted


SILENT: Any = llama_cpp.llama_log_callback(lambda *_: None)  # llama.cpp keeps the pointer: so must we


class LlamaCpp:
    """One model, and one context for each shape of request: a context's size bounds what it computes."""

    def __init__(self, settings: Settings, gguf: Path) -> None:
        llama_cpp.llama_log_set(SILENT, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE  # weights in memory of its own, not a mapped file
        self._servers: Any = contextlib.nullcontext()
        if settings.stages > 1:
            self._servers = (
                ServersElsewhere(settings.rpc_servers.split(","))
                if settings.rpc_servers
                else RpcServers(settings.stages, settings.threads)
            )
            self._devices = devices(self._servers.endpoints)  # kept: llama.cpp reads it
            params.devices = ctypes.cast(self._devices, ctypes.c_void_p).value
            params.n_gpu_layers = ALL_LAYERS
        self._model: Any = llama_cpp.llama_model_load_from_file(str(gguf).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {gguf.name}")
        self._threads = settings.threads
        self._random = random.Random(0)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._contexts: dict[tuple[int, int], Any] = {}

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        length = len(prompts[0])
        context = self._context(len(prompts), length + num_tokens)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        for tokens in prompt_batches(prompts):
            decode(context, tokens)
        for position in range(length, length + num_tokens - 1):
            decode(context, [(self._next_id(), position, row, True) for row in range(len(prompts))])

    def close(self) -> None:
        for context in self._contexts.values():
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(self._model)
        with self._servers:
            pass  # they end here

    def _next_id(self) -> int:
        return self._random.randrange(FIRST_ID, self._vocab_size)

    def _context(self, num_sequences: int, length: int) -> Any:
        cells = -(-length // CELL_MULTIPLE) * CELL_MULTIPLE
        key = (num_sequences, cells)
        if key not in self._contexts:
            self._contexts[key] = self._new_context(num_sequences, cells)
        return self._contexts[key]

    def _new_context(self, num_sequences: int, cells: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_sequences * cells
        params.n_batch, params.n_ubatch = BATCH_TOKENS, MICRO_BATCH_TOKENS
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = self._threads
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp made no context of {num_sequences} x {cells} tokens")
        return context


def prompt_batches(prompts: list[list[int]]) -> Iterator[Sequence[Token]]:
    """All prompts, one after the other, in batches that llama.cpp takes; logits of each last token only."""
    tokens = [
        (token, position, row, position == len(prompt) - 1)
        for row, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    for begin in range(0, len(tokens), BATCH_TOKENS):
        yield tokens[begin : begin + BATCH_TOKENS]


def decode(context: Any, tokens: Sequence[Token]) -> None:
    """Run one batch and wait for it."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for index, (token, position, row, wanted) in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = wanted
        code = llama_cpp.llama_decode(context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        llama_cpp.llama_synchronize(context)
    finally:
        llama_cpp.llama_batch_free(batch)


def quantize(source: Path, target: Path, form: str, threads: int) -> None:
    """Write the file in another form, whole or not at all."""
    partial = target.with_suffix(".partial")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form.upper()}")
    params.nthread = threads
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params))
    if code != 0:
        raise RuntimeError(f"llama_model_quantize returned {code} for {form}")
    partial.rename(target)


def load(settings: Settings) -> Loaded:
    gguf = settings.gguf_file()
    if not gguf.exists():
        write_gguf(settings.model, gguf)
    if settings.weights:
        source, gguf = gguf, settings.gguf_file(settings.weights)
        if not gguf.exists():
            quantize(source, gguf, settings.weights, settings.threads)
    return Loaded(generator=LlamaCpp(settings, gguf), packages=("llama-cpp-python", "gguf"))


if __name__ == "__main__":
    serve(load)
