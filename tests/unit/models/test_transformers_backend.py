"""Models of transformers: what is refused and when, how arguments are read, and where tensors come from."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Glm4MoeConfig, LlamaConfig

from families import FAMILIES, SIZES
from foreign_families import FOREIGN
from paths import REPOSITORY
from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.engine.supervisor.launch import resolve
from penstock.errors import CheckpointError, ModelConfigError, UnsupportedModelError, UsageError
from penstock.families import transformers_fields
from penstock.families.registry import load_spec
from penstock.hosts.resources import HostResources
from penstock.kernels.cpu.ops import Sight
from penstock.layers.compute import Compute
from penstock.models import transformers_survey
from penstock.models.transformers_attention import Site, Track, attend, read_sight
from penstock.models.transformers_survey import find_layers, survey
from penstock.models.transformers_weights import checkpoint_weights, sources_of
from penstock.rank.loading import load_rank
from rank_configs import make_rank_configs


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FOREIGN["gpt_neox"].make(tmp_path_factory.mktemp("neox"))


def nothing(done: int, total: int) -> None:
    pass


def changed(directory: Path, into: Path, **fields: Any) -> Path:
    """The same checkpoint with another config.json."""
    config = json.loads((directory / "config.json").read_text()) | fields
    (into / "model.safetensors").symlink_to(directory / "model.safetensors")
    (into / "config.json").write_text(json.dumps(config))
    return into


def only_config(directory: Path, model_type: str, architecture: str, **fields: Any) -> Path:
    config = SIZES | {"model_type": model_type, "architectures": [architecture]} | fields
    (directory / "config.json").write_text(json.dumps(config))
    return directory


# --- which layers run -----------------------------------------------------------------------------


def test_our_own_layers_come_first_and_can_be_left_out(neox: Path, tmp_path: Path) -> None:
    llama = FAMILIES["small tied llama"].make(tmp_path)
    assert load_spec(llama).implementation == "penstock"
    assert load_spec(llama, "transformers").implementation == "transformers"
    assert load_spec(neox).implementation == "transformers"
    with pytest.raises(UnsupportedModelError, match="--model-impl"):
        load_spec(neox, "penstock")


def test_without_the_extra_the_remedy_names_it(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModelError) as caught:
        load_spec(neox)
    assert "pip install penstock[hf]" in caught.value.remedy
    assert caught.value.exit_code == 3


def test_an_old_transformers_counts_as_none(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("4.57.1", "5.9.0", "unknown"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        with pytest.raises(UnsupportedModelError, match=r"penstock\[hf\]"):
            load_spec(neox)


def test_the_version_that_is_asked_for_is_the_one_that_is_declared() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    declared = project["project"]["optional-dependencies"]["hf"]
    assert declared == [f"transformers>={'.'.join(map(str, transformers_fields._OLDEST))}"]


def test_code_that_a_checkpoint_names_is_left_alone(neox: Path, tmp_path: Path) -> None:
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    directory = changed(neox, tmp_path, auto_map=names, _attn_implementation="someone/kernel")
    (tmp_path / "evil.py").write_text("raise SystemExit(3)")
    assert load_rank(make_rank_configs(directory, 1)[0], nothing).spec.implementation == "transformers"


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("mamba", "MambaForCausalLM"),  # no attention that could be replaced
        ("gpt_neox", "GPTNeoXForCausalLM2"),
        ("../gpt_neox", "GPTNeoXForCausalLM"),
        ("no_such_type", "GPTNeoXForCausalLM"),
    ],
)
def test_what_transformers_has_not_is_unsupported(tmp_path: Path, model_type: str, architecture: str) -> None:
    with pytest.raises(UnsupportedModelError, match="supported: "):
        load_spec(only_config(tmp_path, model_type, architecture))


def test_numbers_are_read_under_the_names_of_the_family(tmp_path: Path) -> None:
    spec = load_spec(FOREIGN["gpt2"].make(tmp_path))
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.vocab_size) == (3, 32, 4, 150)
    assert spec.max_position_embeddings == 256
    assert spec.eos_token_ids == (2,)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    count = sum(weight.numel() for weight in whole.parameters())
    assert 0.4 * count < spec.stage_parameters(0, 3) <= count  # an estimate, on the low side


# --- what is refused before anything is allocated -------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method fp8.*convert this one first"),
        ({"is_decoder": True}, "is_decoder"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_spec(only_config(tmp_path, "gpt_neox", "GPTNeoXForCausalLM", **fields))


class TwoStacks(nn.Module):
    def __init__(self, *lengths: int) -> None:
        super().__init__()
        for index, length in enumerate(lengths):
            stack = nn.Module()
            stack.layers = nn.ModuleList(nn.ModuleList([nn.Linear(1, 1)] * 3) for _ in range(length))
            self.add_module(f"stack{index}", stack)


def test_s9_the_only_list_of_layers_is_found_and_two_are_refused() -> None:
    assert find_layers(TwoStacks(2, 3), 3) == "stack1.layers"
    with pytest.raises(UnsupportedModelError, match=r"2 lists of 3 layers \(stack0.layers, stack1.layers\)"):
        find_layers(TwoStacks(3, 3), 3)
    with pytest.raises(UnsupportedModelError, match="no list of layers"):
        find_layers(TwoStacks(2), 3)


def test_s9_a_plan_says_which_of_two_lists_is_cut() -> None:
    model = TwoStacks(3)
    model.layers = nn.ModuleList([nn.Linear(1, 1)] * 3)
    model._pp_plan = {"layers": (["hidden_states"], ["hidden_states"])}  # type: ignore[assignment]
    assert find_layers(model, 3) == "layers"


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0}
REFUSED = [
    ("diffllama", "DiffLlamaForCausalLM", {}, "uses attention twice"),
    ("bert", "BertLMHeadModel", {}, "both directions"),
    (
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {"rope_parameters": DYNAMIC},
        "dynamic",
    ),
]


class OddLayer(nn.Module):
    def forward(self, hidden_states: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
        heads = hidden_states.view(1, -1, 4, 8).transpose(1, 2)
        attended, _ = attend(self, heads, heads, heads, None)
        return hidden_states + attended.flatten(2)


class OddModel(nn.Module):
    """Three layers of attention, and one way past them that stages know nothing of."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.config = way, SimpleNamespace()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(OddLayer() for _ in range(3))
        self.model.forward = self.body  # type: ignore[method-assign]
        self.embedding, self.head = nn.Embedding(150, 32), nn.Linear(32, 150)
        self.to("meta").requires_grad_(False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def _can_set_experts_implementation(self) -> bool:
        return False

    def body(self, vectors: torch.Tensor, positions: torch.Tensor) -> SimpleNamespace:
        hidden_states = vectors
        for index, layer in enumerate(self.model.layers):
            if self.way == "between" and index:
                hidden_states = hidden_states + vectors
            hidden_states = layer(hidden_states, first=vectors if self.way == "argument" else None)
        return SimpleNamespace(last_hidden_state=hidden_states + (vectors if self.way == "head" else 0))

    def forward(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any
    ) -> SimpleNamespace:
        vectors = inputs_embeds * 2 if self.way == "vectors" else inputs_embeds
        return SimpleNamespace(logits=self.head(self.model(vectors, position_ids).last_hidden_state))


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("vectors", "vectors or positions change"),
        ("between", "change between layers 0 and 1"),
        ("argument", "needs more than"),
        ("head", "its head needs more"),
    ],
)
def test_ways_past_the_layers_are_seen(
    neox: Path, monkeypatch: pytest.MonkeyPatch, way: str, message: str
) -> None:
    """A later stage would compute with zeros there, and nothing would fail."""
    spec, model = load_spec(neox), OddModel("none")
    monkeypatch.setattr(transformers_survey, "build_on_meta", lambda *args: model)
    assert survey(neox, spec, torch.float32, 64).before == {"embedding": 32}
    model = OddModel(way)
    with pytest.raises(UnsupportedModelError, match=message):
        survey(neox, spec, torch.float32, 64)


def test_code_that_does_not_run_in_stages_is_called_so(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 25, point 12. An error of Python's is at most the detail of a sentence that says what is
    wrong."""

    def broken(*args: Any) -> None:
        raise TypeError("no such argument")

    spec, model = load_spec(neox), OddModel("none")
    monkeypatch.setattr(transformers_survey, "build_on_meta", lambda *args: model)
    model.model.forward = broken  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match=r"layer by layer.*\(TypeError: no such argument\)"):
        survey(neox, spec, torch.float32, 64)


@pytest.mark.parametrize(("model_type", "architecture", "fields", "message"), REFUSED)
def test_models_that_compute_otherwise_are_refused_without_memory(
    tmp_path: Path, model_type: str, architecture: str, fields: dict[str, Any], message: str
) -> None:
    directory = only_config(tmp_path, model_type, architecture, **fields)
    spec = load_spec(directory)
    with pytest.raises(UnsupportedModelError, match=message):
        survey(directory, spec, torch.float32, 64)


def test_a_rank_refuses_before_it_allocates(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(Compute, "parameter", lambda *args: made.append(args))
    (config,) = make_rank_configs(neox, 1)
    with pytest.raises(ModelConfigError, match="max_model_len"):
        load_rank(msgspec.structs.replace(config, max_model_len=512), nothing)
    assert made == []


@pytest.mark.parametrize(
    ("model", "parallel", "param"),
    [
        ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"quantization": "int8"}, {}, "quantization"),
        ({}, {"tied_head": "transfer"}, "tied_head"),
    ],
)
def test_settings_for_our_own_layers_are_refused(
    neox: Path, model: dict[str, Any], parallel: dict[str, Any], param: str
) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(neox), **model),
        parallel=ParallelConfig(pipeline_parallel_size=2, **parallel),
    )
    with pytest.raises(UsageError, match="GPTNeoXForCausalLM") as caught:
        resolve(config, [HostResources.detect()])
    assert caught.value.param == param


def test_a_plan_says_whose_layers_run(neox: Path) -> None:
    config = EngineConfig(model=ModelConfig(model=str(neox), model_impl="transformers"))
    plan = resolve(config, [HostResources.detect()])
    assert {rank.model_impl for rank in plan.ranks} == {"transformers"}
    assert any("transformers' layers" in note for note in plan.notes)


# --- attention ------------------------------------------------------------------------------------


def test_arguments_of_attention_are_honoured() -> None:
    kwargs = {"scaling": 0.5, "softcap": 3.0, "sliding_window": 7, "dropout": 0.0, "position_ids": object()}
    assert read_sight(nn.Module(), 16, kwargs) == Sight(scale=0.5, soft_cap=3.0, window=7)
    assert read_sight(nn.Module(), 16, {"scaling": None, "is_causal": True}) == Sight(scale=0.25)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": 1}, "position_bias"),
        ({"is_causal": False}, "both directions"),
    ],
)
def test_unknown_arguments_of_attention_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_sight(nn.Module(), 16, kwargs)


def test_masks_and_calls_from_elsewhere_are_refused() -> None:
    module, heads = nn.Module(), torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedModelError, match="outside the layers"):
        attend(module, heads, heads, heads, None)
    Site(0, Track()).bind(module)
    with pytest.raises(UnsupportedModelError, match="mask"):
        attend(module, heads, heads, heads, heads)
    with pytest.raises(UnsupportedModelError, match="keys of 4 and values of 2"):
        attend(module, heads, heads, heads[..., :2], None)


# --- names of tensors -----------------------------------------------------------------------------


def saved(model: Any, directory: Path, rename: Any) -> Path:
    from safetensors.torch import load_file, save_file

    model.save_pretrained(directory)
    tensors = {rename(name): value for name, value in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_names_without_the_prefix_of_the_whole_model_are_found(tmp_path: Path) -> None:
    """As in the checkpoint of GPT-2 on the hub."""
    FOREIGN["gpt2"].make(tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    directory = saved(model, tmp_path / "bare", lambda name: name.removeprefix("transformer."))
    (config,) = make_rank_configs(directory, 1)
    loaded = load_rank(config, nothing)
    names = {name for name, _ in loaded.model.named_parameters()}
    assert "wte.weight" in names
    assert "h.2.attn.c_attn.weight" in names
    own = loaded.model.layers[2].attn.c_attn.weight
    assert torch.equal(own, model.transformer.h[2].attn.c_attn.weight)


def test_a_missing_tensor_and_one_layer_too_many_are_named(neox: Path, tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "many").mkdir()
    few = changed(neox, tmp_path / "few", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="layer 2"):
        load_rank(make_rank_configs(few, 1)[0], nothing)
    many = changed(neox, tmp_path / "many", num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"gpt_neox\.layers\.3"):
        load_rank(make_rank_configs(many, 1)[0], nothing)


def test_experts_are_read_one_by_one_into_their_places(tmp_path: Path) -> None:
    (config,) = make_rank_configs(FOREIGN["flex_olmo"].make(tmp_path), 1)
    loaded = load_rank(config, nothing)
    names = {name for name, _ in loaded.model.named_parameters()}
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = loaded.model.layers[1].mlp.experts
    assert torch.equal(ours.gate_up_proj, whole.model.layers[1].mlp.experts.gate_up_proj)
    assert torch.equal(ours.down_proj, whole.model.layers[1].mlp.experts.down_proj)


def test_a_rule_that_is_not_built_is_refused(tmp_path: Path) -> None:
    directory = FOREIGN["flex_olmo"].make(tmp_path)
    seen = survey(directory, load_spec(directory), torch.float32, 64)
    name = "model.layers.0.mlp.experts.down_proj"
    weights = {name: nn.Parameter(torch.zeros(4, 32, 48))}
    stored = [f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(3)]
    sources = sources_of(seen.model, stored)
    with pytest.raises(UnsupportedModelError, match="made of 3 tensors"):
        list(checkpoint_weights(seen.model, weights, sources))


def test_numbers_that_are_not_finite_are_refused_and_dtypes_converted(tmp_path: Path) -> None:
    directory = FAMILIES["small tied llama"].make(tmp_path)
    (config,) = make_rank_configs(directory, 1, model_impl="transformers", dtype="bfloat16")
    assert {weight.dtype for weight in load_rank(config, nothing).model.parameters()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.model.norm.weight.data[3] = float("nan")
    model.save_pretrained(directory)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load_rank(config, nothing)


def test_buffers_that_checkpoints_store_are_loaded_and_some_weights_stay_float32(tmp_path: Path) -> None:
    fields = {"n_routed_experts": 4, "n_group": 1, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(Glm4MoeConfig(**SIZES, **fields, head_dim=8))
    model.model.layers[2].mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    model.save_pretrained(tmp_path)
    (config,) = make_rank_configs(tmp_path, 1, dtype="bfloat16", model_impl="transformers")
    layer = load_rank(config, nothing).model.layers[2]
    # Whether the weights of the gate stay float32 differs between versions of transformers.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).model.layers[2]
    assert layer.mlp.gate.weight.dtype == theirs.mlp.gate.weight.dtype
    assert layer.self_attn.q_proj.weight.dtype == torch.bfloat16
    bias = layer.mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32
    assert bias.tolist() == torch.tensor([0.1, 0.2, 0.3, 0.4]).tolist()


def test_llama_configurations_of_transformers_are_read_as_ours(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    own, theirs = load_spec(tmp_path), load_spec(tmp_path, "transformers")
    for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        assert getattr(own, name) == getattr(theirs, name), name
