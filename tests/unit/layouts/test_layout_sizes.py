"""Sizes of models rank by rank, against what checkpoints hold and against sums over the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from checkpoints import make_checkpoint
from gguf_models import as_gguf
from penstock.config.engine import ModelConfig
from penstock.errors import ModelConfigError, ModelError
from penstock.gguf.file import GgufFile
from penstock.layouts.model_sizes import ModelSizes, RankShard, read_sizes
from published_shapes import write_shape


@pytest.fixture
def gguf_model(tmp_path: Path) -> Path:
    """Blocks of four kinds, and norms in float32."""
    mixed = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q6_K", "attn_output": "Q5_0"}
    checkpoint = make_checkpoint(
        tmp_path / "checkpoint", hidden_size=256, intermediate_size=512, heads=4, kv_heads=2, layers=3
    )
    return as_gguf(
        checkpoint,
        tmp_path / "gguf",
        lambda name: None if "norm" in name else mixed.get(name.split(".")[-2], "Q4_K"),
    ).path


def sizes_of(tmp_path: Path, name: str, **changes: object) -> ModelSizes:
    return read_sizes(ModelConfig(model=str(write_shape(tmp_path / name, name, **changes))))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-8b", 8.03),
        ("llama-70b", 70.55),
        ("llama-405b", 405.85),
        ("mixtral-8x7b", 46.70),
        ("deepseek-v3", 671.03),
    ],
)
def test_i7_published_models_have_their_published_sizes(name: str, billions: float, tmp_path: Path) -> None:
    sizes = sizes_of(tmp_path, name)
    assert sizes.parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert sizes.weight_bytes == 2 * sizes.parameters


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("name", ["llama-70b", "mixtral-8x7b", "deepseek-v3"])
def test_i7_ranks_and_stages_hold_the_model_once(name: str, expert_parallel: bool, tmp_path: Path) -> None:
    sizes = sizes_of(tmp_path, name)
    spec, size = sizes.spec, 4
    cuts = [(0, 3), (3, spec.num_layers - 5), (spec.num_layers - 5, spec.num_layers)]
    ranks = [
        sizes.of_rank(start, end, RankShard(rank, size), expert_parallel=expert_parallel)
        for start, end in cuts
        for rank in range(size)
    ]
    # What every rank of a stage has: norms, routers, latent projections and their biases.
    routers = sum(
        spec.hidden_size * experts.num_experts + experts.routing.is_corrected * experts.num_experts
        for layer in range(spec.num_layers)
        if (experts := spec.experts_of(layer)) is not None
    )
    latent = 0 if spec.latent is None else spec.hidden_size * (spec.latent.query_rank + spec.latent.width)
    repeated = routers + spec.num_layers * (spec.norm_parameters() + latent) + spec.hidden_size
    assert sum(rank.parameters for rank in ranks) == sizes.parameters + (size - 1) * repeated
    if not expert_parallel:
        assert max(rank.weight_bytes for rank in ranks[:size]) == min(
            rank.weight_bytes for rank in ranks[:size]
        )


def test_i7_the_first_stage_has_the_embedding_and_the_last_the_head(tmp_path: Path) -> None:
    sizes = sizes_of(tmp_path, "llama-8b")
    first, middle, last = (sizes.of_rank(*cut) for cut in ((0, 8), (8, 16), (24, 32)))
    table = 128256 * 4096
    assert (first.parameters - middle.parameters, first.head_parameters) == (table, 0)
    assert (last.parameters - middle.parameters, last.head_parameters) == (table + 4096, table)
    tied = sizes_of(tmp_path, "llama-8b", tie_word_embeddings=True)
    assert tied.parameters == sizes.parameters - table
    assert tied.of_rank(24, 32).parameters == last.parameters
    assert tied.of_rank(0, 32).head_bytes == 2 * table


@pytest.mark.parametrize(
    ("name", "size", "kv_bytes"),
    [
        ("llama-70b", 1, 80 * 2 * 8 * 128 * 2),
        ("llama-70b", 4, 80 * 2 * 2 * 128 * 2),
        ("llama-70b", 16, 80 * 2 * 1 * 128 * 2),  # two ranks have the same head
        ("deepseek-v3", 1, 61 * 576 * 2),
        ("deepseek-v3", 8, 61 * 576 * 2),  # the latent vectors are on all
        ("gemma-3", 1, 26 * 2 * 256 * 2),  # as layers with a window are stored, too
    ],
)
def test_i7_kv_bytes_of_a_token(name: str, size: int, kv_bytes: int, tmp_path: Path) -> None:
    sizes = sizes_of(tmp_path, name)
    assert sizes.of_rank(0, sizes.spec.num_layers, RankShard(0, size)).kv_bytes_per_token == kv_bytes


def test_i7_a_checkpoint_has_as_many_bytes_as_are_reckoned(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family="qwen3_moe", layers=3, tied=True, head_dim=8)
    sizes = read_sizes(ModelConfig(model=str(tmp_path)))
    tensors = [tensor for file in tmp_path.glob("*.safetensors") for tensor in load_file(file).values()]
    assert sizes.parameters == sum(tensor.numel() for tensor in tensors)
    assert sizes.weight_bytes == sum(tensor.nbytes for tensor in tensors)


def test_i7_experts_are_read_as_far_as_tokens_need_them(tmp_path: Path) -> None:
    rank = sizes_of(tmp_path, "mixtral-8x7b").of_rank(0, 32)
    experts = 32 * 3 * 4096 * 8 * 14336
    assert rank.expert_bytes == 2 * experts
    assert rank.token_parameters == rank.layer_bytes // 2 - 3 * experts // 4 - 32 * 2 * 4096


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8.0), ("int4", 4.25)])
def test_i7_weights_that_are_quantised_at_load_take_their_bits(
    quantization: str, bits: float, tmp_path: Path
) -> None:
    path = write_shape(tmp_path, "llama-8b")
    sizes = read_sizes(ModelConfig(model=str(path), quantization=quantization))  # type: ignore[arg-type]
    table = 128256 * 4096
    multiplied = sizes.parameters - 2 * table
    assert sizes.weight_bytes == pytest.approx(multiplied * bits / 8 + table * (2 + bits / 8), rel=1e-3)
    assert sizes.form == quantization


def test_i7_a_quantised_checkpoint_takes_the_bits_that_its_config_says(tmp_path: Path) -> None:
    section = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    sizes = sizes_of(tmp_path, "llama-8b", quantization_config=section)
    table = 128256 * 4096
    multiplied = sizes.parameters - 2 * table
    assert sizes.weight_bytes == pytest.approx(multiplied * 4.125 / 8 + 4 * table, rel=1e-3)
    assert "int4" in sizes.form


def test_i7_a_gguf_file_takes_the_bytes_of_its_blocks(gguf_model: Path) -> None:
    sizes = read_sizes(ModelConfig(model=str(gguf_model)))
    file = GgufFile.open(gguf_model)
    blocks = sum(
        tensor.num_bytes
        for name, tensor in file.tensors.items()
        if tensor.type.name not in ("F32", "BF16", "F16")
    )
    floats = sum(
        tensor.num_bytes // 4 * sizes.item_bytes
        for tensor in file.tensors.values()
        if tensor.type.name == "F32"
    )
    assert sizes.weight_bytes == pytest.approx(blocks + floats, rel=1e-3)
    assert "gguf" in sizes.form
    whole = read_sizes(ModelConfig(model=str(gguf_model), gguf_dequantize=True))
    assert whole.weight_bytes == whole.parameters * whole.item_bytes


def test_i7_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    path = write_shape(tmp_path, "llama-8b").rename(tmp_path / "llama.json")
    with pytest.raises(ModelConfigError, match="is not called"):
        read_sizes(ModelConfig(model=str(path)))
    with pytest.raises(ModelError):
        read_sizes(ModelConfig(model=str(tmp_path / "absent")))


def test_a_config_that_is_a_link_in_a_cache_stands_for_the_directory_of_the_link(tmp_path: Path) -> None:
    path = write_shape(tmp_path, "llama-8b").rename(tmp_path / "0f1e2d")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").symlink_to(path)
    assert read_sizes(ModelConfig(model=str(tmp_path / "snapshot" / "config.json"))).spec.num_layers == 32


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", 300 * "x" + ".json"])
def test_a_name_that_no_file_can_have_is_no_model(name: str) -> None:
    with pytest.raises(ModelError):
        read_sizes(ModelConfig(model=name))
