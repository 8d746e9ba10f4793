"""Finds a model on this machine by its name: in the hub's cache, in Ollama's store, in LM Studio's folder.

`locate_model` is the only way from a name to files; `families.registry` calls it for a text that is neither a
path nor `demo`. No connection is opened. Only small files are read: references of the hub's cache, Ollama's
manifests and LM Studio's settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import ModelConfigError
from penstock.local_models.gguf_names import GgufModel, gguf_models, meant, shortest_name
from penstock.local_models.hub_cache import CachedRepository, files_below, hub_cache_directory
from penstock.local_models.lm_studio import lm_studio_models
from penstock.local_models.model_name import EXAMPLE, ModelName
from penstock.local_models.ollama import ollama_directories, ollama_model

Place = Literal["hub cache", "Ollama", "LM Studio"]

_SAYS_WHAT_IT_IS = ("config.json", "adapter_config.json")  # the second is refused when it is read
_MAX_SHOWN = 20  # candidates in one message
_MAX_TEXT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedModel:
    """The place of a model on this machine.

    Attributes:
        path: a directory with `config.json`, or a GGUF file; of a split GGUF file, the first part.
        name: a name that means this model and no other.
        is_gguf: whether `path` is a GGUF file and not a directory.
    """

    path: Path
    name: str
    place: Place
    is_gguf: bool


def locate_model(text: str) -> LocatedModel:
    """Return the model that a name means.

    If the name means a directory of the hub's cache with `config.json`, that is the model. Otherwise the name
    must mean exactly one usable GGUF model of all stores. Incomplete and damaged models are left out of the
    count; the error is about one of them if no usable model is meant.

    Raises:
        ModelConfigError: no model of this name is here, or several are, or the model is incomplete or
            damaged. The error's code is `model_absent` if `penstock pull` could help.
    """
    name = ModelName.parse(text)
    if name is None:
        raise _not_a_name(text)
    directory = _directory_of(name)
    if directory is not None:
        return directory
    meant_by_it = [*_in_hub_cache(name), *_in_ollama(name), *_in_lm_studio(name)]
    candidates = [each for each in meant_by_it if isinstance(each, LocatedModel)]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise _ambiguous(name, candidates)
    raise next((each for each in meant_by_it if isinstance(each, ModelConfigError)), _absent(name))


def _directory_of(name: ModelName) -> LocatedModel | None:
    snapshot = CachedRepository.of(name).main_snapshot() if name.is_of_hub and not name.file else None
    if snapshot is None or not any((snapshot / file).exists() for file in _SAYS_WHAT_IT_IS):
        return None
    files = files_below(snapshot)
    if gguf_models(files) and not any(file.endswith(".safetensors") for file in files):
        return None  # a repository of GGUF files, which may have a config.json too
    return LocatedModel(path=snapshot, name=str(name), place="hub cache", is_gguf=False)


def _in_hub_cache(name: ModelName) -> Iterator[LocatedModel | ModelConfigError]:
    snapshot = CachedRepository.of(name).main_snapshot() if name.is_of_hub else None
    if snapshot is None:
        return
    models = gguf_models(files_below(snapshot))
    for model in meant(models, name.file):
        shown = f"{name.path}:{shortest_name(model, models)}"
        if model.num_missing:
            yield _incomplete(shown, snapshot, model)
        else:
            yield LocatedModel(path=snapshot / model.first, name=shown, place="hub cache", is_gguf=True)


def _in_ollama(name: ModelName) -> Iterator[LocatedModel | ModelConfigError]:
    try:
        model = ollama_model(name)
    except ModelConfigError as error:
        yield error
        return
    if model is not None:
        yield LocatedModel(path=model.path, name=model.name, place="Ollama", is_gguf=True)


def _in_lm_studio(name: ModelName) -> Iterator[LocatedModel | ModelConfigError]:
    for model in lm_studio_models():
        if model.is_meant_by(name):
            shown = f"{model.publisher}/{model.repository}:{model.gguf.first}"
            if model.gguf.num_missing:
                yield _incomplete(shown, model.directory, model.gguf)
            else:
                yield LocatedModel(path=model.path, name=shown, place="LM Studio", is_gguf=True)


def _not_a_name(text: str) -> ModelConfigError:
    shown = text[:_MAX_TEXT].encode("unicode_escape").decode("ascii")
    return ModelConfigError(
        f'model "{shown}" is neither a directory nor a name such as {EXAMPLE}.',
        remedy="Give the directory of a Hugging Face style checkpoint, or `demo`.",
        param="model",
    )


def _absent(name: ModelName) -> ModelConfigError:
    stores = ", ".join(map(str, ollama_directories()[:1]))
    if not name.is_of_hub:
        return ModelConfigError(
            f'model "{name}" is neither a directory nor a hub name such as {EXAMPLE}; Ollama\'s store '
            f"({stores}) and LM Studio's folder do not have it either.",
            remedy="Give the directory of a Hugging Face style checkpoint, or `demo`; `penstock ls` lists "
            "the models of this machine.",
            param="model",
        )
    return ModelConfigError(
        f"model {name} is neither a directory here nor in the Hugging Face cache {hub_cache_directory()}.",
        remedy=f"Download it first: `penstock pull {name}`, or serve it with --download. Or give the "
        "directory of a checkpoint.",
        param="model",
        code="model_absent",
    )


def _ambiguous(name: ModelName, candidates: Sequence[LocatedModel]) -> ModelConfigError:
    listed = "; ".join(f"{each.name} ({each.place}: {each.path})" for each in candidates[:_MAX_SHOWN])
    more = f"; and {len(candidates) - _MAX_SHOWN} more" if len(candidates) > _MAX_SHOWN else ""
    return ModelConfigError(
        f"{name} matches {len(candidates)} models: {listed}{more}.",
        remedy="Give the longer name of one of them, or its path.",
        param="model",
        code="model_ambiguous",
    )


def _incomplete(shown: str, directory: Path, model: GgufModel) -> ModelConfigError:
    total = len(model.parts) + model.num_missing
    return ModelConfigError(
        f"{shown} is not complete: {len(model.parts)} of its {total} parts are in {directory}.",
        remedy="Download the others, for instance with `penstock pull`.",
        param="model",
        code="model_incomplete",
    )
