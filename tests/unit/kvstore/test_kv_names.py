"""What records are called and what they hold: no stage, rank or epoch, and nothing of another."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CheckpointError, ModelConfigError
from penstock.kvstore.names import KEY_BYTES, SAMPLE_BYTES, model_identity, namespace, record_key
from penstock.kvstore.record import overhead_bytes, seal, unseal

IDENTITY = bytes(range(32))
SPACE = namespace(IDENTITY, dtype="bfloat16", block_size=32, kind="keys and values")
BLOCK = bytes(range(100, 132))
KEY = record_key(SPACE, BLOCK, 3, 1)


def write_model(directory: Path, data: bytes, *, config: str = "{}", name: str = "model.safetensors") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config, encoding="utf-8")
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    (directory / name).write_bytes(len(header).to_bytes(8, "little") + header + data)
    return directory


# --- keys -------------------------------------------------------------------------------------------


def test_d15_keys_are_the_same_on_every_machine_and_topology() -> None:
    """Any later version must find them again; layers and heads count over the whole model."""
    assert len(KEY) == KEY_BYTES == 52
    assert SPACE + BLOCK + bytes([0, 3, 0, 1]) == KEY
    assert SPACE.hex() == "b7b03245907fdde550c86611315b7a53"


def test_h17_keys_of_one_block_and_layer_are_neighbours_and_no_two_are_equal() -> None:
    blocks = [random.Random(seed).randbytes(32) for seed in range(3)]
    places = [(block, layer, head) for block in blocks for layer in (0, 1, 255, 256) for head in (0, 7, 256)]
    keys = {record_key(SPACE, *place): place for place in places}
    assert len(keys) == len(places)
    ordered = [keys[key] for key in sorted(keys)]
    assert ordered == sorted(places)


@pytest.mark.parametrize(
    "other",
    [
        namespace(bytes(32), dtype="bfloat16", block_size=32, kind="keys and values"),
        namespace(IDENTITY, dtype="float16", block_size=32, kind="keys and values"),
        namespace(IDENTITY, dtype="bfloat16", block_size=16, kind="keys and values"),
        namespace(IDENTITY, dtype="bfloat16", block_size=32, kind="latent"),
        namespace(IDENTITY, dtype="bfloat163", block_size=2, kind="keys and values"),
    ],
)
def test_r9_what_cannot_stand_for_each_other_has_other_names(other: bytes) -> None:
    assert len(other) == 16
    assert other != SPACE


# --- the model --------------------------------------------------------------------------------------


def test_d15_a_copy_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(5 * SAMPLE_BYTES)
    first = write_model(tmp_path / "a", data)
    second = write_model(tmp_path / "b", data)
    (second / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert model_identity(first) == model_identity(second)
    assert len(model_identity(first)) == 32


@pytest.mark.parametrize("place", [0, 5 * SAMPLE_BYTES // 2, 5 * SAMPLE_BYTES - 1])
def test_r9_a_training_of_the_same_shapes_is_another_model(tmp_path: Path, place: int) -> None:
    data = bytearray(random.Random(0).randbytes(5 * SAMPLE_BYTES))
    first = model_identity(write_model(tmp_path / "a", bytes(data)))
    data[place] ^= 1
    assert model_identity(write_model(tmp_path / "a", bytes(data))) != first


def test_r9_config_names_and_headers_are_part_of_a_model(tmp_path: Path) -> None:
    directories = [
        write_model(tmp_path / "a", b"12"),
        write_model(tmp_path / "b", b"12", config='{"rope_theta": 1}'),
        write_model(tmp_path / "c", b"12", name="model-00001-of-00001.safetensors"),
        write_model(tmp_path / "d", b"123"),
        write_model(tmp_path / "e", b""),
        write_model(write_model(tmp_path / "f", b"12"), b"12", name="more.safetensors"),
    ]
    assert len({model_identity(directory) for directory in directories}) == len(directories)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json cannot be read"):
        model_identity(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="found none"):
        model_identity(tmp_path)
    for content in (b"", b"\xff" * 8, (100).to_bytes(8, "little") + b"{}"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="expected a length and a header"):
            model_identity(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="expected a file to read"):
        model_identity(tmp_path)


# --- records ----------------------------------------------------------------------------------------


@given(payload=st.binary(max_size=300), key=st.binary(min_size=1, max_size=64))
def test_a_record_gives_back_its_payload(payload: bytes, key: bytes) -> None:
    record = seal(key, payload)
    assert unseal(key, record) == payload
    assert len(record) == len(payload) + overhead_bytes(key)


@pytest.mark.parametrize("payload", [b"", b"some bytes of keys and values"])
def test_r9_every_flipped_bit_is_seen(payload: bytes) -> None:
    record = seal(KEY, payload)
    for place in range(len(record)):
        for bit in range(8):
            bad = bytearray(record)
            bad[place] ^= 1 << bit
            assert unseal(KEY, bytes(bad)) is None, (place, bit)


def test_r9_a_record_that_is_cut_or_goes_on_is_seen() -> None:
    record = seal(KEY, b"some bytes of keys and values")
    assert [n for n in range(len(record)) if unseal(KEY, record[:n]) is not None] == []
    assert unseal(KEY, record + b"\0") is None
    assert unseal(KEY, bytes(len(record))) is None


@pytest.mark.parametrize(
    "other",
    [
        record_key(SPACE, BLOCK[::-1], 3, 1),
        record_key(SPACE, BLOCK, 2, 1),
        record_key(SPACE, BLOCK, 3, 0),
        record_key(bytes(16), BLOCK, 3, 1),
        KEY[:-1],
    ],
    ids=["block", "layer", "head", "model", "shorter"],
)
def test_r9_a_record_under_the_name_of_another_is_seen(other: bytes) -> None:
    assert unseal(KEY, seal(other, b"payload")) is None


def test_another_version_of_a_record_is_none() -> None:
    record = bytearray(seal(KEY, b"payload"))
    record[4] += 1
    assert unseal(KEY, bytes(record)) is None
