"""Checks, before a rank reads weights, that the model's files look like those of the engine's first load.

`weights.read_digests` compares every byte, while the rank reads it. The check here comes before and takes
milliseconds: it compares config.json, the headers of all weight files, and samples of their data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ModelChangedError
from penstock.kvstore.names import file_identities, model_identity
from penstock.weights.read_digests import parse_table, record


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSamples:
    """Shows by digests of samples of a model's files whether a later load finds the same files.

    The files are config.json and those with weights. Of the weights only the headers and a few places are
    read. A rank that takes the place of a lost one is compared with the engine's first load.

    Attributes:
        identity: one digest of all samples (`kvstore.names.model_identity`).
        table: a record for each file, in the form of `weights.read_digests`; empty if the rank's host knew
            the identity already.
    """

    identity: bytes
    table: bytes


def sample_model(directory: Path, *, identity: bytes, table: bytes, known: bytes = b"") -> ModelSamples:
    """Return samples of the files of a model, after comparing them with those of the first load.

    Args:
        identity, table: the samples of the engine's first load; empty while there is none.
        known: the identity of the model, if the rank's host has verified that the directory has it; the files
            are not sampled again then. Empty: they are sampled now.

    Raises:
        ModelChangedError: a file differs; the error names a file that was there at the first load, or else
            the directory.
    """
    samples = ModelSamples(
        identity=known or model_identity(directory),
        table=b"" if known else b"".join(_file_records(directory).values()),
    )
    if identity and samples.identity != identity:
        raise ModelChangedError(file=_changed_file(directory, table))
    return samples


def _file_records(directory: Path) -> dict[str, bytes]:
    """Return a record for each file, by the file's name."""
    return {name: record(f"\0sampled\0{name}", sample) for name, sample in file_identities(directory).items()}


def _changed_file(directory: Path, table: bytes) -> str:
    """Return the name of the first file that differs; the directory's name if files were added or removed."""
    expected = parse_table(table)
    for name, found in _file_records(directory).items():
        if any(expected.get(key, digest) != digest for key, digest in parse_table(found).items()):
            return name
    return directory.name
