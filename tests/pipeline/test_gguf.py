"""GGUF files through whole ranks: the same tokens from any layout, and their failures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints import make_checkpoint
from deepseek_models import MODELS
from gguf_models import as_gguf, pieces_metadata
from hand_core import Wanted, small_core
from paths import shared_data
from penstock import LLM, SamplingParams
from penstock.errors import ModelChangedError, UsageError
from penstock.executor.inprocess import InprocessExecutor
from penstock.families.registry import load_spec, resolve_model_directory, served_names
from penstock.families.sharding import require_whole_groups
from penstock.gguf.file import GgufFile
from penstock.kvstore import names
from penstock.process.config import FirstLoad, RankConfig
from penstock.rank.loading import load_rank
from rank_configs import make_rank_configs
from weight_heads import WeightHead, WeightWorker, at

SIZES = {"layers": 3, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 96}
PROMPTS = [[(7 * i + 3 * j) % 90 for j in range(5 + 11 * i)] for i in range(3)]
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q6_K", "attn_output": "Q5_0"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of as many formats as published ones have."""
    directory = tmp_path_factory.mktemp("mixed")
    checkpoint = make_checkpoint(directory / "checkpoint", tied=True, **SIZES)  # type: ignore[arg-type]
    return as_gguf(checkpoint, directory / "gguf", mixed_blocks).path


def mixed_blocks(name: str) -> str | None:
    return None if "norm" in name else MIXED.get(name.split(".")[-2], "Q4_K")


def outputs(model: Path, num_stages: int, **changes: object) -> list[list[int]]:
    return generated(make_rank_configs(model, num_stages, **changes), num_stages)  # type: ignore[arg-type]


def generated(ranks: list[RankConfig], num_stages: int) -> list[list[int]]:
    executor = InprocessExecutor(ranks)
    executor.start()
    wanted = [Wanted(list(prompt), 12) for prompt in PROMPTS]
    small_core(num_stages, 0, 8).generate(executor, wanted)
    executor.shutdown()
    return [request.output for request in wanted]


def test_any_layout_gives_the_same_tokens(mixed: Path) -> None:
    one = outputs(mixed, 1)
    assert all(len(output) == 12 for output in one)
    assert len({tuple(output) for output in one}) == 3
    for num_stages, tp in ((2, ()), (3, ()), (1, (2,)), (2, (2, 1)), (3, (1, 2, 2))):
        assert outputs(mixed, num_stages, tp=tp) == one, (num_stages, tp)


@pytest.mark.parametrize("form", ["floats", "blocks", "blocks in three files", "latent in three files"])
def test_g1_a_stage_on_another_host_gives_the_same_tokens(mixed: Path, tmp_path: Path, form: str) -> None:
    """The host fetches headers and the tensors of its stage, which two ranks share."""
    model = mixed
    if form.startswith("latent"):
        model = as_gguf(MODELS["v2"].make(tmp_path / "checkpoint"), tmp_path / "gguf", num_parts=3).path
    elif form != "blocks":
        checkpoint = make_checkpoint(tmp_path / "checkpoint", tied=True, **SIZES)  # type: ignore[arg-type]
        block_of = (lambda name: None) if form == "floats" else mixed_blocks
        model = as_gguf(checkpoint, tmp_path / "gguf", block_of, num_parts=3).path
    head = WeightHead(tmp_path / "head", model)
    desk = WeightWorker(tmp_path / "desk", head)
    try:
        ranks = make_rank_configs(model, 2, tp=(1, 2))
        placed = [ranks[0], *(at(desk.find(rank), rank, head.identity) for rank in ranks[1:])]
        assert [rank.model_path == str(model) for rank in placed] == [True, False, False]
        assert generated(placed, 2) == outputs(model, 1)
    finally:
        desk.close()
        head.close()


def test_ranks_share_latent_attention_whose_projections_are_apart(tmp_path: Path) -> None:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64)
    ranks = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    checkpoint = MODELS["v2"].make(tmp_path / "checkpoint", **sizes, **ranks)

    def block_of(name: str) -> str | None:
        return None if "norm" in name or "gate_inp" in name else "Q8_0"

    model = as_gguf(checkpoint, tmp_path / "gguf", block_of).path
    one = outputs(model, 1)
    assert len({tuple(output) for output in one}) == 3
    for num_stages, tp in ((3, ()), (1, (2,)), (2, (2, 1))):
        assert outputs(model, num_stages, tp=tp) == one, (num_stages, tp)


def test_without_kernels_the_numbers_are_nearly_the_same(mixed: Path) -> None:
    assert outputs(mixed, 2, kernels="off")[0][:4] == outputs(mixed, 2)[0][:4]


def test_more_ranks_than_blocks_allow_are_refused_by_name(mixed: Path) -> None:
    spec = load_spec(mixed)
    require_whole_groups(spec, 2, None)
    with pytest.raises(UsageError, match=r"mlp.down_proj is quantised in groups: 128 of 512 inputs"):
        require_whole_groups(spec, 4, None)


def test_r3_a_changed_file_is_refused_in_a_later_load(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "SAMPLE_BYTES", 16)
    monkeypatch.setattr(names, "GGUF_SAMPLE_BYTES", 64)
    path = tmp_path / "model.gguf"
    content = bytearray(mixed.read_bytes())
    path.write_bytes(content)
    (config,) = make_rank_configs(path, 1)
    first = load_rank(config, lambda done, total: None)
    table = FirstLoad(identity=first.samples.identity, digests=first.samples.table + first.report.digests)
    again = msgspec.structs.replace(config, first_load=table)
    assert load_rank(again, lambda done, total: None).report.digests == first.report.digests
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelChangedError, match=r"model.gguf: tensor \S+.weight"):
        load_rank(again, lambda done, total: None)


def test_a_file_or_a_directory_with_one_is_a_model(mixed: Path, tmp_path: Path) -> None:
    assert resolve_model_directory(str(mixed)) == mixed.resolve()
    (tmp_path / "Tiny-Q4_K_M.gguf").symlink_to(mixed)
    assert resolve_model_directory(str(tmp_path)).name == "Tiny-Q4_K_M.gguf"
    assert served_names(str(tmp_path / "Tiny-Q4_K_M.gguf"), []) == ["Tiny-Q4_K_M"]


def test_a_trained_checkpoint_as_gguf_says_its_published_words(tmp_path: Path) -> None:
    """Heads are in ggml's order and the vocabulary is in the file; `golden.json` has the ids and the text."""
    source = shared_data("models", "stories260K")
    golden = json.loads((source / "golden.json").read_text())
    path = as_gguf(source, tmp_path, more_metadata=pieces_metadata(source / "tokenizer.json")).path
    ids, text = golden["greedy_ids"], golden["greedy_text"]
    sampling = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True, logprobs=1)
    with LLM(
        str(path),
        dtype="float32",
        pipeline_parallel_size=2,
        num_blocks=64,
        distributed_executor_backend="inprocess",
        threads_per_rank=1,
    ) as llm:
        by_ids, by_text = llm.generate([{"prompt_token_ids": [1]}, "Once upon a time"], sampling)
    first, second = by_ids.outputs[0], by_text.outputs[0]
    assert first.token_ids == ids[:96]
    assert text.startswith(first.text)
    assert first.logprobs is not None
    for token_id, entry, expected in zip(ids, first.logprobs, golden["greedy_logprobs"], strict=False):
        assert entry[token_id].logprob == pytest.approx(expected, abs=1e-3)
    assert by_text.prompt_token_ids is not None
    known = len(by_text.prompt_token_ids)
    assert by_text.prompt_token_ids == [1, *ids[: known - 1]]
    assert second.token_ids == ids[known - 1 : known + 95]
    assert text.startswith("Once upon a time" + second.text)


@pytest.mark.parametrize(("tp", "num_parts"), [((1, 1), 1), ((2,), 1), ((2, 2), 3)])
def test_ranks_read_their_shares_and_the_header_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: tuple[int, ...], num_parts: int
) -> None:
    """Together each block once, and norms on all ranks of a stage; calls that read a file are counted."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **SIZES)  # type: ignore[arg-type]
    form = {True: None, False: "Q8_0"}
    made = as_gguf(checkpoint, tmp_path / "gguf", lambda name: form["norm" in name], num_parts=num_parts)
    model = made.path
    file = GgufFile.open(model)
    counted = {"preadv": 0, "pread": 0}
    preadv, pread = os.preadv, os.pread

    def counting_preadv(*arguments: Any) -> int:
        count = preadv(*arguments)
        counted["preadv"] += count
        return count

    def counting_pread(*arguments: Any) -> bytes:
        content = pread(*arguments)
        counted["pread"] += len(content)
        return content

    monkeypatch.setattr(os, "preadv", counting_preadv)
    monkeypatch.setattr(os, "pread", counting_pread)
    configs = make_rank_configs(model, len(tp), tp=tp)
    counted.update(preadv=0, pread=0)
    reports = [load_rank(config, lambda done, total: None).report for config in configs]
    tensors = file.tensors.values()
    norms = [tensor.num_bytes for tensor in tensors if "norm" in tensor.name]
    shared_norms = sum(norms) * (max(tp) - 1)  # all stages have as many ranks
    assert sum(report.bytes_read for report in reports) == sum(t.num_bytes for t in tensors) + shared_norms
    assert counted["preadv"] == sum(report.bytes_read for report in reports)
    assert max(report.bytes_read for report in reports) < 0.75 * sum(tensor.num_bytes for tensor in tensors)
    # Once a rank: the configuration and the places of tensors are of one reading.
    assert counted["pread"] == len(configs) * file.header_bytes
