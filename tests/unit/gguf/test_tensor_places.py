"""GGUF files of which a host has headers and some tensors, and one named error for an index that is wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from gguf_files import Q8_0, Stored, write_gguf, write_parts
from penstock.errors import CheckpointError
from penstock.gguf.file import GgufFile
from penstock.gguf.tensor_places import TensorPlace, index_content

TENSORS = {
    "token_embd.weight": Stored.of(np.arange(12, dtype="<f4").reshape(3, 4)),
    "blk.0.attn_q.weight": Stored(shape=(2, 32), kind=Q8_0, content=bytes(range(68))),
    "blk.1.attn_q.weight": Stored(shape=(2, 32), kind=Q8_0, content=bytes(range(68, 136))),
}
BLOCKS = TENSORS["blk.1.attn_q.weight"].content
GOOD = {"blk.1.attn_q.weight": TensorPlace("weights", 5, 73)}


def headers_of(directory: Path, paths: list[Path]) -> list[Path]:
    """Write the headers of files under the same names into another directory."""
    directory.mkdir()
    starts = GgufFile.open(paths[0]).data_starts
    for path, start in zip(paths, starts, strict=True):
        (directory / path.name).write_bytes(path.read_bytes()[:start])
    return [directory / path.name for path in paths]


@pytest.fixture
def header(tmp_path: Path) -> Path:
    """A header, and beside it a file with the bytes of one tensor behind five others."""
    path = write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"}, TENSORS)
    (header,) = headers_of(tmp_path / "here", [path])
    header.with_name("weights").write_bytes(bytes(5) + BLOCKS)
    return header


def put_index(header: Path, places: Mapping[str, TensorPlace] | bytes) -> None:
    content = places if isinstance(places, bytes) else index_content(places)
    header.with_name("model.gguf.index.json").write_bytes(content)


def test_a_tensor_is_where_the_index_says_and_all_others_are_behind_the_end(header: Path) -> None:
    put_index(header, GOOD)
    file = GgufFile.open(header)
    assert list(file.tensors) == list(TENSORS)
    found = file.tensors["blk.1.attn_q.weight"]
    assert (found.path, found.path.read_bytes()[found.start : found.end]) == (
        header.with_name("weights"),
        BLOCKS,
    )
    assert (found.shape, found.type.name) == ((2, 32), "Q8_0")
    absent = [file.tensors[name] for name in ("token_embd.weight", "blk.0.attn_q.weight")]
    assert all(tensor.path == header and tensor.start >= header.stat().st_size for tensor in absent)


def test_the_headers_of_a_split_model_have_one_index(tmp_path: Path) -> None:
    parts = [{name: tensor} for name, tensor in TENSORS.items()]
    paths = write_parts(tmp_path, "model", {"general.architecture": "llama"}, parts)
    first, *_ = headers_of(tmp_path / "here", paths)
    first.with_name("weights").write_bytes(bytes(5) + BLOCKS)
    first.with_name(f"{first.name}.index.json").write_bytes(index_content(GOOD))
    file = GgufFile.open(first)
    assert file.tensors["blk.1.attn_q.weight"].path == first.with_name("weights")
    assert file.tensors["blk.0.attn_q.weight"].path.name == paths[1].name


def test_without_an_index_a_header_alone_is_a_truncated_file(header: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.gguf: tensor token_embd.weight: .*truncated"):
        GgufFile.open(header)


BAD = {
    r"model.gguf.index.json: tensor blk.9.attn_q.weight: expected tensors of the model's header": {
        "blk.9.attn_q.weight": TensorPlace("weights", 0, 68)
    },
    r"index.json: tensor blk.1.\S+: expected 68 bytes of Q8_0 \[2, 32\], found bytes 5 to 72 of weights": {
        "blk.1.attn_q.weight": TensorPlace("weights", 5, 72)
    },
    "found bytes -1 to 67": {"blk.1.attn_q.weight": TensorPlace("weights", -1, 67)},
    r"weights: tensor blk.1.attn_q.weight: expected at least 74 bytes, found 73 bytes \(truncated\)": {
        "blk.1.attn_q.weight": TensorPlace("weights", 6, 74)
    },
    r"absent: expected a readable file, found No such file": {
        "blk.1.attn_q.weight": TensorPlace("absent", 0, 68)
    },
    r"expected names of files beside it, found \.\./here/weights": {
        "blk.1.attn_q.weight": TensorPlace("../here/weights", 5, 73)
    },
    "pipe: expected a regular file": {"blk.1.attn_q.weight": TensorPlace("pipe", 5, 73)},
    "index.json: expected a file and two numbers for each tensor": b'{"tensors": {"a": ["weights", 5]}}',
}


@pytest.mark.parametrize("told", BAD)
def test_r15_an_index_that_is_wrong_is_one_named_error(header: Path, told: str) -> None:
    os.mkfifo(header.with_name("pipe"))
    put_index(header, BAD[told])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=told):
        GgufFile.open(header)


def test_r15_an_index_beside_a_whole_file_is_refused(header: Path) -> None:
    """Bytes behind a header would pass for those of tensors that are not here."""
    put_index(header, GOOD)
    size = header.stat().st_size
    with header.open("ab") as file:
        file.write(bytes(100))
    with pytest.raises(
        CheckpointError, match=rf"a header of {size} bytes on its own, found a file of {size + 100}"
    ):
        GgufFile.open(header)
