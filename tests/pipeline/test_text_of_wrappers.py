"""Text models within models of more than text: against the whole model by transformers, in layouts of stages
and ranks, and without a byte of the other parts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from depth import soaked
from hand_core import Wanted, small_core
from hf_reference import MIN_MARGIN
from kernel_builds import built
from margins import smallest_margin
from penstock.errors import CheckpointError
from penstock.executor.inprocess import InprocessExecutor
from penstock.families.registry import load_spec
from penstock.families.text_names import text_name
from penstock.hosts.weights.needed_tensors import tensor_groups
from penstock.hosts.weights.weight_wire import TensorShape
from penstock.kernels.cpu.library import KERNEL_NAMES
from penstock.kernels.cpu.ops import CpuKernels
from penstock.rank.loading import load_rank
from penstock.weights.checkpoint import Checkpoint, read_header
from rank_configs import make_rank_configs
from stage_driver import StageDriver
from wrapped_models import WRAPPED, logits_after, whole_model

PROMPT = torch.randint(3, 150, (40,), generator=torch.Generator().manual_seed(5)).tolist()
PROMPTS = [[3 + (7 * i + 3 * j) % 140 for j in range(5 + 14 * i)] for i in range(3)]
NUM_TOKENS = 12
COMPARED = ["gemma3", "ministral3", "qwen3_vl", *soaked("mistral3", "qwen2_5_vl")]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=COMPARED)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRAPPED[request.param].make(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("with_kernels", [True, *soaked(False)])
def test_a18_a_text_model_within_another_equals_the_whole_model(checkpoint: Path, with_kernels: bool) -> None:
    own_kernels = CpuKernels(built(), frozenset(KERNEL_NAMES)) if with_kernels else None
    model, ids = whole_model(checkpoint), list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(logits_after(model, ids)[-1].argmax()))
    logits = logits_after(model, ids)
    top = logits[len(PROMPT) - 1 : -1].topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > MIN_MARGIN
    driver = StageDriver(checkpoint, (1,), kernels=own_kernels)
    assert driver.greedy(0, PROMPT, NUM_TOKENS, chunk=9) == ids[len(PROMPT) :]
    found = StageDriver(checkpoint, (2,), kernels=own_kernels).prefill(0, ids, 7)
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)


def tokens(model: Path, tp: tuple[int, ...], kernels: str) -> list[list[int]]:
    executor = InprocessExecutor(make_rank_configs(model, len(tp), tp=tp, kernels=kernels))
    executor.start()
    wanted = [Wanted(list(prompt), 12) for prompt in PROMPTS]
    small_core(len(tp), 0, 8).generate(executor, wanted)
    executor.shutdown()
    return [request.output for request in wanted]


@pytest.mark.parametrize("name", ["ministral3", *soaked("gemma3")])
@pytest.mark.parametrize(
    "layouts", [[(2, 1)], *soaked([(1, 1), (2,), (1, 1, 1), (2, 2), (2, 2, 2)])], ids=str
)
def test_a10_b1_layouts_of_a_text_model_within_another(
    tmp_path: Path, name: str, layouts: list[tuple[int, ...]]
) -> None:
    model = WRAPPED[name].make(tmp_path)
    whole = tokens(model, (1,), "off")
    assert smallest_margin(model, PROMPTS, whole) > MIN_MARGIN
    for tp in layouts:
        assert tokens(model, tp, "auto") == whole, tp


def spoil_other_parts(file: Path) -> int:
    """Write NaN over all that is not the text model's, and return how many bytes that has."""
    header = read_header(file)
    with file.open("r+b") as opened:
        for name, entry in header.items():
            if text_name(name) is None:
                opened.seek(entry.begin)
                opened.write(b"\xff" * (entry.end - entry.begin))
    text = [entry for name, entry in header.items() if text_name(name) is not None]
    assert 0 < len(text) < len(header)
    return sum(entry.end - entry.begin for entry in text)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_a12_of_the_other_parts_nothing_is_read_or_sent(tmp_path: Path, name: str) -> None:
    model = WRAPPED[name].make(tmp_path)
    num_text_bytes = spoil_other_parts(model / "model.safetensors")
    configs, spec = make_rank_configs(model, 2), load_spec(model)
    reports = [load_rank(config, lambda done, total: None).report for config in configs]
    read_twice = spec.tie_word_embeddings * spec.embedding_parameters() * 4
    assert sum(report.bytes_read for report in reports) == num_text_bytes + read_twice
    entries = map(Checkpoint(model).entry, sorted(Checkpoint(model).names))
    described = [TensorShape(entry.name, entry.dtype, entry.shape) for entry in entries]
    groups = [group for config in configs for group in tensor_groups(described, spec, config)]
    assert all(each.startswith(("model.layers.", "model.embed", "model.norm", "lm_head")) for group in groups
               for each in group.names)  # fmt: skip
    assert sum(group.num_bytes for group in groups) == num_text_bytes + read_twice


def renamed(directory: Path, into: Path, shards: int = 1) -> Path:
    """The same checkpoint with the names that today's writers give: the text model behind `model`."""
    into.mkdir()
    tensors = load_file(directory / "model.safetensors")
    names = {name: text_name(name) or f"model.{name}" for name in tensors}
    moved = {
        name if name.startswith(("lm_head", "model.vision", "model.multi"))
        else name.replace("model.", "model.language_model.", 1): tensors[stored].clone()
        for stored, name in names.items()
    }  # fmt: skip
    (into / "config.json").write_bytes((directory / "config.json").read_bytes())
    if shards == 1:
        save_file(moved, into / "model.safetensors")
        return into
    files = {name: f"part-{index % shards}.safetensors" for index, name in enumerate(sorted(moved))}
    for file in set(files.values()):
        save_file({name: moved[name] for name in moved if files[name] == file}, into / file)
    (into / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return into


@pytest.mark.parametrize("shards", [1, 2])
def test_every_form_of_names_is_read(tmp_path: Path, shards: int) -> None:
    old = WRAPPED["mistral3"].make(tmp_path / "old")
    new = renamed(old, tmp_path / "new", shards)
    if shards == 1:
        with safe_open(new / "model.safetensors", "pt") as file:
            assert "model.language_model.norm.weight" in file.keys()  # noqa: SIM118
    assert Checkpoint(new).names == Checkpoint(old).names
    assert torch.equal(*(StageDriver(each).prefill(0, PROMPT, 16) for each in (old, new)))


def test_two_tensors_of_one_name_in_the_text_model_are_refused(tmp_path: Path) -> None:
    model = WRAPPED["mistral3"].make(tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["language_model.model.norm.weight"].clone()
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        Checkpoint(model)


def test_a_tensor_that_the_text_model_lacks_is_missed_by_its_name(tmp_path: Path) -> None:
    model = WRAPPED["mistral3"].make(tmp_path)
    tensors = load_file(model / "model.safetensors")
    del tensors["language_model.model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        load_rank(make_rank_configs(model, 1)[0], lambda done, total: None)
