"""What the MTP layer of a checkpoint gains on one stream, with the real kernels.

    python benchmarks/mtp_layer.py --stages 1,2 --rounds 5

The model is written first: of DeepSeek-V3's form, with random weights. What its layers add to the stream is
multiplied by `--weight`, and the MTP layer looks at the token that follows alone; so the smaller the weight,
the more often it guesses what the model says, and the acceptance is printed.

An engine with the layer and two without (the second says how far equal engines differ) generate the same
greedy texts in turns, each a process per stage as `serve` has them. Tokens must be equal. Prints Markdown for
docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from draft_model import add_run_arguments, compared_with_off
from peers.report import markdown
from safetensors.torch import save_file
from torch import Tensor

_ADDS = ("self_attn.o_proj", "down_proj")  # to the stream
_Shapes = dict[str, tuple[int, ...]]


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The model's config.json."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": 32_000,
        "hidden_size": options.width,
        "intermediate_size": 4 * options.width,
        "moe_intermediate_size": options.width // 2,
        "num_hidden_layers": options.layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 256,
        "q_lora_rank": 384,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": options.experts,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def write_model(directory: Path, config: dict[str, Any], weight: float) -> None:
    """Write the checkpoint."""
    width, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}

    def add(shapes: _Shapes, prefix: str) -> None:
        for name, shape in shapes.items():
            scale = shape[-1] ** -0.5 * (weight if name.endswith(_ADDS) else 1.0)
            values = torch.randn(shape, generator=generator) * scale if len(shape) > 1 else torch.ones(shape)
            tensors[f"{prefix}.{name}.weight"] = values.bfloat16()

    add({"embed_tokens": (vocab, width), "norm": (width,)}, "model")
    tensors["model.embed_tokens.weight"] *= width**0.5
    for layer in range(layers + 1):
        prefix = f"model.layers.{layer}"
        add(_attention(config), prefix)
        if layer < config["first_k_dense_replace"]:
            add(_mlp("mlp", width, config["intermediate_size"]), prefix)
            continue
        inner = config["moe_intermediate_size"]
        add({"mlp.gate": (config["n_routed_experts"], width)}, prefix)
        tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = torch.zeros(config["n_routed_experts"])
        for expert in range(config["n_routed_experts"]):
            add(_mlp(f"mlp.experts.{expert}", width, inner), prefix)
        add(_mlp("mlp.shared_experts", width, inner), prefix)
    prefix = f"model.layers.{layers}"
    add({"enorm": (width,), "hnorm": (width,), "shared_head.norm": (width,)}, prefix)
    looks_at_next = torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1)
    tensors[f"{prefix}.eh_proj.weight"] = looks_at_next.bfloat16()
    tensors["lm_head.weight"] = (torch.randn(vocab, width, generator=generator) * width**-0.5).bfloat16()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


def _attention(config: dict[str, Any]) -> _Shapes:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    plain, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries, latent = config["q_lora_rank"], config["kv_lora_rank"]
    return {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_a_proj": (queries, width),
        "self_attn.q_a_layernorm": (queries,),
        "self_attn.q_b_proj": (heads * (plain + rotary), queries),
        "self_attn.kv_a_proj_with_mqa": (latent + rotary, width),
        "self_attn.kv_a_layernorm": (latent,),
        "self_attn.kv_b_proj": (heads * (plain + value), latent),
        "self_attn.o_proj": (width, heads * value),
    }


def _mlp(name: str, width: int, inner: int) -> _Shapes:
    shapes = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    return {f"{name}.{each}": shape for each, shape in shapes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=8, help="of a layer; two are chosen")
    parser.add_argument("--weight", type=float, default=0.03, help="of what layers add")
    add_run_arguments(parser, guesses=4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write_model(model, config_of(options), options.weight)
        settings = {"speculative_method": "mtp", "num_speculative_tokens": options.guesses}
        rows = [
            compared_with_off(options, model, settings, stages)
            for stages in map(int, options.stages.split(","))
        ]
    header = ["stages", "streams", "off, tokens/s", "mtp", "mtp/off", "control", "accepted/drafted"]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
