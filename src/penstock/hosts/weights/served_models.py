"""The models that a head serves: its workers ask for a model by identity, and for its tensors by name.

A model can be asked for as soon as `hosts.gathering` has called `identify` for it, to give one of its stages
to a worker. Other files of the head's disk cannot be named. The threads of `hosts.weights.weight_server`
answer the workers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import xxhash

from penstock.errors import CheckpointError, ModelError, ProtocolError, unreadable
from penstock.gguf.part_names import part_paths
from penstock.hosts.weights.small_files import CheckpointFiles, GgufHeaders, SmallFiles
from penstock.hosts.weights.tensor_digests import FileState, TensorDigests, state_of
from penstock.hosts.weights.weight_wire import Description, SmallFile, TensorShape
from penstock.kvstore.names import model_identity
from penstock.weights.checkpoint import Checkpoint, TensorEntry
from penstock.weights.tensor_files import GgufTensors, TensorFiles

_States = list[FileState]


class ServedModel:
    """Finds the tensors and small files of one model on the head's disk, which workers fetch from there.

    The index of the tensors is as of the opening. `ServedModels.open` therefore opens a model anew when its
    files may have changed.

    Args:
        tensors: the tensors in its files.
        small: the files that ranks read besides the tensors, such as a config.json.
    """

    def __init__(self, tensors: TensorFiles, small: SmallFiles) -> None:
        self._tensors = tensors
        self._small = small

    @classmethod
    def open(cls, path: Path) -> ServedModel:
        """Return the model of a directory with safetensors, or of a GGUF file.

        Raises:
            CheckpointError: its files cannot be read, or are not sound.
        """
        if path.is_dir():
            return cls(Checkpoint(path), CheckpointFiles(path))
        from penstock.gguf.file import GgufFile  # here: numpy is slow to import

        file = GgufFile.open(path)
        headers = GgufHeaders(dict(zip(file.parts, file.data_starts, strict=True)))
        return cls(GgufTensors(file), headers)

    @property
    def num_tensors(self) -> int:
        """The number of tensors that the model has."""
        return len(self._tensors.names)

    @property
    def num_small_files(self) -> int:
        """The number of small files, such as a config.json, for which ranks may ask."""
        return len(self._small.names)

    def description(self) -> Description:
        """Return what the model is made of: its small files, and names, types and shapes of its tensors."""
        entries = [self._tensors.entry(name) for name in sorted(self._tensors.names)]
        return Description(
            files=[
                SmallFile(name, len(content), xxhash.xxh3_128_digest(content))
                for name in self._small.names
                if (content := self._small.content(name)) is not None
            ],
            tensors=[TensorShape(entry.name, entry.dtype, entry.shape) for entry in entries],
        )

    def tensor(self, name: str) -> TensorEntry:
        """Return in which file and at which bytes a tensor is.

        Raises:
            CheckpointError: the model has none of this name.
        """
        return self._tensors.entry(name)

    def small_file(self, name: str) -> bytes:
        """Return the content of a file beside the weights, such as a config.json, by its name.

        Raises:
            ProtocolError: ranks do not read a file of this name, or the model has none.
        """
        content = self._small.content(name) if name in self._small.names else None
        if content is None:
            raise ProtocolError(
                "a worker requested a file that no rank reads, or that the model does not have."
            )
        return content


class ServedModels:
    """All models of which the head has given a stage to a worker. Only one thread may call `identify`.

    Args:
        digests: remembers the digests of their tensors.
    """

    def __init__(self, digests: TensorDigests) -> None:
        self.digests = digests
        self._paths: dict[bytes, Path] = {}
        self._identities: dict[str, bytes] = {}  # by path; only the supervisor's thread uses it
        self._gguf: dict[bytes, tuple[_States, ServedModel]] = {}  # kept: parsing takes time
        self._mutex = threading.Lock()

    def identify(self, path: str) -> bytes:
        """Return the identity of the model at a path of the head, and let workers fetch it from now on.

        If its files can no longer be read, the earlier identity is returned: a worker may have a copy.

        Raises:
            ModelError: the files cannot be read, and no earlier call could read them.
        """
        try:
            identity = model_identity(Path(path))
        except ModelError:
            if path not in self._identities:
                raise
            return self._identities[path]
        with self._mutex:
            self._paths[identity] = Path(path)
        self._identities[path] = identity
        return identity

    def open(self, identity: bytes) -> ServedModel:
        """Return the model of an identity, as its files are now.

        Raises:
            ModelError: no worker was given a stage of such a model, or its files cannot be read.
        """
        with self._mutex:
            path = self._paths.get(identity)
        if path is None:
            raise ModelError("the head does not serve this model.", code="model_not_served")
        try:
            return ServedModel.open(path) if path.is_dir() else self._opened_gguf(identity, path)
        except CheckpointError as error:
            if str(path) not in error.message:
                raise
            raise ModelError(  # workers must not see paths of the head
                "the weights of the model are no longer where the head found them.",
                code="model_not_served",
            ) from error

    def _opened_gguf(self, identity: bytes, path: Path) -> ServedModel:
        """Return a model in GGUF; its headers are read again if a file has changed."""
        states = _states(part_paths(path))
        with self._mutex:
            known, model = self._gguf.get(identity, (None, None))
        if model is None or known != states:
            model = ServedModel.open(path)
            with self._mutex:
                self._gguf[identity] = states, model
        return model


def _states(paths: Iterable[Path]) -> _States:
    """Return the states of some files, by which a change of their content is noticed."""
    states = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise unreadable(path.name, error) from error
        states.append(state_of(status))
    return states
