"""The spec of Llama: the shape that most decoder-only checkpoints share, read from a configuration.

`read_decoder` holds what this shape's families have in common; another family states only its differences.
Called by `families.registry`.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.families.config_fields import ConfigFields
from penstock.families.kinds import Activation
from penstock.families.quantization_fields import read_quantization
from penstock.families.rope_fields import MAX_POSITIONS, read_rope, stretched_positions
from penstock.families.rope_spec import RopeSpec
from penstock.families.spec import ModelSpec
from penstock.families.window_fields import NO_WINDOWS, WindowRule, read_windows

_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
MAX_LAYERS = 1024
_MAX_WIDTH = 1 << 20
_MAX_HEADS = 4096
_MAX_HEAD_DIM = 4096
_MAX_VOCABULARY = 1 << 24


def llama_spec(config: ConfigFields, architecture: str) -> ModelSpec:
    """Return the spec of `LlamaForCausalLM`: one flag gives attention its biases, and another the MLP."""
    attention_bias = config.flag("attention_bias", False)
    return read_decoder(
        config,
        architecture,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def read_decoder(
    config: ConfigFields,
    architecture: str,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    windows: WindowRule = NO_WINDOWS,
    read_rope: Callable[[ConfigFields, int], RopeSpec] = read_rope,
    activation_field: str = "hidden_act",
    activation: str = "silu",
    head_dim: int | None = None,
    max_positions: int = 2048,
    eps: float = 1e-6,
    is_tied: bool = False,
) -> ModelSpec:
    """Return a spec with the fields that all families share.

    Args:
        windows: which layers have a sliding window, and how long it is.
        read_rope: reads the rotary embedding, from the configuration and the length of its longest sequence.
        activation_field: name of the activation function's field in the configuration.
        activation, head_dim, max_positions, eps, is_tied: values for a configuration that does not give them,
            as in transformers. head_dim None: hidden_size / num_attention_heads.
    """
    vocab_size = config.integer("vocab_size", 1, _MAX_VOCABULARY)
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    max_positions = config.integer("max_position_embeddings", 1, MAX_POSITIONS, max_positions)
    rope = read_rope(config, max_positions)
    num_heads = config.integer("num_attention_heads", 1, _MAX_HEADS)
    bos = config.token_ids("bos_token_id", vocab_size)
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=config.integer("hidden_size", 1, _MAX_WIDTH),
        intermediate_size=config.integer("intermediate_size", 1, _MAX_WIDTH),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=_head_dim(config, num_heads, head_dim),
        vocab_size=vocab_size,
        rms_norm_eps=config.number("rms_norm_eps", 0.0, 1.0, eps),
        rope=rope,
        max_position_embeddings=stretched_positions(rope, max_positions),
        tie_word_embeddings=config.flag("tie_word_embeddings", is_tied),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        dtype=_dtype(config),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=config.token_ids("eos_token_id", vocab_size),
        quantization=read_quantization(config),
        activation=_ACTIVATIONS[config.choice(activation_field, tuple(_ACTIVATIONS), activation)],
        layer_windows=read_windows(config, num_layers, windows),
    )


def _num_kv_heads(config: ConfigFields, num_heads: int) -> int:
    num_kv_heads = config.integer("num_key_value_heads", 1, num_heads, num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})", num_kv_heads
        )
    return num_kv_heads


def _head_dim(config: ConfigFields, num_heads: int, default: int | None) -> int:
    if default is None and not config.has("head_dim"):
        hidden_size = config.integer("hidden_size", 1, _MAX_WIDTH)
        if hidden_size % num_heads:
            expected = f"a multiple of num_attention_heads ({num_heads})"
            raise config.error("hidden_size", expected, hidden_size)
        return _even(config, "hidden_size / num_attention_heads", hidden_size // num_heads)
    return _even(config, "head_dim", config.integer("head_dim", 2, _MAX_HEAD_DIM, default))


def _even(config: ConfigFields, name: str, head_dim: int) -> int:
    if head_dim % 2:
        raise config.error(name, "even, for rotary embedding", head_dim)
    return head_dim


def _dtype(config: ConfigFields) -> str:
    name = "dtype" if config.has("dtype") else "torch_dtype"
    return config.choice(name, _DTYPES, "float32")
