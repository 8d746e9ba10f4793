"""A worker finds models by their identity, below its own directories and nowhere else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints import make_checkpoint
from gguf_files import Stored, write_gguf, write_parts
from penstock.errors import ModelError
from penstock.families.registry import resolve_model_directory
from penstock.hosts.model_shelf import ModelShelf
from penstock.kvstore.names import model_identity


def test_g1_a_model_is_found_wherever_it_lies_below(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "config.json").write_text("no model")
    model = make_checkpoint(tmp_path / "a" / "b", layers=1, seed=1)
    other = make_checkpoint(tmp_path / "c", layers=1, seed=2)
    shelf = ModelShelf([tmp_path])
    assert shelf.locate(model_identity(model)) == model
    assert shelf.locate(model_identity(other)) == other


def test_g1_a_model_in_gguf_is_found_where_all_its_parts_are(tmp_path: Path) -> None:
    tensors = {name: Stored.of(np.full(9, size, "<f4")) for size, name in enumerate("abc")}
    (tmp_path / "split").mkdir()
    single = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, tensors)
    split = write_parts(tmp_path / "split", "m", {}, [{name: tensors[name]} for name in tensors])
    shelf, identity = ModelShelf([tmp_path]), model_identity(split[1])
    assert shelf.locate(model_identity(single)) == single
    assert shelf.locate(identity) == split[0]
    split[2].unlink()
    with pytest.raises(ModelError, match="does not have the head's model"):
        ModelShelf([tmp_path]).locate(identity)


def test_g1_the_demo_model_is_always_there() -> None:
    demo = resolve_model_directory("demo")
    assert ModelShelf([]).locate(model_identity(demo)) == demo


def test_r15_another_model_is_not_taken_for_it_and_the_error_says_where_it_was_looked_for(
    tmp_path: Path,
) -> None:
    model = make_checkpoint(tmp_path / "here", layers=1, seed=1)
    identity = model_identity(make_checkpoint(tmp_path / "elsewhere", layers=1, seed=2))
    with pytest.raises(ModelError, match="it searched") as caught:
        ModelShelf([model.parent / "here"]).locate(identity)
    assert str(tmp_path / "here") in caught.value.message
    assert "--models-dir" in caught.value.remedy


def test_g1_a_model_that_is_exchanged_is_found_no_longer(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", layers=1, seed=1)
    shelf, identity = ModelShelf([tmp_path]), model_identity(model)
    assert shelf.locate(identity) == model
    make_checkpoint(tmp_path / "m", layers=1, seed=2)
    with pytest.raises(ModelError):
        shelf.locate(identity)
