"""What a rank needs of a GGUF model comes from the head, or from this host: its own tensors, and headers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from checkpoints import Family, make_checkpoint
from deepseek_models import MODELS as LATENT_MODELS
from deepseek_models import make_with_mtp
from gguf_models import as_gguf
from penstock.errors import CheckpointError, ModelError, ProtocolError
from penstock.families import gguf_names
from penstock.families.experts_spec import ExpertNames
from penstock.families.registry import load_spec
from penstock.gguf.file import GgufFile
from penstock.gguf.part_names import part_paths
from penstock.hosts.weights import weight_client
from penstock.hosts.weights.needed_tensors import tensor_groups
from penstock.hosts.weights.served_models import ServedModel
from penstock.hosts.weights.small_files import MAX_SMALL_BYTES, GgufHeaders, known_files
from penstock.hosts.weights.weight_wire import Description, SmallFile, TensorShape
from penstock.process.config import RankConfig
from rank_configs import make_rank_configs
from weight_heads import WeightHead, WeightWorker, assert_loads_alike, at, loaded, what_was_read

Workers = Callable[..., WeightWorker]
WIDE = {"hidden_size": 256, "intermediate_size": 512}
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q6_K", "attn_output": "Q5_0"}
FACTORS = np.array([1, 2, 3, 4], "<f4")  # of the four pairs of a head of eight


def make_gguf(directory: Path, *, blocks: bool = False, num_parts: int = 1, **config: Any) -> Path:
    """A small model of four layers, in floats or in blocks."""
    sizes = WIDE | config if blocks else config
    checkpoint = make_checkpoint(directory / "checkpoint", **sizes)

    def block_of(name: str) -> str | None:
        is_matrix = "norm" not in name and name.endswith(".weight")
        return MIXED.get(name.split(".")[-2], "Q4_K") if blocks and is_matrix else None

    extra = {} if blocks else {"rope_freqs.weight": FACTORS}
    return as_gguf(checkpoint, directory / "gguf", block_of, extra, num_parts).path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_gguf(tmp_path)


def last_stage(model: Path, num_stages: int = 2) -> RankConfig:
    return make_rank_configs(model, num_stages, are_threads=True, kernels="off")[-1]


MODELS: list[Any] = [
    ("llama", {}, {}),
    ("llama", {"tied": True, "num_parts": 3}, {}),
    ("llama", {"tied": True, "blocks": True}, {"tied_head": "transfer"}),
    ("qwen2", {"blocks": True, "num_parts": 2}, {"tp": (1, 2)}),
    ("mixtral", {}, {"tp": (2, 2), "expert_parallel": True}),
]


@pytest.mark.parametrize(("family", "config", "layout"), MODELS, ids=str)
def test_g1_ranks_read_the_same_bytes_from_what_was_fetched(
    tmp_path: Path, family: Family, config: dict[str, Any], layout: dict[str, Any]
) -> None:
    assert_loads_alike(tmp_path, make_gguf(tmp_path, family=family, layers=2, **config), layout)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_g1_a_rank_fetches_headers_and_its_own_tensors_alone(tmp_path: Path, num_parts: int) -> None:
    model = make_gguf(tmp_path, blocks=True, num_parts=num_parts)
    file, head = GgufFile.open(model), WeightHead(tmp_path / "head", model)
    worker, rank = WeightWorker(tmp_path / "cache", head), last_stage(model)
    own = [
        tensor for tensor in file.tensors.values() if tensor.name.startswith(("blk.2.", "blk.3.", "output"))
    ]
    try:
        found = worker.find(rank)
        num_bytes = sum(tensor.num_bytes for tensor in own)
        assert worker.notes.done == worker.notes.total == num_bytes
        assert loaded(at(found, rank, head.identity)).bytes_read == num_bytes
        described = len(msgspec.msgpack.encode(head.served.open(head.identity).description()))
        assert head.num_bytes < num_bytes + sum(file.data_starts) + described + 2000  # lengths and digests
        for path, header, start in zip(file.parts, part_paths(found), file.data_starts, strict=True):
            assert header.read_bytes() == path.read_bytes()[:start]
        assert found.parent.parent == tmp_path / "cache" / "models"
    finally:
        worker.close()
        head.close()


def test_g1_a_second_start_and_another_layout_fetch_what_is_new(
    head: WeightHead, new_worker: Workers, model: Path
) -> None:
    first = new_worker()
    path = first.find(last_stage(model))
    first.close()
    again = new_worker()
    assert (again.find(last_stage(model)), again.notes.total) == (path, 0)
    again.find(last_stage(model, 4))
    assert again.notes.total == 0
    again.find(make_rank_configs(model, 4)[1])
    assert again.notes.total > 0
    assert len(again.tensor_files) == 6  # three layers, norm, head and factors of the rotation


@pytest.mark.parametrize("num_parts", [1, 2])
def test_g1_a_copy_on_this_host_is_used(tmp_path: Path, num_parts: int) -> None:
    model = make_gguf(tmp_path, num_parts=num_parts)
    copy = Path(shutil.copytree(model.parent, tmp_path / "models" / "copy"))
    head = WeightHead(tmp_path / "head", model)
    worker, rank = WeightWorker(tmp_path / "cache", head, tmp_path / "models"), last_stage(model)
    try:
        found = worker.find(rank)
        assert (worker.notes.total, worker.tensor_files) == (0, [])
        links = {link.resolve() for link in found.parent.glob("weights-*")}
        assert links == {copy / path.name for path in part_paths(model)}
        assert what_was_read(at(found, rank, head.identity)) == what_was_read(rank)
    finally:
        worker.close()
        head.close()


def test_r15_a_torn_connection_goes_on_where_it_was(
    head: WeightHead, new_worker: Workers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_client, "FIRST_PAUSE_S", 0.0)
    rank, worker = last_stage(model), new_worker()
    head.tears = [900, 12_000, 21_000]
    found = worker.find(rank)
    assert head.tears == []
    assert worker.notes.done == worker.notes.total
    assert what_was_read(at(found, rank, head.identity)) == what_was_read(rank)


def test_a_tensor_that_was_not_fetched_is_refused_by_name(
    head: WeightHead, new_worker: Workers, model: Path
) -> None:
    found, first = new_worker().find(last_stage(model)), make_rank_configs(model, 2, are_threads=True)[0]
    with pytest.raises(CheckpointError, match=r"model.gguf: tensor \S+: .*found the end of the file after 0"):
        loaded(at(found, first, head.identity))


def test_r15_a_file_that_is_cut_at_the_head_is_refused_by_name(
    head: WeightHead, new_worker: Workers, model: Path
) -> None:
    worker, rank = new_worker(), last_stage(model)
    head.served.open(head.identity)
    with model.open("r+b") as file:
        file.truncate(model.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"model.gguf: tensor \S+: expected .*\(truncated\)"):
        worker.find(rank)
    model.unlink()
    with pytest.raises(ModelError) as caught:
        worker.find(rank)
    assert str(model.parent) not in str(caught.value)
    assert worker.tensor_files == worker.leftovers == []


def test_r15_a_tensor_that_ends_early_is_refused_by_name(
    head: WeightHead, new_worker: Workers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is cut after the head has looked at it."""
    rank, served = last_stage(model), head.served.open(head.identity)
    monkeypatch.setattr(head.served, "open", lambda identity: served)
    end = served.tensor("blk.3.ffn_up.weight").end
    with model.open("r+b") as file:
        file.truncate(end - 100)
    with pytest.raises(CheckpointError, match=r"model.gguf: tensor \S+: expected \d+ bytes, found the end"):
        new_worker().find(rank)


def test_r15_a_header_that_is_cut_is_refused(
    head: WeightHead, new_worker: Workers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = GgufFile.open(model).data_starts[0]
    cut = model.read_bytes()[: start - 40]
    rank = last_stage(model)
    monkeypatch.setattr(GgufHeaders, "content", lambda *given: cut)
    with pytest.raises(
        CheckpointError, match=r"model.gguf: expected at least .*, found \d+ bytes up to the end"
    ):
        new_worker().find(rank)
    assert head.num_bytes < start + 9000, "no tensor was sent"


def test_r15_a_description_that_is_not_that_of_the_header_is_refused(
    head: WeightHead, new_worker: Workers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, name = ServedModel.description, "blk.3.ffn_up.weight"

    def description(served: ServedModel) -> Description:
        told = real(served)
        tensors = [
            TensorShape(name, "F16", each.shape) if each.name == name else each for each in told.tensors
        ]
        return msgspec.structs.replace(told, tensors=tensors)

    monkeypatch.setattr(ServedModel, "description", description)
    with pytest.raises(ProtocolError, match=r"sent a piece of \d+ bytes"):
        new_worker().find(last_stage(model))


def files(*names: str, num_bytes: int = 10) -> list[SmallFile]:
    return [SmallFile(name, num_bytes, bytes(16)) for name in names]


SPLIT = [f"model-{number:05}-of-00002.gguf" for number in (1, 2)]
BAD_FILES = [
    files("other.gguf"),
    files("../model.gguf"),
    files(SPLIT[0]),
    files(*reversed(SPLIT)),
    files("model.gguf", "model.gguf"),
    files("config.json", "config.json"),
    files("model.gguf", num_bytes=MAX_SMALL_BYTES + 1),
    files("model.gguf", num_bytes=-1),
    files(*[f"model-{number:05}-of-00004.gguf" for number in range(1, 5)], num_bytes=MAX_SMALL_BYTES),
]


@pytest.mark.parametrize("described", BAD_FILES, ids=lambda described: described[-1].name)
def test_r15_headers_that_are_not_those_of_one_model_are_refused(described: list[SmallFile]) -> None:
    with pytest.raises(ProtocolError, match="a file that no rank would read"):
        known_files(described)


def test_headers_and_files_of_a_checkpoint_are_known_and_others_left_alone() -> None:
    assert known_files(files("config.json", "README.md")) == files("config.json")
    assert known_files(files(*SPLIT)) == files(*SPLIT)


def test_the_ends_of_a_gguf_model_are_those_that_its_reader_knows(model: Path) -> None:
    """Its names of the ends are written down twice: who finds weights must not wait for numpy."""
    file, spec = GgufFile.open(model), load_spec(model)
    tensors = [TensorShape(name, "F32", (2,)) for name in (*file.tensors, *gguf_names.ROPE_FACTORS[1:])]
    own = [
        {group.name for group in tensor_groups(tensors, spec, rank)} for rank in make_rank_configs(model, 3)
    ]
    first, between, last = ({name for name in names if not name.startswith("blk.")} for names in own)
    read = {"rope_freqs", "rope_factors_short"}
    assert between == read
    assert first - {"rope_factors_long"} == {"token_embd", *read}
    assert last - {"rope_factors_long"} == {"output_norm", "output", *read}


def needed_of(path: Path, rank: RankConfig) -> tuple[set[str], GgufFile]:
    file = GgufFile.open(path)
    described = [TensorShape(each.name, each.type.name, each.shape) for each in file.tensors.values()]
    groups = tensor_groups(described, load_spec(path), rank)
    return {name for group in groups for name in group.names}, file


@pytest.mark.parametrize("num_parts", [1, 3])
def test_g1_all_pieces_of_a_layers_weights_are_needed_and_no_other_layers(
    tmp_path: Path, num_parts: int
) -> None:
    """Latent vectors are projected to keys and to values by one weight, of which a file has two tensors."""
    checkpoint = LATENT_MODELS["v2"].make(tmp_path / "checkpoint")
    path = as_gguf(checkpoint, tmp_path / "gguf", num_parts=num_parts).path
    for rank in make_rank_configs(path, 2):
        own = [f"blk.{layer}." for layer in range(rank.start_layer, rank.end_layer)]
        needed, file = needed_of(path, rank)
        assert {name for name in needed if name.startswith("blk.")} == {
            name for name in file.tensors if name.startswith(tuple(own))
        }
        assert {f"{layer}attn_{part}_b.weight" for layer in own for part in "kv"} <= needed
        assert not {name for name in needed if "_kv_b." in name}


def test_g1_ranks_read_the_pieces_of_latent_projections_from_what_was_fetched(tmp_path: Path) -> None:
    checkpoint = LATENT_MODELS["v2"].make(tmp_path / "checkpoint")
    path = as_gguf(checkpoint, tmp_path / "gguf", num_parts=2).path
    assert_loads_alike(tmp_path, path, {"tp": (1, 2)})


def test_copies_in_the_layer_behind_the_last_are_not_fetched(tmp_path: Path) -> None:
    path = as_gguf(make_with_mtp(tmp_path / "checkpoint"), tmp_path / "gguf").path
    plain = make_rank_configs(path, 2)[1]
    needed, file = needed_of(path, msgspec.structs.replace(plain, mtp=True))
    behind = {name for name in file.tensors if name.startswith("blk.3.")}
    copies = {f"blk.3.nextn.{name}.weight" for name in ("embed_tokens", "shared_head_head")}
    assert copies < behind
    stored = gguf_names.stored_tensors(file, ExpertNames())
    assert {stored[name].tensor.name for name in load_spec(path).mtp_copies} == copies
    assert needed - needed_of(path, plain)[0] == {"token_embd.weight", *behind - copies}


def test_a_model_in_gguf_is_parsed_once_until_a_file_changes(head: WeightHead, model: Path) -> None:
    first = head.served.open(head.identity)
    assert head.served.open(head.identity) is first
    model.write_bytes(model.read_bytes() + bytes(32))
    assert head.served.open(head.identity) is not first


def test_num_bytes_of_a_block_type_with_rows_that_are_no_blocks_cannot_be(model: Path) -> None:
    for tensor in (TensorShape("a", "Q4_K", (2, 100)), TensorShape("a", "Q4_K", ())):
        with pytest.raises(ProtocolError, match="an impossible tensor"):
            tensor_groups([tensor], load_spec(model), make_rank_configs(model, 2)[0])
