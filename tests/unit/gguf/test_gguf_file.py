"""Reading GGUF headers: every type of value, splits, and one named error for whatever is not sound."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_files import F32, Q8_0, Stored, Typed, gguf_bytes, text_bytes, write_parts
from paths import shared_data
from penstock.errors import CheckpointError
from penstock.gguf.block_types import TYPES, WITHDRAWN
from penstock.gguf.file import GgufFile

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "n.u8": Typed(kind=0, value=200),
    "n.i8": Typed(kind=1, value=-3),
    "n.u16": Typed(kind=2, value=65_535),
    "n.i16": Typed(kind=3, value=-30_000),
    "n.u32": 7,
    "n.i32": Typed(kind=5, value=-7),
    "n.f32": 0.5,
    "n.bool": True,
    "n.u64": Typed(kind=10, value=2**63),
    "n.i64": Typed(kind=11, value=-(2**40)),
    "n.f64": Typed(kind=12, value=1e300),
    "tokenizer.ggml.tokens": ["a", "é", "", "日本"],
    "tokenizer.ggml.scores": np.array([0.0, -1.5], "<f4"),
    "flags": np.array([True, False]),
    "nested": [[1, 2], [3]],
    "empty": [],
}
TENSORS = {
    "token_embd.weight": Stored.of(np.arange(12, dtype="<f4").reshape(3, 4)),
    "blk.0.attn_q.weight": Stored(shape=(2, 32), kind=Q8_0, content=bytes(range(68))),
    "scale": Stored(shape=(), kind=F32, content=b"\0\0\x80?"),
}


def opened(path: Path, content: bytes) -> GgufFile:
    path.write_bytes(content)
    return GgufFile.open(path)


def refused(path: Path, content: bytes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        opened(path, content)
    assert caught.value.file == path.name
    return caught.value


def plain(value: Any) -> Any:
    if isinstance(value, Typed):
        return value.value
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("version", [2, 3])
def test_every_type_of_value_and_each_tensor_is_read(tmp_path: Path, version: int) -> None:
    file = opened(tmp_path / "m.gguf", gguf_bytes(METADATA, TENSORS, version=version))
    assert {key: plain(value) for key, value in file.metadata.items()} == {
        key: plain(value) for key, value in METADATA.items()
    }
    assert file.version == version
    assert list(file.tensors) == list(TENSORS)
    raw = (tmp_path / "m.gguf").read_bytes()
    for name, stored in TENSORS.items():
        tensor = file.tensors[name]
        assert (tensor.shape, tensor.type.number) == (stored.shape or (1,), stored.kind)
        assert raw[tensor.start : tensor.end] == stored.content
        assert tensor.start % 32 == 0
        assert tensor.path == tmp_path / "m.gguf"


def test_another_alignment_moves_the_data(tmp_path: Path) -> None:
    file = opened(tmp_path / "m.gguf", gguf_bytes({"general.alignment": 256}, TENSORS))
    assert all(tensor.start % 256 == 0 for tensor in file.tensors.values())


def test_metadata_says_which_key_is_missing_or_of_another_type(tmp_path: Path) -> None:
    metadata = opened(tmp_path / "m.gguf", gguf_bytes(METADATA, {})).metadata
    assert metadata.text("general.architecture") == "llama"
    assert (metadata.integer("n.u32"), metadata.integer("none", 5)) == (7, 5)
    assert (metadata.number("n.f32"), metadata.number("n.u32"), metadata.flag("n.bool")) == (0.5, 7, True)
    assert metadata.texts("tokenizer.ggml.tokens")[1] == "é"
    assert metadata.numbers("tokenizer.ggml.scores")[1] == -1.5
    for read, key, found in (
        (metadata.text, "none", "no such key"),
        (metadata.text, "n.u32", "7"),
        (metadata.integer, "n.bool", "True"),
        (metadata.number, "general.architecture", "'llama'"),
        (metadata.flag, "n.u32", "7"),
        (metadata.texts, "tokenizer.ggml.scores", "an array of 2 values"),
        (metadata.numbers, "flags", "an array of 2 values"),
    ):
        with pytest.raises(CheckpointError, match=rf"m\.gguf: key {key}: expected .*{found}"):
            read(key)


@pytest.mark.parametrize("named", [0, 1, 2])
def test_parts_are_one_index_whichever_is_named(tmp_path: Path, named: int) -> None:
    parts = [{name: tensor} for name, tensor in TENSORS.items()]
    paths = write_parts(tmp_path, "model-Q8_0", METADATA, parts)
    file = GgufFile.open(paths[named])
    assert (file.path, list(file.parts), list(file.tensors)) == (paths[0], paths, list(TENSORS))
    assert file.metadata.text("general.architecture") == "llama"
    for index, (name, stored) in enumerate(TENSORS.items()):
        tensor = file.tensors[name]
        assert tensor.path == paths[index]
        assert paths[index].read_bytes()[tensor.start : tensor.end] == stored.content


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, "m", METADATA, [TENSORS, {}, {}])
    paths[1].unlink()
    with pytest.raises(
        CheckpointError, match=r"m-00002-of-00003\.gguf: expected all 3 parts .*found 2 of them"
    ):
        GgufFile.open(paths[2])


def test_parts_of_another_model_are_refused(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, "m", METADATA, [TENSORS, {}])
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.gguf: key split\.no: expected 1, .*found 0"):
        GgufFile.open(paths[0])
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(paths[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"renamed\.gguf: key split\.count: expected 1, .*found 2"):
        GgufFile.open(alone)


def test_a_tensor_in_two_parts_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, "m", {}, [TENSORS, {"scale": TENSORS["scale"]}])
    with pytest.raises(CheckpointError, match=r"tensor scale: expected each tensor in one part"):
        GgufFile.open(paths[0])
    one_less = write_parts(tmp_path / "..", "n", {}, [TENSORS, {}])
    write_parts(tmp_path, "n", {}, [TENSORS, {"more": TENSORS["scale"]}])[0].replace(one_less[0])
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count: expected 3, .*found 4"):
        GgufFile.open(one_less[0])


def test_a_truncated_file_says_tensor_expected_and_found(tmp_path: Path) -> None:
    content = gguf_bytes(METADATA, TENSORS)
    last = len(content) - 32
    error = refused(tmp_path / "m.gguf", content[:last])
    assert error.tensor == "scale"
    assert error.expected == f"4 bytes of F32 (1) from byte {last} on"
    assert error.found == f"a file of {last} bytes (truncated)"


def test_no_cut_of_a_file_passes_unnoticed(tmp_path: Path) -> None:
    content = gguf_bytes(METADATA, TENSORS)
    for length in range(0, len(content) - 28, 7):
        refused(tmp_path / "m.gguf", content[:length])


def with_tensor(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"shape": (2, 32), "kind": Q8_0, "content": bytes(68)}
    return gguf_bytes({}, {"w": Stored(**{**fields, **changes})})


HOSTILE = {
    "other magic": (b"GGML" + bytes(60), "begins with GGUF"),
    "big-endian": (b"GGUF\0\0\0\x03" + bytes(60), "big-endian"),
    "old version": (gguf_bytes({}, {}, version=1), "version 1"),
    "keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata keys of 1152921504606846976"),
    "tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**61, 0), "tensors of 2305843009213693952"),
    "text": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63) + bytes(40), "at least"),
    "array": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + text_bytes("k")
        + struct.pack("<IIQ", 9, 10, 2**62)
        + bytes(9),
        "key k: expected at least 36893488147419103232 bytes",
    ),
    "value type": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text_bytes("k") + struct.pack("<IQ", 13, 0),
        "type 13",
    ),
    "bool": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text_bytes("k") + struct.pack("<IB", 7, 2), "0 or 1"),
    "nesting": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + text_bytes("k")
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 9,
        "at most 4 deep",
    ),
    "same key": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (text_bytes("k") + struct.pack("<IB", 7, 1)) * 2,
        "key k: expected each key once",
    ),
    "not utf-8": (gguf_bytes({"k": b"a\xff"}, {}), "key k: expected a string in UTF-8, found the byte 0xff"),
    "not utf-8 in array": (gguf_bytes({"k": ["a", b"\xff"]}, {}), "0xff in that of index 1"),
    "alignment": (
        gguf_bytes({"general.alignment": 48}, {}),
        "key general.alignment: expected a power of two",
    ),
    "alignment of 0": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text_bytes("general.alignment") + struct.pack("<II", 4, 0),
        "key general.alignment: expected a power of two from 1 to 1048576, found 0",
    ),
    "dimensions": (with_tensor(shape=(1, 1, 1, 2, 32)), "tensor w: expected at most 4 dimensions, found 5"),
    "overflow": (with_tensor(shape=(2**33, 2**33)), "tensor w: expected at most"),
    "wrapping product": (with_tensor(shape=(2**32, 2**32, 2**32)), "tensor w: expected at most"),
    "unknown type": (with_tensor(kind=99), "tensor w: expected a type of F32 (0), F16 (1)"),
    "withdrawn type": (with_tensor(kind=31), "use Q4_0"),
    "half a block": (with_tensor(shape=(2, 31)), "whole blocks of 32 values for Q8_0, found 31"),
    "offset": (
        gguf_bytes({}, TENSORS, offsets={"scale": 33}),
        "tensor scale: expected an offset that is a multiple",
    ),
    "overlap": (
        gguf_bytes({}, TENSORS, offsets={"scale": 64}),
        "tensor blk.0.attn_q.weight: expected bytes from 260 on, where scale ends",
    ),
    "far offset": (gguf_bytes({}, TENSORS, offsets={"scale": 2**63}), "truncated"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_sound_is_named(tmp_path: Path, case: str) -> None:
    content, said = HOSTILE[case]
    assert said in str(refused(tmp_path / "m.gguf", content))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        GgufFile.open(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match=r"a regular file|readable file"):
        GgufFile.open(tmp_path)


@settings(
    max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)
@given(data=st.data())
def test_no_change_of_bytes_gives_another_error(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(gguf_bytes(METADATA, TENSORS))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 9))
        change = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([2**63, 2**64 - 1, 2**31, 2**32 - 1, 0, 10**6]).map(
                    lambda n: struct.pack("<Q", n)
                ),
            )
        )
        content[place : place + len(change)] = change
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        file = GgufFile.open(path)
    except CheckpointError:
        pass
    else:
        assert all(tensor.end <= len(content) for tensor in file.tensors.values())
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 256 * 1024, "a length that the file states was believed before it was checked"


def test_a_vocabulary_of_a_real_file_is_read_whole() -> None:
    file = GgufFile.open(shared_data("tokenizers", "ggml", "ggml-vocab-deepseek-llm.gguf"))
    assert len(file.metadata.texts("tokenizer.ggml.tokens")) == file.metadata.integer("llama.vocab_size")
    assert file.metadata.texts("tokenizer.ggml.merges")[1] == "Ġ t"
    assert file.header_bytes <= file.path.stat().st_size


def test_the_types_are_those_of_ggml() -> None:
    assert {kind.number: kind for kind in TYPES.values()} == TYPES
    assert not TYPES.keys() & WITHDRAWN.keys()
    q6_k = TYPES[14]
    assert (q6_k.name, q6_k.num_bytes(512)) == ("Q6_K", 420)
