"""Removes models from the hub's cache: a whole repository, or one GGUF model of it.

Models in the stores of other programs, such as Ollama, are not removed. Nor is a model whose files some
program has open, or which a running `penstock serve` has on its command line. Called by `penstock rm`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ModelConfigError, ModelError
from penstock.local_models.gguf_names import gguf_models, meant, shortest_name
from penstock.local_models.hub_cache import CachedRepository, files_below
from penstock.local_models.locating import locate_model
from penstock.local_models.model_name import ModelName

_PROCESSES = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A planned removal, before the user is asked.

    Attributes:
        links: links to remove from snapshots; empty if the whole repository is removed.
        blobs: files to remove: those that no other link of the repository leads to.
    """

    name: ModelName
    repository: CachedRepository
    links: tuple[Path, ...]
    blobs: tuple[Path, ...]

    @property
    def freed_bytes(self) -> int:
        return sum(blob.lstat().st_size for blob in self.blobs)

    def carry_out(self) -> None:
        """Remove the files. Raises `ModelError` where the system does not let us."""
        try:
            self._remove()
        except OSError as error:
            raise ModelError(
                f"{self.name} could not be removed: {error.filename}: {error.strerror or error}.",
                remedy="Run the command again as the user who owns the files.",
            ) from error

    def _remove(self) -> None:
        if not self.links:
            shutil.rmtree(self.repository.directory)
            shutil.rmtree(self.repository.lock_directory, ignore_errors=True)
            return
        for path in (*self.links, *self.blobs):
            path.unlink(missing_ok=True)
        _remove_empty(self.repository.directory / "snapshots")


def plan_removal(name: ModelName, processes: Path = _PROCESSES) -> Removal:
    """Return which files to remove for a model, without removing any.

    Args:
        processes: the folder in which Linux shows processes; tests give their own.

    Raises:
        ModelConfigError: the hub's cache does not have the model, or `name.file` means no file or several.
        ModelError: a program uses the model.
    """
    repository = CachedRepository.of(name)
    if not name.is_of_hub or not repository.directory.is_dir():
        raise _not_in_cache(name)
    removal = _of_file(name, repository) if name.file else _of_repository(name, repository)
    users = list(_users(removal, processes))
    if users:
        raise ModelError(
            f"{name} is in use: {'; '.join(users[:5])}.",
            remedy="Stop those programs first.",
            code="model_in_use",
        )
    return removal


def _of_repository(name: ModelName, repository: CachedRepository) -> Removal:
    blobs = tuple(path for path in _walk(repository.directory) if not _is_in_snapshot(path, repository))
    return Removal(name=name, repository=repository, links=(), blobs=blobs)


def _is_in_snapshot(path: Path, repository: CachedRepository) -> bool:
    """Return whether a path is a link in a snapshot, which takes no room, and not a file."""
    return path.is_symlink() and (repository.directory / "snapshots") in path.parents


def _of_file(name: ModelName, repository: CachedRepository) -> Removal:
    links: list[Path] = []
    for snapshot in repository.snapshots():
        models = gguf_models(files_below(snapshot))
        chosen = meant(models, name.file)
        if len(chosen) > 1:
            listed = ", ".join(f"{name.path}:{shortest_name(model, models)}" for model in chosen)
            raise ModelConfigError(f"{name} matches several files: {listed}.", remedy="Name one of them.")
        links += [snapshot / part for model in chosen for part in model.parts]
    if not links:
        raise ModelConfigError(
            f"{name.path} in the hub's cache has no file {name.file}.",
            remedy="`penstock ls` lists the models and files.",
        )
    targets = {link.resolve() for link in links}
    kept = {path.resolve() for path in _walk(repository.directory / "snapshots") if path not in set(links)}
    return Removal(name=name, repository=repository, links=tuple(links), blobs=tuple(sorted(targets - kept)))


def _not_in_cache(name: ModelName) -> ModelConfigError:
    try:
        located = locate_model(str(name))
    except ModelConfigError:
        return ModelConfigError(
            f"{name} is not in the hub's cache.",
            remedy="`penstock ls` lists the models and files.",
            param="name",
        )
    remedy = f"`ollama rm {located.name}` removes it." if located.place == "Ollama" else "Remove it there."
    return ModelConfigError(
        f"{name} belongs to {located.place}, not to Penstock: {located.path}.", remedy=remedy
    )


def _users(removal: Removal, processes: Path) -> Iterator[str]:
    """Yield the programs that use the files. Linux shows open files of this user's programs alone."""
    blobs = {str(blob.resolve()) for blob in removal.blobs}
    for process in sorted(processes.glob("[0-9]*")):
        words = _command_line(process)
        is_server = "serve" in words and any("penstock" in word for word in words)
        if is_server and any(_means(word, removal) for word in words):
            yield f"penstock serve (process {process.name})"
        elif blobs & set(_open_files(process)):
            yield f"process {process.name} has it open"


def _means(word: str, removal: Removal) -> bool:
    """Return whether a word of a command line means what is removed, or a part of it, by name or by path."""
    value = word.partition("=")[2] if word.startswith("--") else word
    if f"{value}/".startswith(f"{removal.repository.directory}/"):
        return True
    named = ModelName.parse(value)
    if named is None or named.path != removal.name.path:
        return False
    if not (named.file and removal.links):  # one of the two means the whole repository
        return True
    return any(model.is_meant_by(named.file) for model in gguf_models(path.name for path in removal.links))


def _command_line(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
    except OSError:
        return []


def _open_files(process: Path) -> Iterator[str]:
    """Yield the files that a process has open or has mapped into its memory."""
    for kind in ("fd", "map_files"):
        try:
            links = list((process / kind).iterdir())
        except OSError:
            continue
        for link in links:
            try:
                yield os.readlink(link)
            except OSError:
                continue


def _walk(directory: Path) -> Iterator[Path]:
    for place, _, files in os.walk(directory):
        yield from (Path(place) / file for file in files)


def _remove_empty(directory: Path) -> None:
    places: Iterable[Path] = [Path(place) for place, _, _ in os.walk(directory, topdown=False)]
    for place in places:
        if not any(place.iterdir()):
            place.rmdir()
