"""Writes the checkpoint of `checkpoint` as a GGUF file in bfloat16, for llama.cpp.

Called by `llama_peer`, in whose environment the `gguf` package is. Vectors are float32, as llama.cpp's own
converter has them. The vocabulary is made up, as prompts are token ids: a program that takes text finds the
token 7 wherever there stands `<t7>` (`token_text`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_PER_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def token_text(index: int) -> str:
    """What stands for a token in a text."""
    return f"<t{index}>"


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of a Qwen2 checkpoint."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, *module, kind = name.split(".")
    return f"blk.{layer}.{_PER_LAYER['.'.join(module)]}.{kind}"


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and bfloat16 bits (uint16) of a safetensors file, mapped and not read."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        yield name, data[begin:end].view("<u2").reshape(entry["shape"])


def write_gguf(directory: Path, target: Path) -> None:
    """Convert `directory` (config.json, model.safetensors) into the file `target`, whole or not at all."""
    target.parent.mkdir(exist_ok=True)
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen2")
    _add_config(writer, json.loads((directory / "config.json").read_text()))
    for name, bits in read_tensors(directory / "model.safetensors"):
        _add_tensor(writer, gguf_name(name), bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_name("random weights")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    vocab_size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([token_text(index) for index in range(vocab_size)])
    writer.add_token_types([gguf.TokenType.USER_DEFINED] * vocab_size)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _add_tensor(writer: gguf.GGUFWriter, name: str, bits: np.ndarray) -> None:
    if bits.ndim == 1:
        writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
    else:
        writer.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
