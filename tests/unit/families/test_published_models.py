"""The page of models says what the registry makes of their configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import models_page
from families import SIZES
from models_page import Model
from penstock.families.registry import SUPPORTED_ARCHITECTURES, load_spec
from penstock.models.transformers_survey import survey

MODELS = models_page.models()


def test_the_page_of_models_is_what_the_registry_makes_of_them() -> None:
    text = models_page.page()
    assert models_page.PAGE.read_text(encoding="utf-8") == text, "run scripts/models_page.py"
    for architecture in SUPPORTED_ARCHITECTURES:
        assert f"`{architecture}`" in text


def test_of_sixty_models_at_least_thirty_five_run() -> None:
    assert len({model.name for model in MODELS}) == len(MODELS) >= 60
    assert sum(model.runs().startswith("on") and model.is_verified for model in MODELS) >= 35


def test_an_architecture_that_transformers_lacks_is_unverified_and_not_counted() -> None:
    llama = next(model for model in MODELS if model.architecture == "LlamaForCausalLM")
    assert llama.is_verified
    own = Model(
        name="MiMo", config=llama.config | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    )
    assert not own.is_verified
    assert own.runs() == "on our own layers (*unverified*)"


@pytest.mark.soak
@pytest.mark.parametrize(
    "model",
    [pytest.param(model, id=model.architecture) for model in MODELS if model.runs().startswith("on tr")],
)
def test_what_runs_through_transformers_can_be_cut_into_stages(model: Model, tmp_path: Path) -> None:
    """By a tiny model of its class, laid out without memory."""
    config = AutoConfig.for_model(model.config["model_type"], **(SIZES | model.small)).to_dict()
    fields = config | {"architectures": [model.architecture], "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    spec = load_spec(tmp_path)
    assert spec.implementation == "transformers"
    assert survey(tmp_path, spec, torch.float32, 64).layers_path == "model.layers"
