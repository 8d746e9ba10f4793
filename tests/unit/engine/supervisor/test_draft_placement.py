"""Where the model that drafts runs, and which ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from model_stores import in_hub_cache
from penstock.config.engine import EngineConfig, ModelConfig, ModelImpl, ParallelConfig, SchedulerConfig
from penstock.config.speculation import SpeculationConfig
from penstock.engine.supervisor.draft_placement import require_mtp
from penstock.engine.supervisor.launch import resolve, resolve_replicas
from penstock.errors import ModelConfigError, NotEnoughMemoryError, UsageError
from penstock.families.registry import load_spec
from penstock.hosts.resources import HostResources
from penstock.process.config import DrafterConfig

HOST = HostResources(num_cpus=6, free_bytes=1 << 30, num_gpus=0)
FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
PIECES = {f"piece {token_id}": token_id for token_id in range(90)}


def write_model(directory: Path, pieces: dict[str, int] | None = PIECES, **fields: Any) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(FIELDS | fields))
    if pieces is not None:
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}}))
    return str(directory)


def config_of(
    model: str, draft: str, *, parallel: dict[str, Any] | None = None, **given: Any
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model),
        parallel=ParallelConfig(**(parallel or {})),
        scheduler=SchedulerConfig(max_num_seqs=7),
        speculation=SpeculationConfig(speculative_model=draft, **given),
    )


def drafter_of(config: EngineConfig, host: HostResources = HOST) -> DrafterConfig:
    drafter = resolve(config, [host]).core.drafter
    assert drafter is not None
    return drafter


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path / "model")


@pytest.fixture
def draft(tmp_path: Path) -> str:
    """Its table of tokens is longer, which says nothing."""
    return write_model(tmp_path / "draft", num_hidden_layers=1, vocab_size=128, max_position_embeddings=1024)


def test_it_is_a_rank_with_all_layers(model: str, draft: str) -> None:
    drafter = drafter_of(config_of(model, draft, speculative_quantization="int4", num_speculative_tokens=5))
    rank = drafter.rank
    assert (rank.model_path, rank.num_stages, rank.start_layer, rank.end_layer) == (draft, 1, 0, 1)
    assert (rank.quantization, rank.device, rank.max_num_seqs) == ("int4", "cpu", 7)
    assert drafter.vocab_size == 96
    assert rank.max_model_len == 256 + 5 + 1  # as long as requests are, and what is guessed behind them


def test_a_line_of_the_start_says_so(model: str, draft: str) -> None:
    plan = resolve(config_of(model, draft, speculative_quantization="int8"), [HOST])
    assert "draft drafts: 1 layer, int8, on cpu with 1 thread." in plan.notes


def test_the_line_names_a_model_of_a_store_as_the_user_does(
    model: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory there is named by a hash."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    in_hub_cache(
        tmp_path / "cache", "org/small", {path.name: path.read_bytes() for path in Path(draft).iterdir()}
    )
    plan = resolve(config_of(model, "org/small"), [HOST])
    assert "org/small drafts: 1 layer, bfloat16, on cpu with 1 thread." in plan.notes


def test_a_shorter_context_of_its_own_is_kept(model: str, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "short", max_position_embeddings=64)
    assert drafter_of(config_of(model, draft, num_speculative_tokens=3)).rank.max_model_len <= 64


def test_it_takes_the_cores_that_ranks_leave(model: str, draft: str) -> None:
    def threads(**parallel: Any) -> int:
        return drafter_of(config_of(model, draft, parallel=parallel)).rank.threads

    assert threads(pipeline_parallel_size=2) == 1  # they have three each
    assert threads(pipeline_parallel_size=2, threads_per_rank=2) == 2


def test_no_engine_has_one_that_is_not_asked_for(model: str) -> None:
    assert resolve(EngineConfig(model=ModelConfig(model=model)), [HOST]).core.drafter is None


def test_each_replica_has_its_own(model: str, draft: str) -> None:
    config = config_of(model, draft, parallel={"data_parallel_size": 2})
    plans = resolve_replicas(config, [HOST])
    assert [plan.core.drafter is not None for plan in plans] == [True, True]


def test_it_runs_where_the_first_stage_does(model: str, draft: str) -> None:
    host = msgspec.structs.replace(HOST, num_gpus=2)
    parallel = {"pipeline_parallel_size": 2, "device": "cuda:1,cpu"}
    assert drafter_of(config_of(model, draft, parallel=parallel), host).rank.device == "cuda:1"
    config = config_of(model, draft, parallel=parallel, speculative_device="cpu")
    assert drafter_of(config, host).rank.device == "cpu"


def test_quantised_weights_run_on_the_cpu_and_a_gpu_is_refused_by_the_flag_of_the_draft_model(
    model: str, draft: str
) -> None:
    host = msgspec.structs.replace(HOST, num_gpus=1)
    given: dict[str, Any] = {"parallel": {"device": "cuda:0"}, "speculative_quantization": "int8"}
    assert drafter_of(config_of(model, draft, **given), host).rank.device == "cpu"
    with pytest.raises(UsageError) as raised:
        drafter_of(config_of(model, draft, **given, speculative_device="cuda:0"), host)
    assert "--speculative-device cpu" in raised.value.remedy
    assert "--speculative-quantization" in raised.value.remedy


def test_a_draft_model_whose_files_are_quantised_runs_on_the_cpu_by_itself(
    model: str, tmp_path: Path
) -> None:
    form = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    draft = write_model(tmp_path / "quantised", quantization_config=form)
    host = msgspec.structs.replace(HOST, num_gpus=1)
    given: dict[str, Any] = {"parallel": {"device": "cuda:0"}}
    assert drafter_of(config_of(model, draft, **given), host).rank.device == "cpu"
    with pytest.raises(UsageError, match="a quantised checkpoint") as raised:
        drafter_of(config_of(model, draft, **given, speculative_device="cuda:0"), host)
    assert "--speculative-device cpu" in raised.value.remedy


def test_replicas_share_cores_and_memory(model: str, draft: str) -> None:
    def threads(num_replicas: int) -> int:
        parallel = {"data_parallel_size": num_replicas, "threads_per_rank": 1}
        return drafter_of(config_of(model, draft, parallel=parallel)).rank.threads

    assert (threads(1), threads(2)) == (5, 2)


def test_another_vocabulary_is_refused(model: str, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", {"other": 0} | dict(list(PIECES.items())[1:]))
    with pytest.raises(UsageError, match="a different vocabulary: token 0 is") as raised:
        drafter_of(config_of(model, other))
    assert (raised.value.param, raised.value.code) == ("speculative_model", "other_vocabulary")


def test_without_tokenizers_the_sizes_must_agree(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", None)
    assert drafter_of(config_of(model, write_model(tmp_path / "same", None)))
    with pytest.raises(UsageError, match="the served model has 96 tokens, the draft model 97"):
        drafter_of(config_of(model, write_model(tmp_path / "longer", None, vocab_size=97)))


@pytest.mark.parametrize(
    ("model_impl", "words"),
    [
        ("penstock", "but LlamaForCausalLM has no MTP layer."),
        ("transformers", "has no MTP layer when it runs with the layers of transformers."),
    ],
)
def test_a_model_without_an_mtp_layer_is_refused(model: str, model_impl: ModelImpl, words: str) -> None:
    speculation = SpeculationConfig(speculative_method="mtp")
    config = EngineConfig(model=ModelConfig(model=model), speculation=speculation)
    with pytest.raises(UsageError) as raised:
        require_mtp(config, load_spec(Path(model), model_impl), Path(model))
    assert raised.value.message.endswith(words)


def test_a_directory_without_a_model_is_refused_by_name(model: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelConfigError, match=r"the draft model .*empty") as raised:
        drafter_of(config_of(model, str(tmp_path / "empty")))
    assert raised.value.param == "speculative_model"


def test_a_model_that_does_not_fit_beside_the_ranks_is_refused_by_name(model: str, draft: str) -> None:
    needed = resolve(EngineConfig(model=ModelConfig(model=model)), [HOST])
    weights = 2 * sum(needed.spec.stage_parameters(rank.start_layer, rank.end_layer) for rank in needed.ranks)
    host = msgspec.structs.replace(HOST, free_bytes=weights + 100)
    with pytest.raises(NotEnoughMemoryError, match=r"the draft model .*draft: the weights need"):
        drafter_of(config_of(model, draft), host)
