"""The models of this machine as `penstock ls` lists them, incomplete and unusable ones included.

Reads the hub's cache, Ollama's store and LM Studio's folder, but of the models only names, sizes and times of
files. `cli.models.verdicts` finds out whether a model can run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import ModelConfigError
from penstock.gguf.part_names import PART_STEM, SUFFIX
from penstock.local_models.gguf_names import gguf_models, shortest_name
from penstock.local_models.hub_cache import MAIN, CachedRepository, cached_repositories, files_below
from penstock.local_models.lm_studio import LmStudioModel, lm_studio_models
from penstock.local_models.locating import Place
from penstock.local_models.ollama import OllamaModel, ollama_models

Kind = Literal["safetensors", "GGUF", "incomplete", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model of this machine.

    Attributes:
        name: the name for `penstock serve`; the path for files of the hub's cache that `main` does not mean.
        place: where the model was found.
        revision: branches and tags in the hub's cache that mean these files; "" if there are none.
        commit: the commit of the files in the hub's cache; "" for other models and for parts of a download.
        path: a directory, a GGUF file, or the folder of a model with parts of a download.
        size: bytes of all its files.
        last_used: when one of its files was last read, in seconds since 1970, if the file system notes that.
    """

    name: str
    place: Place
    revision: str
    commit: str
    kind: Kind
    path: Path
    size: int
    last_used: float


def entries() -> Iterator[Entry | ModelConfigError]:
    """Yield the models of this machine, and an error for each that cannot be read or is damaged."""
    for repository in cached_repositories():
        yield from _readable(f"{repository.name} in the hub's cache", _of_repository(repository))
    for model in ollama_models():
        if isinstance(model, ModelConfigError):
            yield model
        else:
            yield from _readable(f"{model.name} of Ollama's store", _of_ollama(model))
    for found in lm_studio_models():
        yield from _readable(f"{found.path} of LM Studio", _of_lm_studio(found))


def _readable(name: str, found: Iterator[Entry]) -> Iterator[Entry | ModelConfigError]:
    try:
        yield from found
    except OSError as error:  # another user's, or another program removes it now
        yield ModelConfigError(
            f"{name} cannot be read: {error.filename}: {error.strerror}.",
            remedy="Run `penstock ls` again; if it stays, make the folder readable for this user.",
            param="model",
        )


def _of_repository(repository: CachedRepository) -> Iterator[Entry]:
    for snapshot in repository.snapshots():
        revisions = repository.revisions_of(snapshot.name)
        yield from _of_snapshot(repository.name, revisions, snapshot)
    if partial := repository.incomplete_files():
        yield _entry(repository.name, "", "", "incomplete", repository.directory, partial)


def _of_snapshot(name: str, revisions: list[str], snapshot: Path) -> Iterator[Entry]:
    files, is_main = files_below(snapshot), MAIN in revisions
    revision, commit = ", ".join(revisions), snapshot.name
    models = gguf_models(files)
    for model in models:
        shown = f"{name}:{shortest_name(model, models)}" if is_main else str(snapshot / model.first)
        parts = [snapshot / part for part in model.parts]
        kind: Kind = "incomplete" if model.num_missing else "GGUF"
        yield _entry(shown, revision, commit, kind, snapshot / model.first, parts)
    others = [snapshot / file for file in files if not file.endswith(SUFFIX)]
    has_weights = any(file.suffix == ".safetensors" for file in others)
    if others and (has_weights or not models):
        shown = name if is_main else str(snapshot)
        kind = "incomplete" if _lacks_shards(others) else "safetensors" if has_weights else "other"
        yield _entry(shown, revision, commit, kind, snapshot, others)


def _lacks_shards(files: Iterable[Path]) -> bool:
    """Return whether some of `NAME-00001-of-0000N.safetensors` are there, and others are not."""
    found = Counter(
        (file.parent, name["stem"], int(name["count"]))
        for file in files
        if file.suffix == ".safetensors" and (name := PART_STEM.fullmatch(file.stem))
    )
    return any(number < count for (*_, count), number in found.items())


def _entry(
    name: str,
    revision: str,
    commit: str,
    kind: Kind,
    path: Path,
    files: Iterable[Path],
    place: Place = "hub cache",
) -> Entry:
    numbers = [file.stat() for file in files]
    return Entry(
        name=name,
        place=place,
        revision=revision,
        commit=commit,
        kind=kind,
        path=path,
        size=sum(number.st_size for number in numbers),
        last_used=max((number.st_atime for number in numbers), default=0.0),
    )


def _of_ollama(model: OllamaModel) -> Iterator[Entry]:
    yield _entry(model.name, "", "", "GGUF", model.path, [model.path], "Ollama")


def _of_lm_studio(model: LmStudioModel) -> Iterator[Entry]:
    parts = [model.directory / part for part in model.gguf.parts]
    kind: Kind = "incomplete" if model.gguf.num_missing else "GGUF"
    name = f"{model.publisher}/{model.repository}:{model.gguf.first}"
    yield _entry(name, "", "", kind, model.path, parts, "LM Studio")
