"""Where a rank lives, and that one which takes the place of another gets the same weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from checkpoints import change_one_element, make_checkpoint
from gguf_models import as_gguf
from penstock.errors import ModelChangedError, UnsupportedModelError, UsageError
from penstock.gguf import file as gguf_file
from penstock.gguf.part import GgufPart, read_part
from penstock.kvstore import names
from penstock.models.decoder import Decoder
from penstock.process.config import FirstLoad, RankConfig
from penstock.rank import stored_weights
from penstock.rank.loading import LoadedRank, build_runner, device_of, load_rank
from rank_configs import make_rank_configs

MIDDLE = "model.layers.3.mlp.down_proj.weight"  # of stage 1


@pytest.fixture
def rank(tmp_path: Path) -> RankConfig:
    return make_rank_configs(make_checkpoint(tmp_path), 2)[1]


def test_i13_a_rank_lives_where_it_was_put(rank: RankConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of(rank) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of(msgspec.structs.replace(rank, device="cuda:1")) == torch.device("cuda", 1)


@pytest.mark.parametrize(("num_gpus", "seen"), [(0, "finds no GPU"), (1, "finds only 1")])
def test_i13_a_gpu_that_is_not_there_is_refused(
    num_gpus: int, seen: str, rank: RankConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(UsageError, match=f"stage 1 needs cuda:1, .* {seen}.*--device cpu"):
        device_of(msgspec.structs.replace(rank, device="cuda:1"))


def test_a7_a_model_that_cannot_be_cut_is_refused_before_its_weights_are_opened(
    rank: RankConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object) -> None:
        raise AssertionError("the weights were opened")

    monkeypatch.setattr(stored_weights, "Checkpoint", opened)
    with pytest.raises(AssertionError, match="the weights were opened"):
        load_rank(rank, lambda done, total: None)
    monkeypatch.setattr(Decoder, "supports_pp", False)
    with pytest.raises(UnsupportedModelError, match="Decoder does not implement pipeline parallelism"):
        load_rank(rank, lambda done, total: None)


def test_the_header_of_a_gguf_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large vocabulary it takes a tenth of a second or more."""
    path = as_gguf(make_checkpoint(tmp_path / "checkpoint"), tmp_path / "gguf").path
    config, read = make_rank_configs(path, 2)[1], []

    def counted(part: Path, **how: bool) -> GgufPart:
        read.append(part)
        return read_part(part, **how)

    monkeypatch.setattr(gguf_file, "read_part", counted)
    load_rank(config, lambda done, total: None)
    assert read == [path]


def test_only_stages_that_embed_or_sample_keep_token_ids(tmp_path: Path) -> None:
    """Issue 25, point 5."""
    sizes = []
    for config in make_rank_configs(make_checkpoint(tmp_path), 3):
        loaded = load_rank(config, lambda done, total: None)
        rows = build_runner(config, loaded, loaded.storage.allocate(4)).rows
        sizes.append(rows.token_ids.size)
    assert sizes == [4 * 257, 0, 4 * 257]  # rows, and positions of each with one to come


# --- a rank that takes the place of another ----------------------------------------------------------


def load(config: RankConfig) -> LoadedRank:
    return load_rank(config, lambda done, total: None)


def load_all(configs: list[RankConfig]) -> None:
    for config in configs:
        load(config)


def replacement(config: RankConfig, first: LoadedRank) -> RankConfig:
    table = first.samples.table + first.report.digests
    first_load = FirstLoad(identity=first.samples.identity, digests=table)
    return msgspec.structs.replace(config, first_load=first_load)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("tp", [(1, 1), (1, 2)])
def test_r3_one_changed_element_of_a_tensor_is_refused(
    tmp_path: Path, tp: tuple[int, int], quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 25, point 1: the samples do not see it, as they are small here."""
    monkeypatch.setattr(names, "SAMPLE_BYTES", 16)
    make_checkpoint(tmp_path, layers=4)
    configs = make_rank_configs(
        tmp_path, 2, tp=tp, quantization=quantization, are_threads=True, kernels="off"
    )
    again = [replacement(config, load(config)) for config in configs]
    load_all(again)
    content = (tmp_path / "model.safetensors").read_bytes()
    change_one_element(tmp_path, MIDDLE)
    load_all(again[:1])  # the other stage: it has the same bytes still
    with pytest.raises(ModelChangedError) as caught:
        load_all(again[1:])  # one of the ranks has the element
    assert (caught.value.file, caught.value.tensor) == ("model.safetensors", MIDDLE)
    assert caught.value.code == "model_changed"
    (tmp_path / "model.safetensors").write_bytes(content)
    load_all(again)


def test_r3_another_config_is_refused_before_a_weight_is_read(rank: RankConfig) -> None:
    """Equal weights under other numbers in config.json are another model."""
    again = replacement(rank, load(rank))
    config = Path(rank.model_path) / "config.json"
    before = config.read_text()
    config.write_text(before.replace("{", '{"rope_theta": 5000.0,', 1))
    with pytest.raises(ModelChangedError, match=r"^config\.json: expected the bytes"):
        load(again)
    config.write_text(before)
    load(again)


def test_r3_a_file_whose_samples_differ_is_named(rank: RankConfig) -> None:
    again = replacement(rank, load(rank))
    change_one_element(Path(rank.model_path), "model.norm.weight")
    with pytest.raises(ModelChangedError, match=r"^model\.safetensors: expected the bytes"):
        load(again)


def test_g1_a_rank_whose_host_knows_the_model_takes_no_samples_and_says_the_same_identity(
    rank: RankConfig,
) -> None:
    first = load(rank)
    known = msgspec.structs.replace(rank, model_identity=first.samples.identity)
    again = load(replacement(known, first))
    assert again.samples.identity == first.samples.identity
    assert again.samples.table == b""
    with pytest.raises(ModelChangedError):
        load(replacement(msgspec.structs.replace(rank, model_identity=b"another"), first))
