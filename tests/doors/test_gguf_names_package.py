"""Tensors of every architecture that is read are called as the published `gguf` package calls them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gguf_files import write_gguf
from penstock.families.gguf_kinds import kind_of_file, known_architectures
from penstock.gguf.file import GgufFile

pytestmark = pytest.mark.doors

_PART = re.compile(r"blk\.\{bid\}\.(.+)")
# Found by other rules than a name for a name: experts, corrections, projections that are cut or joined.
_BY_RULES = {"attn_k_b", "attn_v_b", "attn_qkv", "exp_probs_b"}
_BY_RULES |= {f"ffn_{part}_exp{many}" for part in ("gate", "up", "down", "gate_up") for many in ("", "s")}
# Of models that are not served, and what is computed and not stored.
_OTHERS = {"attn_rot_embd", "ffn_norm_exps", "attn_v_norm", "layer_out_norm", "attn_out_norm"}


@pytest.mark.parametrize("architecture", known_architectures())
@pytest.mark.parametrize("num_experts", [0, 4])
def test_parts_of_layers_have_the_packages_names(tmp_path: Path, architecture: str, num_experts: int) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], 4)
    metadata = {"general.architecture": architecture, f"{architecture}.expert_count": num_experts}
    kind = kind_of_file(GgufFile.open(write_gguf(tmp_path / "m.gguf", metadata, {})))
    assert kind is not None
    compared, unknown = 0, set()
    for tensor in gguf.MODEL_TENSORS[numbers[architecture]]:
        match = _PART.fullmatch(gguf.TENSOR_NAMES[tensor])
        if match is None or match[1] in _BY_RULES:
            continue
        ours = kind.name_of(match[1])
        if ours is None:
            unknown.add(match[1])
            continue
        assert names.get_name(f"model.layers.2.{ours}") == f"blk.2.{match[1]}", ours
        compared += 1
    assert compared > 7
    assert unknown <= _OTHERS, "the package knows parts that the reader does not"
