"""Good and bad safetensors files."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import checkpoints
from paths import shared_data
from penstock.errors import CheckpointError
from penstock.weights.checkpoint import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    SINGLE_FILE,
    Checkpoint,
    TensorEntry,
    read_header,
)

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "empty": torch.empty((0, 3)),
    "c": torch.tensor([1, 2, 3], dtype=torch.int8),
}


def tensor(shape: list[Any], begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(directory: Path, header: object, data: bytes = b"") -> CheckpointError:
    checkpoints.write_raw_safetensors(directory / SINGLE_FILE, header, data)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(directory)
    error = caught.value
    assert error.file == SINGLE_FILE
    assert error.expected
    assert error.found
    assert error.message.isprintable()
    assert error.exit_code == 3
    return error


def test_entries_name_the_bytes(tmp_path: Path) -> None:
    checkpoints.write_safetensors(tmp_path / SINGLE_FILE, TENSORS)
    checkpoint = Checkpoint(tmp_path)
    content = (tmp_path / SINGLE_FILE).read_bytes()
    assert checkpoint.names == set(TENSORS)
    for name, expected in TENSORS.items():
        entry = checkpoint.entry(name)
        assert entry.shape == tuple(expected.shape)
        assert content[entry.begin : entry.end] == expected.view(-1).view(torch.uint8).numpy().tobytes()


def test_reads_what_the_safetensors_library_writes_and_back(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    entries = read_header(tmp_path / SINGLE_FILE)
    assert {name: entry.shape for name, entry in entries.items()} == {
        name: tuple(value.shape) for name, value in TENSORS.items()
    }
    checkpoints.write_safetensors(tmp_path / "ours.safetensors", TENSORS)
    loaded = load_file(tmp_path / "ours.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in TENSORS.items())


def test_an_index_names_the_shards(tmp_path: Path) -> None:
    checkpoints.write_weights(tmp_path, TENSORS, num_shards=2)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names == set(TENSORS)
    files = [checkpoint.entry(name).path.name for name in TENSORS]
    assert files == ["model-00001-of-00002.safetensors"] * 2 + ["model-00002-of-00002.safetensors"] * 2


def test_d8_headers_of_other_shards_are_not_opened(tmp_path: Path) -> None:
    checkpoints.write_weights(tmp_path, TENSORS, num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.entry("a").shape == (2, 3)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: expected a readable file"):
        checkpoint.entry("c")


@pytest.mark.parametrize(
    ("header", "data", "name", "found"),
    [
        ({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, bytes(12), "b", "overlapping"),
        ({"a": tensor([2], 0, 8), "b": tensor([2], 0, 8)}, bytes(8), "b", "overlapping"),
        ({"a": tensor([2], 0, 8), "b": tensor([2], 12, 20)}, bytes(20), "b", "gap"),
        ({"a": tensor([2], 4, 12)}, bytes(12), "a", "gap"),
        ({"a": tensor([2], 0, 8)}, bytes(4), "a", "truncated"),
        ({"a": tensor([2**40], 0, 2**42)}, bytes(4), "a", "truncated"),
        ({"a": tensor([2], 0, 8)}, bytes(12), "", "bytes of no tensor"),
        ({"a": tensor([3], 0, 8)}, bytes(8), "a", "offsets 0 to 8"),
        ({"a": tensor([2], 8, 0)}, bytes(8), "a", "offsets 8 to 0"),
        ({"a": tensor([2], -8, 0)}, bytes(8), "a", "offsets -8 to 0"),
        ({"a": tensor([-1, -2], 0, 8)}, bytes(8), "a", "[-1, -2]"),
        ({"a": tensor([1] * 9, 0, 4)}, bytes(4), "a", "[1, 1"),
        ({"a": tensor([2**40, 2**40], 0, 8)}, bytes(8), "a", "offsets 0 to 8"),
        ({"a": tensor([10**4000] * 8, 0, 8)}, bytes(8), "a", "[1000"),
        ({"a": tensor([2], 0, 10**4000)}, bytes(8), "a", "offsets 0 to 1000"),
        ({"a": tensor([2], 0, 8, "F31")}, bytes(8), "a", "F31"),
        ({"a": tensor([2], 0, 8, 32)}, bytes(8), "a", "Expected `str`, got `int`"),
        ({"a": tensor([True, 2], 0, 8)}, bytes(8), "a", "got `bool`"),
        ({"a": tensor([2.5], 0, 8)}, bytes(8), "a", "got `float`"),
        ({"a": tensor(["2"], 0, 8)}, bytes(8), "a", "got `str`"),
        ({"a": tensor([2], 0, None)}, bytes(8), "a", "got `null`"),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "a", "data_offsets"),
        ({"a": [1]}, bytes(8), "a", "got `array`"),
        ({"a": tensor([2], 0, 8) | {"x": 1}}, bytes(8), "a", "unknown field"),
        ({"__metadata__": {"format": 3}}, b"", "", "got `int`"),
        ({"\x1b[31m": tensor([2], 0, 4)}, bytes(4), "\\x1b[31m", "offsets"),
        (b"[]", b"", "", "got `array`"),
        (b"{", b"", "", "truncated"),
        (b'{"a":' * 100_000, b"", "", "recursion"),
        (b'{"a": NaN}', b"", "", "invalid character"),
        (b'{"\xff": 1}', b"", "", "8"),  # utf-8, in capitals since msgspec 0.23
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, header: object, data: bytes, name: str, found: str) -> None:
    error = refusal(tmp_path, header, data)
    assert error.tensor == name
    assert found in error.found


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\0\0",
        (0).to_bytes(8, "little"),
        (2**63).to_bytes(8, "little") + b"{}",
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        (3).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_bad_header_length_is_refused_before_it_is_believed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected"):
        Checkpoint(tmp_path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    checkpoints.write_safetensors(tmp_path / SINGLE_FILE, TENSORS)
    content = (tmp_path / SINGLE_FILE).read_bytes()
    for length in range(len(content)):
        (tmp_path / SINGLE_FILE).write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        {},
        [],
        {"weight_map": {"a": 3}},
        {"weight_map": []},
        {"weight_map": {"a": "../model.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": ".."}},
        {"weight_map": {"a": "model.bin"}},
        {"weight_map": {"a": "x\0.safetensors"}},
        {"weight_map": {"a": "x\n.safetensors"}},
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: object) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert caught.value.file == INDEX_FILE
    assert caught.value.message.isprintable()


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    checkpoints.write_weights(tmp_path, TENSORS, num_shards=2)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"tensor ghost: expected this tensor, as .*index\.json says"):
        Checkpoint(tmp_path).entry("ghost")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoints.write_safetensors(tmp_path / SINGLE_FILE, TENSORS)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor d: expected this tensor"):
        Checkpoint(tmp_path).entry("d")


def test_no_safetensors_at_all(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="found neither") as caught:
        Checkpoint(tmp_path)
    assert "convert" in caught.value.remedy


@pytest.mark.parametrize("name", [SINGLE_FILE, INDEX_FILE])
def test_a_pipe_instead_of_a_file_does_not_block(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="expected a regular file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", [SINGLE_FILE, INDEX_FILE])
def test_a_directory_instead_of_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match="expected a regular file"):
        Checkpoint(tmp_path)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 200), replacement=st.binary(min_size=1, max_size=4))
def test_any_changed_bytes_are_harmless_or_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, position: int, replacement: bytes
) -> None:
    path = tmp_path_factory.mktemp("any", numbered=True) / SINGLE_FILE
    checkpoints.write_safetensors(path, TENSORS)
    content = bytearray(path.read_bytes())
    content[position : position + len(replacement)] = replacement
    path.write_bytes(content)
    header = header_or_refusal(path)
    if isinstance(header, CheckpointError):
        assert header.message.isprintable()
    else:
        assert all(8 <= entry.begin <= entry.end <= len(content) for entry in header.values())


def header_or_refusal(path: Path) -> dict[str, TensorEntry] | CheckpointError:
    try:
        return read_header(path)
    except CheckpointError as error:
        return error


def test_the_json_conformance_suite_holds_no_surprise(tmp_path: Path) -> None:
    """As headers: only an object without entries can be valid."""
    path = tmp_path / SINGLE_FILE
    with tarfile.open(shared_data("conformance", "json_parsing_suite.tar.gz")) as archive:
        for member in archive:
            if not member.name.endswith(".json"):
                continue
            file = archive.extractfile(member)
            assert file is not None
            checkpoints.write_raw_safetensors(path, file.read(), b"")
            header = header_or_refusal(path)
            assert header == {} or isinstance(header, CheckpointError)
