"""The files of a repository that Penstock can use: safetensors and their description, or one model as GGUF.

Chooses by names alone. A file that could run code is never chosen: no pickle (`.bin`, `.pt`), no Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.errors import HubMissingError
from penstock.hub.repository import HubFile, HubRepository
from penstock.local_models.gguf_names import GgufModel, gguf_models, meant, shortest_name
from penstock.local_models.model_name import ModelName

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DESCRIBING = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "tiktoken.model",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
        "quantize_config.json",
        "hf_quant_config.json",
    }
)
_ALSO_DESCRIBING = (".tiktoken",)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_SHOWN = 40


def chosen_gguf(repository: HubRepository, name: ModelName, size_of: Mapping[str, int]) -> list[HubFile]:
    """Return the files of the GGUF model that `name.file` means: one, or all parts of a split.

    Args:
        size_of: bytes of every file of the repository, by path.

    Raises:
        HubMissingError: no model is meant, several are, or a part of the model is missing.
    """
    models = gguf_models(size_of)
    fitting = meant(models, name.file)
    if len(fitting) != 1:
        raise _no_single_gguf(name, fitting, models, size_of)
    (model,) = fitting
    if model.num_missing:
        raise HubMissingError(
            f"{name.path} lacks {model.num_missing} of the {len(model.parts) + model.num_missing} parts of "
            f"{model.stem}.",
            remedy="Choose another file, or tell the owner of the repository.",
        )
    parts = set(model.parts)
    return [file for file in repository.files if file.path in parts]


def describing_files(repository: HubRepository, name: ModelName) -> list[HubFile]:
    """Return the files that a model in safetensors needs beside its weights, the index of shards included.

    Raises:
        HubMissingError: the repository has no such model; the error says what it has.
    """
    paths = {file.path for file in repository.files}
    if SINGLE_FILE not in paths and INDEX_FILE not in paths:
        raise _no_safetensors(name, paths, {file.path: file.size for file in repository.files})
    if "config.json" not in paths:
        raise HubMissingError(
            f"{name.path} has weights but no config.json, which describes the model.",
            remedy="Use a repository in the format of transformers.",
        )
    is_index = INDEX_FILE if SINGLE_FILE not in paths else ""
    return [
        file
        for file in repository.files
        if file.path in DESCRIBING or file.path == is_index or file.path.endswith(_ALSO_DESCRIBING)
    ]


def weight_files(repository: HubRepository, name: ModelName, named: Iterable[str]) -> list[HubFile]:
    """Return the files with the weights.

    Args:
        named: the files that the index of shards names; none if the model has a single file.

    Raises:
        HubMissingError: a file that the index names is not in the repository.
    """
    wanted = set(named) or {SINGLE_FILE}
    by_path = {file.path: file for file in repository.files}
    missing = sorted(wanted - by_path.keys())
    if missing:
        raise HubMissingError(
            f"{name.path} lacks {len(missing)} of the files that its {INDEX_FILE} names, such as "
            f"{missing[0]!r}.",
            remedy="Tell the owner of the repository, or choose another --revision.",
        )
    return [by_path[path] for path in sorted(wanted)]


def _no_single_gguf(
    name: ModelName, fitting: Sequence[GgufModel], models: Sequence[GgufModel], size_of: Mapping[str, int]
) -> HubMissingError:
    if not models:
        return HubMissingError(
            f"{name.path} has no GGUF files, and so has no {name.file}.",
            remedy=f"Leave {name.file} out for its safetensors: `penstock pull {name.path}`.",
        )
    asked = f"{len(fitting)} fit {name.file}" if fitting else f"none is {name.file}"
    shown = _listed(name, fitting or models, models, size_of)
    if not name.file:
        return HubMissingError(
            f"{name.path} has several GGUF files: {shown}.",
            remedy=f"Choose one: `penstock pull {name.path}:{shortest_name(models[0], models)}`.",
            code="hub_choose_file",
        )
    return HubMissingError(
        f"among the GGUF files of {name.path}, {asked}: {shown}.",
        remedy=f"Choose one: `penstock pull {name.path}:{shortest_name((fitting or models)[0], models)}`.",
        code="hub_choose_file",
    )


def _listed(
    name: ModelName, shown: Sequence[GgufModel], models: Sequence[GgufModel], size_of: Mapping[str, int]
) -> str:
    words = []
    for model in shown[:_MAX_SHOWN]:
        size = sum(size_of[part] for part in model.parts)
        words.append(f"{name.path}:{shortest_name(model, models)} ({size / 1e9:.1f} GB)")
    return ", ".join(words) + (f" and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else "")


def _no_safetensors(name: ModelName, paths: set[str], size_of: Mapping[str, int]) -> HubMissingError:
    models = gguf_models(paths)
    if models:
        return _no_single_gguf(name, models, models, size_of)
    if "adapter_config.json" in paths:
        return HubMissingError(
            f"{name.path} is an adapter (LoRA), which is not supported.",
            remedy="Merge it into its base model.",
        )
    if pickles := sorted(path for path in paths if path.endswith(_PICKLES)):
        return HubMissingError(
            f"{name.path} has its weights as {pickles[0]!r}, a format that can run code; only safetensors "
            "are supported.",
            remedy=f"Convert them, or look for a --revision with {SINGLE_FILE}.",
        )
    return HubMissingError(
        f"{name.path} has neither {SINGLE_FILE} nor {INDEX_FILE} nor GGUF files.",
        remedy="Use a repository that has the weights of a language model in one of these formats.",
    )
