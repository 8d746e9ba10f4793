"""Dequantising a GGUF file on request: what is refused, who decodes, and that shares are cut out of blocks.

The package `gguf` is a stand-in here (the real one: tests/doors).
"""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from checkpoints import make_checkpoint
from deepseek_models import MODELS
from gguf_files import Stored, write_gguf
from gguf_models import GgufModel, as_gguf
from hand_core import Wanted, small_core
from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.engine.supervisor.launch import resolve
from penstock.errors import UnsupportedModelError, UsageError
from penstock.executor.inprocess import InprocessExecutor
from penstock.families import gguf_types
from penstock.families.registry import load_spec
from penstock.gguf.block_types import PACKAGE_TYPES, TYPES
from penstock.hosts.resources import HostResources
from penstock.process.config import RankConfig
from penstock.weights import gguf_loader
from penstock.weights.gguf_package import decode_floats
from rank_configs import make_rank_configs
from weight_heads import assert_loads_alike

TYPE = "IQ3_S"
BLOCK_BYTES = 110
SIZES = {"layers": 2, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 96}
FREE = HostResources(num_cpus=2, free_bytes=1 << 40, num_gpus=1)


class Package:
    """A package that knows one type: a block stands for its bytes, again and again, made small."""

    def __init__(self) -> None:
        self.row_counts: list[int] = []

    def dequantize(self, raw: np.ndarray, kind: enum.Enum) -> np.ndarray:
        if kind.name != TYPE:
            raise NotImplementedError(kind.name)
        self.row_counts.append(len(raw))
        blocks = raw.reshape(len(raw), -1, BLOCK_BYTES)
        values = np.concatenate((blocks, blocks, blocks), axis=-1)[:, :, :256]
        return (values.reshape(len(raw), -1).astype(np.float32) - 127.5) / 1024


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    """A stand-in for the package `gguf`, as if it were installed."""
    stand_in, module = Package(), ModuleType("gguf")
    module.GGMLQuantizationType = enum.Enum("GGMLQuantizationType", [TYPE, "TQ1_0"])  # type: ignore[attr-defined, misc]
    module.quants = SimpleNamespace(dequantize=stand_in.dequantize)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gguf", module)
    monkeypatch.setattr(gguf_types, "has_package", lambda: True)
    return stand_in


def made_of(directory: Path, name: str) -> GgufModel:
    checkpoint = make_checkpoint(directory / "checkpoint", **SIZES)  # type: ignore[arg-type]
    return as_gguf(checkpoint, directory / "gguf", lambda tensor: None if "norm" in tensor else name)


def outputs(configs: list[RankConfig]) -> list[list[int]]:
    executor = InprocessExecutor(configs)
    executor.start()
    wanted = [Wanted([(7 * i + j) % 90 for j in range(9)], 10) for i in range(2)]
    small_core(configs[-1].num_stages, 0, 8).generate(executor, wanted)
    executor.shutdown()
    return [request.output for request in wanted]


def ranks(model: Path, num_stages: int = 1, tp: tuple[int, ...] = ()) -> list[RankConfig]:
    return make_rank_configs(model, num_stages, tp=tp, gguf_dequantize=True)


def one_tensor(path: Path, name: str) -> Path:
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    blocks = Stored(shape=(1, kind.block_values), kind=kind.number, content=bytes(kind.block_bytes))
    return write_gguf(path / "m.gguf", {"general.architecture": "llama"}, {"token_embd.weight": blocks})


@pytest.mark.parametrize("name", PACKAGE_TYPES)
def test_a_type_that_is_not_computed_with_is_refused_with_the_setting_that_takes_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = one_tensor(tmp_path, name)
    with pytest.raises(
        UnsupportedModelError, match=rf"m.gguf .*unsupported types: 1 of {name}\..*--gguf-dequantize"
    ):
        load_spec(path)
    monkeypatch.setattr(gguf_types, "has_package", lambda: False)
    with pytest.raises(UnsupportedModelError, match=rf"1 of {name}\. Run `pip install penstock\[gguf\]`"):
        load_spec(path, dequantize=True)


def test_a_type_that_nobody_decodes_is_refused_in_any_case(tmp_path: Path) -> None:
    path = one_tensor(tmp_path, "Q8_K")
    for dequantize in (False, True):
        with pytest.raises(UnsupportedModelError, match="1 of Q8_K") as caught:
            load_spec(path, dequantize=dequantize)
        assert "--gguf-dequantize" not in str(caught.value)


def test_a_package_that_is_missing_or_too_old_is_named(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = torch.zeros(1, BLOCK_BYTES, dtype=torch.uint8)
    for name, reason in (("IQ1_S", "older than the type"), ("TQ1_0", "does not decode it")):
        with pytest.raises(UnsupportedModelError, match=rf"type {name} .*{reason}.*penstock\[gguf\]"):
            decode_floats(name, raw)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModelError, match=r"cannot be imported"):
        decode_floats(TYPE, raw)


def test_decoded_blocks_give_the_tokens_of_their_numbers_in_any_layout(
    package: Package, tmp_path: Path
) -> None:
    """With two ranks a stage, the cut of the down projection is in the middle of a block."""
    made = made_of(tmp_path, TYPE)
    expected = outputs(make_rank_configs(made.plain, 1))
    assert len({tuple(output) for output in expected}) == 2
    for num_stages, tp in ((1, ()), (2, ()), (1, (2,))):
        assert outputs(ranks(made.path, num_stages, tp)) == expected, (num_stages, tp)


def test_g1_another_host_gets_blocks_that_only_the_package_decodes(package: Package, tmp_path: Path) -> None:
    """It reads the header as the head does: with the setting, it takes types without kernels."""
    assert_loads_alike(tmp_path, made_of(tmp_path, TYPE).path, {"gguf_dequantize": True})


def test_blocks_that_are_computed_with_become_floats_as_well(tmp_path: Path) -> None:
    made = made_of(tmp_path, "Q4_K")
    spec = load_spec(made.path, dequantize=True)
    assert (spec.quantization, spec.is_dequantized) == (None, True)
    expected = outputs(make_rank_configs(made.plain, 1))
    assert outputs(ranks(made.path, 2, (2, 1))) == expected


WIDE = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank"), 256)
LATENT = WIDE | {"kv_lora_rank": 256, "qk_nope_head_dim": 32, "v_head_dim": 64, "num_hidden_layers": 2}


def latent_block(name: str) -> str | None:
    """Of a head, keys have one block of 32 a row, and are stored transposed."""
    if "norm" in name or "gate_inp" in name or "exp_probs" in name:
        return None
    return "Q8_0" if "attn_k_b" in name else TYPE


def test_pieces_and_transposed_tensors_are_decoded_in_any_layout(package: Package, tmp_path: Path) -> None:
    """With two ranks a stage, cuts of output and down projections are in the middle of a block."""
    checkpoint = MODELS["v2"].make(tmp_path / "checkpoint", **LATENT)
    made = as_gguf(checkpoint, tmp_path / "gguf", latent_block)
    expected = outputs(make_rank_configs(made.plain, 1))
    assert len({tuple(output) for output in expected}) == 2
    for num_stages, tp in ((1, ()), (2, (1, 2))):
        assert outputs(ranks(made.path, num_stages, tp)) == expected, (num_stages, tp)


def test_fused_tensors_are_decoded_in_any_layout(package: Package, tmp_path: Path) -> None:
    """Query, key and value are rows of one tensor, and so are gates and ups of experts."""
    shape = SIZES | {"intermediate_size": 256, "moe_intermediate_size": 256}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", family="qwen3_moe", **shape)  # type: ignore[arg-type]

    def block_of(name: str) -> str | None:
        return None if "norm" in name or "gate_inp" in name else TYPE

    made = as_gguf(checkpoint, tmp_path / "gguf", block_of, is_fused=True)
    assert {"blk.0.attn_qkv.weight", "blk.0.ffn_gate_up_exps.weight"} <= made.tensors.keys()
    expected = outputs(make_rank_configs(made.plain, 1))
    for num_stages, tp in ((1, ()), (2, (1, 2))):
        assert outputs(ranks(made.path, num_stages, tp)) == expected, (num_stages, tp)


def test_rows_are_decoded_piece_by_piece(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_of(tmp_path, TYPE)
    monkeypatch.setattr(gguf_loader, "PIECE_VALUES", 64 * 256)
    package.row_counts.clear()
    outputs(ranks(made.path))
    assert max(package.row_counts) == 64
    whole = sum(package.row_counts)
    package.row_counts.clear()
    outputs(ranks(made.path, 2))
    assert sum(package.row_counts) == whole, "each stage decodes its own rows"


def test_the_plan_holds_floats_and_says_so(tmp_path: Path) -> None:
    made = made_of(tmp_path, "Q4_K")

    def plan(model: Path, *, dequantize: bool, device: str = "cpu") -> tuple[RankConfig, tuple[str, ...]]:
        config = EngineConfig(
            model=ModelConfig(model=str(model), gguf_dequantize=dequantize, dtype="bfloat16"),
            parallel=ParallelConfig(device=device),
        )
        launch = resolve(config, [FREE])
        return launch.ranks[0], launch.notes

    rank, notes = plan(made.path, dequantize=True, device="cuda")
    assert (rank.device, rank.gguf_dequantize, notes) == ("cuda:0", True, ())
    assert "changes nothing" in plan(made.plain, dequantize=True)[1][0]
    assert not plan(made.path, dequantize=False)[0].gguf_dequantize
    with pytest.raises(UsageError, match=r"with a quantised GGUF file: .* or --gguf-dequantize, which"):
        plan(made.path, dequantize=False, device="cuda")
