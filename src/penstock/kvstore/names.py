"""The names of records: which model, in which form, which block, which layer, which attention head.

    ┌────────────────┬────────────────────────────────┬───────┬──────┐
    │ namespace 16 B │ hash of the block 32 B         │ layer │ head │   layer and head: u16, big-endian
    └────────────────┴────────────────────────────────┴───────┴──────┘

So records of one block, and of one layer within it, follow each other in byte order. Two stages never write
the same record, as they hold different layers [H17]. Yet a name does not contain a stage, rank or epoch: a
record that was written with two stages is found with three stages, or with two ranks in a stage [d15]. Called
to move blocks to a store and back, and to know whether a model is still the same. `model_identity` and
`file_identities` read files of the model; the other functions only compute.
"""

from __future__ import annotations

import hashlib
import stat
import struct
from pathlib import Path
from typing import BinaryIO, Protocol

from penstock.errors import CheckpointError, ModelConfigError
from penstock.gguf.part_names import part_paths

MIN_KEY_BYTES = 32  # of every key in a store
MAX_KEY_BYTES = 64

NAMESPACE_BYTES = 16
BLOCK_HASH_BYTES = 32
_PLACE = struct.Struct(">HH")  # layer, head
KEY_BYTES = NAMESPACE_BYTES + BLOCK_HASH_BYTES + _PLACE.size

ENTRY_LAYER = 0xFFFF  # of the catalogue's entries, in place of a layer; no model has so many

_MAX_HEADER_BYTES = 100 << 20  # as `weights.checkpoint` allows
_LENGTH_BYTES = 8
SAMPLE_BYTES = 64 << 10
_CONFIG_FILE = "config.json"
_GGUF_MAGIC = b"GGUF"
GGUF_SAMPLE_BYTES = 1 << 20  # from its start: metadata, and in most files the vocabulary's beginning


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def record_key(namespace: bytes, block_hash: bytes, layer: int, head: int) -> bytes:
    """Return the key of the part of a block that belongs to one head of one layer.

    Args:
        layer: number in the model, in [0, 65536), whichever stage has it.
        head: number of the model's KV head, in [0, 65536), whichever rank has it.
    """
    assert len(namespace) == NAMESPACE_BYTES, f"a namespace of {len(namespace)} bytes"
    assert len(block_hash) == BLOCK_HASH_BYTES, f"a block hash of {len(block_hash)} bytes"
    return namespace + block_hash + _PLACE.pack(layer, head)


def is_entry(key: bytes) -> bool:
    """Return whether this is the key of an entry of the catalogue, which has one for each stored block."""
    return len(key) == KEY_BYTES and _PLACE.unpack_from(key, KEY_BYTES - _PLACE.size)[0] == ENTRY_LAYER


def namespace(identity: bytes, *, dtype: str, block_size: int, kind: str) -> bytes:
    """Return the 16 bytes that begin all keys of records that can be used in place of each other.

    Args:
        identity: identity of the model's files (`model_identity`).
        dtype: dtype of the stored numbers, such as "bfloat16".
        block_size: tokens per block.
        kind: form of the payload, and all else that changes its numbers, such as how weights are quantised.
    """
    state = hashlib.blake2b(b"penstock kv namespace\0", digest_size=NAMESPACE_BYTES)
    for part in (identity, dtype.encode(), str(block_size).encode(), kind.encode()):
        _add(state, part)
    return state.digest()


def model_identity(directory: Path) -> bytes:
    """Return 32 bytes that say which model this is.

    They are a hash of:

    - the content of config.json;
    - for each `*.safetensors` file, in order of names: its name, size and header, and 64 KiB each from the
      start, the middle and the end of its data;
    - for each GGUF file: the same, with its first MiB in place of the header, and no config.json.

    The hash is not over all data, since every start would then read every byte of a checkpoint.

    It tells apart other architectures, shapes, dtypes, quantisations, divisions into files, and trainings of
    the same shapes, since a training changes numbers everywhere. It does not tell apart two checkpoints of
    equal headers that differ only between the samples, such as one edited by hand in a few rows. The
    tokenizer and the files' dates and places do not count: keys and values follow from token ids and weights
    alone.

    Raises:
        ModelConfigError: the directory has no config.json that can be read.
        CheckpointError: the directory has no safetensors file, or a file is not in its format.
    """
    state = hashlib.sha256(b"penstock model\0")
    if directory.is_dir():
        _add_config(state, directory)
    for path in _weight_files(directory):
        _add(state, path.name.encode("utf-8", "surrogateescape"))
        _add_file(state, path)
    return state.digest()


def file_identities(directory: Path) -> dict[str, bytes]:
    """Return a hash of 16 bytes for config.json and each weight file, of what `model_identity` reads of it.

    Raises what `model_identity` raises.
    """
    states = {}
    if directory.is_dir():
        states[_CONFIG_FILE] = hashlib.sha256()
        _add_config(states[_CONFIG_FILE], directory)
    for path in _weight_files(directory):
        states[path.name] = hashlib.sha256()
        _add_file(states[path.name], path)
    return {name: state.digest()[:NAMESPACE_BYTES] for name, state in states.items()}


def _add_config(state: _Hash, directory: Path) -> None:
    try:
        _add(state, (directory / _CONFIG_FILE).read_bytes())
    except OSError as error:
        raise ModelConfigError(
            f"{directory / _CONFIG_FILE} cannot be read: {error.strerror}.",
            remedy="Give the directory of a Hugging Face style checkpoint.",
        ) from error


def _weight_files(directory: Path) -> list[Path]:
    """Return the files with weights in a directory; for a GGUF file, all files of that model."""
    if not directory.is_dir():
        return part_paths(directory)
    files = sorted(directory.glob("*.safetensors"), key=lambda path: path.name)
    if not files:
        raise CheckpointError(
            file=str(directory),
            expected="files *.safetensors",
            found="none",
            remedy="Give a directory with safetensors, or a GGUF file; convert other formats first.",
        )
    return files


def _add_file(state: _Hash, path: Path) -> None:
    try:
        _add_content(state, path)
    except OSError as error:
        raise CheckpointError(
            file=path.name, expected="a file to read", found=error.strerror or str(error)
        ) from error


def _add_content(state: _Hash, path: Path) -> None:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # anything else could block for ever
        raise CheckpointError(file=path.name, expected="a file to read", found="something else")
    size = status.st_size
    _add(state, str(size).encode())
    with path.open("rb") as file:
        length = file.read(_LENGTH_BYTES)
        if length.startswith(_GGUF_MAGIC):
            _add(state, length + file.read(GGUF_SAMPLE_BYTES))
            _add_samples(state, file, _LENGTH_BYTES, size)
            return
        num_header_bytes = int.from_bytes(length, "little")
        if len(length) < _LENGTH_BYTES or num_header_bytes > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise CheckpointError(
                file=path.name,
                expected="a length and a header",
                found=f"{size:,} bytes that do not hold them",
            )
        _add(state, length + file.read(num_header_bytes))
        _add_samples(state, file, _LENGTH_BYTES + num_header_bytes, size)


def _add_samples(state: _Hash, file: BinaryIO, begin: int, end: int) -> None:
    """Add 64 KiB from start, middle and end of `[begin, end)`; the three overlap in a short range."""
    last = max(begin, end - SAMPLE_BYTES)
    for offset in (begin, (begin + last) // 2, last):
        file.seek(offset)
        _add(state, file.read(min(SAMPLE_BYTES, end - offset)))


def _add(state: _Hash, part: bytes) -> None:
    """Add a part with its length, so that no two lists of parts look alike."""
    state.update(len(part).to_bytes(8, "little"))
    state.update(part)
