"""Makes the checkpoint that all engines of `cpu_peers.py` load: seeded random weights in bfloat16.

The shape is Qwen2.5-0.5B's (494 million parameters with a tied head), or a tiny one for a smoke test. The
tokenizer knows single bytes only, which is all that engines need that are given token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

ITEM_BYTES = 2  # bfloat16
WEIGHT_STD = 0.02

FULL_SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
TINY_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def make_config(shape: dict[str, int]) -> dict[str, Any]:
    """`config.json`."""
    return shape | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors of a Qwen2 checkpoint with a tied head."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    kv = head_dim * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
            yield f"{prefix}self_attn.{name}_proj.bias", (rows,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}mlp.gate_proj.weight", (intermediate, hidden)
        yield f"{prefix}mlp.up_proj.weight", (intermediate, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, intermediate)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def make_checkpoint(directory: Path, shape: dict[str, int]) -> None:
    """Write the checkpoint into `directory`, unless there is one already."""
    if (directory / "config.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    config = make_config(shape)
    _write_tokenizer(directory)
    _write_tensors(directory / "model.safetensors", dict(tensor_shapes(config)))
    (directory / "config.json").write_text(json.dumps(config, indent=2))  # last: it says that all is there


def weight_bytes(directory: Path) -> int:
    """Bytes of all tensors, which is what one step reads: the tied table is the head, too."""
    config = json.loads((directory / "config.json").read_text())
    return ITEM_BYTES * sum(int(np.prod(shape)) for _, shape in tensor_shapes(config))


def _write_tokenizer(directory: Path) -> None:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0} | {letter: index for index, letter in enumerate(letters, start=1)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {f"{role}_token": "<eos>" for role in ("bos", "eos", "pad")}
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names)
    (directory / "tokenizer_config.json").write_text(text)


def _write_tensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, position = {}, 0
    for name, shape in shapes.items():
        size = ITEM_BYTES * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    source = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            file.write(_values(name, shape, source).data)


def _values(name: str, shape: tuple[int, ...], source: np.random.Generator) -> np.ndarray:
    """Bits of one tensor, as a new model has it: normal weights, norms of one, biases of zero."""
    if name.endswith("bias"):
        values = np.zeros(shape, np.float32)
    elif "norm" in name:
        values = np.ones(shape, np.float32)
    else:
        values = source.standard_normal(shape, np.float32) * np.float32(WEIGHT_STD)
    return (values.view(np.uint32) >> 16).astype("<u2")  # bfloat16: the upper half of a float32
