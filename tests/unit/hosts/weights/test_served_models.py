"""The files beside the weights that a head gives to workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.errors import ProtocolError
from penstock.families.registry import resolve_model_directory
from penstock.hosts.weights.served_models import ServedModel
from penstock.tokenizer.tokenizer import JsonTokenizer
from vocabulary_files import tiktoken_bytes


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copytree(resolve_model_directory("demo"), tmp_path / "m")
    return tmp_path / "m"


def test_a_vocabulary_in_another_form_is_given_in_the_one_that_ranks_read(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "qwen.tiktoken").write_bytes(tiktoken_bytes([bytes([byte]) for byte in range(256)]))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 1000}))
    model = ServedModel.open(directory)
    content = model.small_file("tokenizer.json")
    assert JsonTokenizer(content).encode("ab") == [*b"ab"]
    sizes = {file.name: file.num_bytes for file in model.description().files}
    assert sizes["tokenizer.json"] == len(content)


def test_a_vocabulary_that_cannot_be_read_is_none(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(b"\xff")
    model = ServedModel.open(directory)
    assert "tokenizer.json" not in {file.name for file in model.description().files}
    with pytest.raises(ProtocolError):
        model.small_file("tokenizer.json")
