"""The models that a head serves, as its workers may ask for them: by identity, and by the names of tensors.

A model is here from the moment at which the head gives one of its stages to a worker. Whatever else is on the
head's disk has no name here. Used by `hosts.gathering`, and by the threads of `hosts.weights.weight_server`.
"""

from __future__ import annotations

import threading
from pathlib import Path

import xxhash

from penstock.errors import CheckpointError, ModelError, ProtocolError, UnsupportedModelError
from penstock.hosts.weights.tensor_digests import TensorDigests
from penstock.hosts.weights.weight_wire import Description, SmallFile, TensorShape
from penstock.kvstore.names import model_identity
from penstock.tokenizer.sources.model_files import tokenizer_content
from penstock.weights.checkpoint import Checkpoint, TensorEntry

TOKENIZER = "tokenizer.json"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    TOKENIZER,
)  # all that ranks read beside weights
MAX_SMALL_BYTES = 256 << 20  # as `grammar.matcher` takes of a tokenizer


class ServedModel:
    """One checkpoint.

    Raises:
        UnsupportedModelError: the model is in a format that is not sent to other hosts.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise UnsupportedModelError(
                f"{directory.name} is a GGUF file, and their weights are not sent to other hosts so far.",
                remedy="Keep all stages on this machine, or serve the model's Hugging Face checkpoint.",
                param="model",
            )
        self._directory = directory
        self._checkpoint = Checkpoint(directory)

    @property
    def num_tensors(self) -> int:
        """Return how many tensors the model has."""
        return len(self._checkpoint.names)

    def description(self) -> Description:
        """Return what the model is made of."""
        entries = [self._checkpoint.entry(name) for name in sorted(self._checkpoint.names)]
        return Description(
            files=[
                SmallFile(name, len(content), xxhash.xxh3_128_digest(content))
                for name in SMALL_FILES
                if (content := self._content(name)) is not None
            ],
            tensors=[TensorShape(entry.name, entry.dtype, entry.shape) for entry in entries],
        )

    def tensor(self, name: str) -> TensorEntry:
        """Return where a tensor is; raises `CheckpointError` where the model has none of this name."""
        return self._checkpoint.entry(name)

    def small_file(self, name: str) -> bytes:
        """Return the content of a file beside the weights.

        Raises:
            ProtocolError: it is not one that ranks read, or the model has none.
        """
        content = self._content(name) if name in SMALL_FILES else None
        if content is None:
            raise ProtocolError("a worker has asked for a file that no rank reads.")
        return content

    def _content(self, name: str) -> bytes | None:
        """Return the content of a small file; None where there is none, or one that no rank would read."""
        path = self._directory / name
        if name == TOKENIZER and not path.is_file():
            return self._other_vocabulary()
        try:
            if not path.is_file() or path.stat().st_size > MAX_SMALL_BYTES:
                return None
            return path.read_bytes()
        except OSError as error:
            raise CheckpointError(
                file=name, expected="a readable file", found=error.strerror or "an error"
            ) from error

    def _other_vocabulary(self) -> bytes | None:
        """Return what ranks read of a vocabulary that is in another file than `tokenizer.json`."""
        try:
            return tokenizer_content(self._directory)
        except ModelError:
            return None


class ServedModels:
    """All models of which a worker has been given a stage. Thread-safe.

    Attributes:
        digests: of their tensors.
    """

    def __init__(self, digests: TensorDigests) -> None:
        self.digests = digests
        self._directories: dict[bytes, Path] = {}
        self._identities: dict[str, bytes] = {}  # by directory, of the supervisor's thread alone
        self._mutex = threading.Lock()

    def identify(self, path: str) -> bytes:
        """Return the identity of the model in a directory of the head, and serve the model from now on.

        Where its files can no longer be read it is what it was: a worker may have a copy.

        Raises:
            ModelError: they cannot be read, and never could.
        """
        try:
            identity = model_identity(Path(path))
        except ModelError:
            if path not in self._identities:
                raise
            return self._identities[path]
        with self._mutex:
            self._directories[identity] = Path(path)
        self._identities[path] = identity
        return identity

    def open(self, identity: bytes) -> ServedModel:
        """Return a model, as its files are now.

        Raises:
            ModelError: no worker was given a stage of such a model, or its files cannot be read.
        """
        with self._mutex:
            directory = self._directories.get(identity)
        if directory is None:
            raise ModelError("the head does not serve this model.", code="model_not_served")
        try:
            return ServedModel(directory)
        except CheckpointError as error:
            if str(directory) not in error.message:
                raise
            raise ModelError(  # no path of the head is for a worker
                "the weights of the model are no longer where the head has found them.",
                code="model_not_served",
            ) from error
