"""Logits of a Qwen2 model in a GGUF file: by llama.cpp, and in float64 over exactly dequantised weights.

    python benchmarks/peers/gguf_logits.py FILE PROMPTS.json OUTPUT.npz THREADS

Run by `gguf_divergence.py` in an environment with llama-cpp-python, gguf and numpy. Writes `reference` and
`llama`, both [prompts, tokens, vocabulary]. The reference is plain numpy: it shares no code with an engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from gguf.quants import dequantize

Array = np.ndarray[Any, np.dtype[Any]]


class Weights:
    """Tensors and metadata of a file."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields

    def number(self, key: str) -> float:
        return float(self._fields[f"qwen2.{key}"].contents())

    def tensor(self, name: str) -> Array:
        """float64, [outputs, inputs] or [outputs]."""
        tensor = self._tensors[name]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float64)


def normed(x: Array, weight: Array, epsilon: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight)


def rotated(x: Array, base: float) -> Array:
    """Rotary embedding of [tokens, heads, head_dim], halves against halves."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def attended(q: Array, k: Array, v: Array) -> Array:
    """Causal attention; q [tokens, heads, head_dim], k and v with as many heads or fewer."""
    repeats = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeats, 1), np.repeat(v, repeats, 1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v))


def reference(path: Path, prompts: Array) -> Array:
    """Logits of all prompts: each weight is dequantised once."""
    weights = Weights(path)
    heads = int(weights.number("attention.head_count"))
    kv_heads = int(weights.number("attention.head_count_kv"))
    base = weights.number("rope.freq_base")
    epsilon = weights.number("attention.layer_norm_rms_epsilon")
    embedding = weights.tensor("token_embd.weight")
    x = embedding[prompts]
    for layer in range(int(weights.number("block_count"))):

        def of(name: str, layer: int = layer) -> Array:
            return weights.tensor(f"blk.{layer}.{name}")

        inner = normed(x, of("attn_norm.weight"), epsilon)
        q, k, v = (
            (inner @ of(f"attn_{name}.weight").T + of(f"attn_{name}.bias")).reshape(*prompts.shape, count, -1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        own = zip(q, k, v, strict=True)  # of each prompt
        mixed = np.stack([attended(rotated(a, base), rotated(b, base), c) for a, b, c in own])
        x = x + mixed.reshape(x.shape) @ of("attn_output.weight").T
        inner = normed(x, of("ffn_norm.weight"), epsilon)
        gate = inner @ of("ffn_gate.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * (inner @ of("ffn_up.weight").T)) @ of("ffn_down.weight").T
    return normed(x, weights.tensor("output_norm.weight"), epsilon) @ embedding.T


def by_llama(path: Path, prompts: Array, threads: int) -> Array:
    size = prompts.shape[1]
    model = llama_cpp.Llama(
        str(path), n_ctx=size, n_batch=size, n_threads=threads, logits_all=True, verbose=False
    )
    found = []
    for ids in prompts.tolist():
        model.reset()
        model.eval(ids)
        found.append(np.array(model.scores[:size], np.float32))
    return np.stack(found)


def main() -> None:
    path, given, output, threads = sys.argv[1:]
    prompts = np.array(json.loads(Path(given).read_text()))
    llama = by_llama(Path(path), prompts, int(threads))
    np.savez(output, reference=reference(Path(path), prompts), llama=llama)


if __name__ == "__main__":
    main()
