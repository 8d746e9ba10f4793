"""Loading: right values, own bytes only, no memory beside the parameters, every defect named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import checkpoints
from depth import soaked
from penstock.errors import CheckpointError
from penstock.families.registry import load_spec
from penstock.kernels.cpu import library
from penstock.models.decoder import Decoder
from penstock.weights import loader
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loader import LoadReport, load_weights
from penstock.weights.mapping import Target, TensorTarget, tensor_targets, unexpected_names
from stage_driver import load_stage

NUM_LAYERS = 4
STAGES = [(0, 4), (0, 1), (1, 3), (3, 4)]


def build(directory: Path, start: int, end: int, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(load_spec(directory), (start, end), dtype=dtype, device="cpu")


def load(directory: Path, start: int, end: int, dtype: torch.dtype = torch.float32) -> LoadReport:
    return load_weights(build(directory, start, end, dtype), Checkpoint(directory), lambda done, total: None)


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Change the tensors of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    checkpoints.write_safetensors(directory / "model.safetensors", tensors)
    return directory


def bytes_asked_from_the_kernel() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a13_every_slice_equals_its_checkpoint_tensor(
    tmp_path: Path, family: checkpoints.Family, tied: bool, stage: tuple[int, int]
) -> None:
    checkpoints.make_checkpoint(tmp_path, family=family, tied=tied, layers=NUM_LAYERS)
    tensors = load_file(tmp_path / "model.safetensors")
    model = load_stage(tmp_path, *stage)
    targets = tensor_targets(model)
    for target in targets:
        assert torch.equal(target.memory, tensors[target.name]), target.name
    assert sum(target.memory.numel() for target in targets) == sum(p.numel() for p in model.parameters())


def test_a13_fused_projections_are_stacked_in_order(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, family="qwen2", layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = load_stage(tmp_path, 0, 1).layers[0]
    for kind in ("weight", "bias"):
        parts = [tensors[f"model.layers.0.self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(getattr(layer.self_attn.qkv_proj, kind), torch.cat(parts))
    parts = [tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(parts))


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_d8_a_stage_reads_the_bytes_of_its_own_tensors(tmp_path: Path, num_shards: int, tied: bool) -> None:
    checkpoints.make_checkpoint(
        tmp_path, tied=tied, layers=NUM_LAYERS, hidden_size=128, vocab_size=512, num_shards=num_shards
    )
    spec = load_spec(tmp_path)
    for start, end in STAGES:
        model, checkpoint = build(tmp_path, start, end), Checkpoint(tmp_path)
        own = 4 * spec.stage_parameters(start, end)
        targets = tensor_targets(model)
        for target in targets:
            checkpoint.entry(target.name)  # headers are read here, not below
        before = bytes_asked_from_the_kernel()
        report = load_weights(model, checkpoint, lambda done, total: None)
        asked = bytes_asked_from_the_kernel() - before
        assert report.bytes_read == report.tensor_bytes == own
        assert own <= asked <= 1.01 * own


def test_a12_tensors_of_other_stages_are_not_needed(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=NUM_LAYERS)

    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "layers.2" not in name]:
            del tensors[name]

    rewrite(tmp_path, drop)
    assert load(tmp_path, 2, 3).bytes_read > 0
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\."):
        load(tmp_path, 1, 3)


def test_a12_an_unknown_tensor_of_an_own_layer_is_an_error(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=NUM_LAYERS)
    name = "model.layers.2.self_attn.q_proj.bias"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(32)}))
    load(tmp_path, 0, 2)
    load(tmp_path, 3, 4)
    with pytest.raises(CheckpointError, match=f"tensor {name}: expected no such tensor by config.json"):
        load(tmp_path, 2, 3)


def test_a12_layers_after_the_last_one_are_an_error_of_the_last_stage(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=NUM_LAYERS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    load(tmp_path, 0, 2)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.3\."):
        load(tmp_path, 2, 3)


def test_left_over_tensors_of_old_checkpoints_are_fine(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, tied=True, layers=1)
    rewrite(
        tmp_path,
        lambda tensors: tensors.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
            }
        ),
    )
    load(tmp_path, 0, 1)


def test_unexpected_names_are_those_of_own_components() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.ModuleDict({"norm": torch.nn.Linear(1, 1, bias=False)})

    names = ["model.norm.weight", "model.norm.bias", "model.embed_tokens.weight", "model.layers.0.x.weight"]
    assert unexpected_names(tensor_targets(Model()), names) == ["model.layers.0.x.weight", "model.norm.bias"]


def weight_of(target: Target) -> torch.Tensor:
    """The weight as it is held. What is packed is read by multiplying with ones in one place each."""
    if isinstance(target, TensorTarget):
        return target.memory
    ones = torch.eye(target.sink.in_size, dtype=target.sink.dtype)
    product = target.sink.multiply(ones, None).T if not target.sink.gated else None
    if product is None:
        pytest.skip("a gated product cannot be undone")
    return product[target.first_row : target.first_row + target.rows.size]


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_like_torch_converts(
    tmp_path: Path, source: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "CHUNK_BYTES", 64)
    checkpoints.make_checkpoint(tmp_path, layers=1, dtype=source)
    tensors = load_file(tmp_path / "model.safetensors")
    model = load_stage(tmp_path, 0, 1, dtype=dtype)
    for target in tensor_targets(model):
        found = weight_of(target)
        assert found.dtype == dtype
        assert torch.equal(found, tensors[target.name].to(dtype)), target.name


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=2)
    seen: list[tuple[int, int]] = []
    model = build(tmp_path, 0, 2)
    report = load_weights(model, Checkpoint(tmp_path), lambda done, total: seen.append((done, total)))
    assert len(seen) == len(tensor_targets(model))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (report.bytes_read, report.bytes_read)
    assert {total for _, total in seen} == {report.bytes_read}
    assert report.seconds > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_named_with_their_place(
    tmp_path: Path, bad: float, dtype: torch.dtype
) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=2)

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[77] = bad

    rewrite(tmp_path, spoil)
    load(tmp_path, 0, 1, dtype)
    expected = rf"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight: .*{bad} at element 77"
    with pytest.raises(CheckpointError, match=expected):
        load(tmp_path, 1, 2, dtype)


def test_a_bad_number_in_a_later_chunk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CHUNK_BYTES", 64)
    checkpoints.make_checkpoint(tmp_path, layers=1)

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"].view(-1)[-1] = float("nan")

    rewrite(tmp_path, spoil)
    with pytest.raises(CheckpointError, match=f"nan at element {96 * 32 - 1}"):
        load(tmp_path, 0, 1)


def test_a_number_beyond_float16_is_not_turned_into_infinity(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=1)
    rewrite(tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    load(tmp_path, 0, 1, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: .*range of float16") as caught:
        load(tmp_path, 0, 1, torch.float16)
    assert "--dtype" in caught.value.remedy


def test_a_wrong_shape_shows_both(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=1)
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(32, 16)}))
    with pytest.raises(CheckpointError, match=rf"{name}: expected shape \[16, 32\] .*found \[32, 16\]"):
        load(tmp_path, 0, 1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_a_wrong_dtype_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=1)
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=f"{name}: expected a dtype of F32, BF16, F16, found (I8|F64)"):
        load(tmp_path, 0, 1)


@pytest.mark.parametrize(
    ("start", "end", "missing"), [(0, 1, "model.embed_tokens.weight"), (1, 2, "lm_head.weight")]
)
def test_a_missing_end_is_named(tmp_path: Path, start: int, end: int, missing: str) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=2)
    rewrite(tmp_path, lambda tensors: tensors.pop(missing))
    with pytest.raises(CheckpointError, match=f"tensor {missing}: expected this tensor"):
        load(tmp_path, start, end)


def test_a_file_that_shrinks_after_the_check_is_noticed(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=1)
    checkpoint, model = Checkpoint(tmp_path), build(tmp_path, 0, 1)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected 12288 bytes, found the end"):
        load_weights(model, checkpoint, lambda done, total: None)


def test_a_file_that_vanishes_after_the_check_is_noticed(tmp_path: Path) -> None:
    checkpoints.make_checkpoint(tmp_path, layers=1)
    checkpoint, model = Checkpoint(tmp_path), build(tmp_path, 0, 1)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="expected a readable file, found No such file"):
        load_weights(model, checkpoint, lambda done, total: None)


MEMORY_PROBE = """
import sys
from pathlib import Path
import torch
from penstock.kernels.cpu.library import load
from penstock.kernels.cpu.ops import CpuKernels
from penstock.models.decoder import Decoder
from penstock.families.registry import load_spec
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.loader import load_weights

def kib(file, field):
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

directory, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
torch.ones(1000).to(torch.bfloat16).aminmax()
library = load("off" if dtype == torch.float32 else "auto").library
kernels = library and CpuKernels(library, frozenset({"linear"}))
mapped = kib("smaps_rollup", "Rss") - kib("smaps_rollup", "Anonymous")
before, top_before = kib("smaps_rollup", "Anonymous"), kib("status", "VmHWM")
model = Decoder(load_spec(directory), (1, 3), dtype=dtype, device="cpu", kernels=kernels)
report = load_weights(model, Checkpoint(directory), lambda done, total: None)
gained = kib("smaps_rollup", "Anonymous") - before
files = kib("smaps_rollup", "Rss") - kib("smaps_rollup", "Anonymous") - mapped
print(report.tensor_bytes // 1024, gained, kib("status", "VmHWM") - top_before, files)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", *soaked("float32")])  # packed for our kernels, and plain
def test_memory_gained_is_that_of_the_own_tensors(tmp_path: Path, dtype: str) -> None:
    checkpoints.make_checkpoint(
        tmp_path, layers=3, hidden_size=768, intermediate_size=3072, heads=12, vocab_size=512
    )
    command = [sys.executable, "-c", MEMORY_PROBE, str(tmp_path), dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    own, gained, peak, files = map(int, output.split())
    if dtype == "bfloat16" and library.load().library is None:
        pytest.skip("oneDNN prepacks each weight as a whole")
    chunk = loader.CHUNK_BYTES // 1024
    assert own <= gained + 512
    assert gained <= 1.02 * own + 1024
    assert peak <= 1.03 * own + 3 * chunk  # read, converted, and what the check for NaN takes
    assert files < 0.25 * own  # code of libraries, and no mapping of the checkpoint
