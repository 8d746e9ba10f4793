"""The files that ranks read of a model besides its tensors: small files of a checkpoint, or GGUF headers.

The head sends them whole, and a worker keeps them by their content. No name on a worker's disk comes from the
head, so headers do not have the names of the head's files: they are called `model.gguf` or, if the model is
split, `model-00001-of-0000N.gguf` and so on. A header is sent as it is, with the vocabulary, which grammars
need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from penstock.config.hosts import SAME_VERSION
from penstock.errors import ModelError, ProtocolError, unreadable
from penstock.gguf.part_names import MAX_PARTS, SUFFIX, part_name
from penstock.hosts.weights.weight_wire import SmallFile
from penstock.tokenizer.sources.model_files import tokenizer_content

TOKENIZER = "tokenizer.json"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    TOKENIZER,
)  # all that ranks read of a checkpoint beside weights
MAX_SMALL_BYTES = 256 << 20  # the limit of `grammar.matcher` for tokenizers, `gguf.header_bytes` for headers


class SmallFiles(Protocol):
    """The interface of the small files of one model: those that ranks read beside its tensors."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the files that the model may have."""
        ...

    def content(self, name: str) -> bytes | None:
        """Return the content of the file `name`; None if the model has none, or it is too large for ranks.

        Raises:
            CheckpointError: the file cannot be read.
        """
        ...


class CheckpointFiles:
    """The small files in the directory of a checkpoint, such as its config.json. Implements `SmallFiles`."""

    names = SMALL_FILES

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def content(self, name: str) -> bytes | None:
        path = self._directory / name
        if name == TOKENIZER and not path.is_file():
            return self._other_vocabulary()
        try:
            if not path.is_file() or path.stat().st_size > MAX_SMALL_BYTES:
                return None
            return path.read_bytes()
        except OSError as error:
            raise unreadable(name, error) from error

    def _other_vocabulary(self) -> bytes | None:
        """Return a `tokenizer.json` for a vocabulary that is in another file; None if there is none."""
        try:
            return tokenizer_content(self._directory)
        except ModelError:
            return None


class GgufHeaders:
    """The headers of the files of a model in GGUF. Implements `SmallFiles`.

    Args:
        sizes: bytes of the header of each file, in order.
    """

    def __init__(self, sizes: Mapping[Path, int]) -> None:
        self.names = header_names(len(sizes))
        self._headers = dict(zip(self.names, sizes.items(), strict=True))

    def content(self, name: str) -> bytes:
        path, size = self._headers[name]
        try:
            with path.open("rb") as file:
                return file.read(size)
        except OSError as error:
            raise unreadable(path.name, error) from error


def header_names(count: int) -> list[str]:
    """Return the names under which the headers of a model of `count` GGUF files are sent and kept."""
    if count == 1:
        return [f"model{SUFFIX}"]
    return [part_name("model", number, count) for number in range(1, count + 1)]


def first_header(names: Iterable[str]) -> str | None:
    """Return the name of the GGUF header by which a model is opened; None if the model is not in GGUF."""
    return min((name for name in names if name.endswith(SUFFIX)), default=None)


def known_files(files: Sequence[SmallFile]) -> list[SmallFile]:
    """Return, of the files that a head describes, those that ranks read.

    Raises:
        ProtocolError: they are not the files of one model.
    """
    headers = [file.name for file in files if file.name.endswith(SUFFIX)]
    known = [file for file in files if file.name in SMALL_FILES or file.name in headers]
    if (
        len(headers) > MAX_PARTS
        or headers != header_names(len(headers))
        or len({file.name for file in known}) < len(known)
        or any(not 0 <= file.num_bytes <= MAX_SMALL_BYTES for file in known)
        or sum(file.num_bytes for file in known) > len(SMALL_FILES) * MAX_SMALL_BYTES
    ):
        raise ProtocolError("the head describes a file that no rank would read.", remedy=SAME_VERSION)
    return known
