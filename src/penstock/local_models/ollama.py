"""Ollama's store on this machine: which models it has, and in which file each of them is.

`manifests/<registry>/<namespace>/<model>/<tag>` is JSON that lists layers; a layer is the file
`blobs/sha256-<digest>`. Reads manifests alone; nothing in the store is changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.errors import ModelConfigError
from penstock.local_models.model_name import ModelName

REGISTRY, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_OTHER_LAYERS = "application/vnd.ollama.image."
_ADAPTER = "adapter"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_MANIFEST_BYTES = 1 << 20
_OF_THE_SERVICE = Path("/usr/share/ollama/.ollama/models")


class _Layer(msgspec.Struct):
    mediaType: str
    digest: str
    size: int = 0


class _Manifest(msgspec.Struct):
    layers: list[_Layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaModel:
    """One model and tag of the store.

    Attributes:
        name: name and tag, as Ollama shows them: `qwen3:8b`.
        path: the GGUF file.
        size: bytes of that file, as the manifest says.
        beside: files of the other layers by their kind, such as `template`, `params` or `projector`.
    """

    name: str
    path: Path
    size: int
    beside: dict[str, Path]


def ollama_directories() -> list[Path]:
    """Return Ollama's stores: the one of `OLLAMA_MODELS`, else the user's and the system service's."""
    if explicit := os.environ.get("OLLAMA_MODELS"):
        return [Path(os.path.expanduser(explicit))]
    return [Path(os.path.expanduser("~/.ollama/models")), _OF_THE_SERVICE]


def ollama_model(name: ModelName) -> OllamaModel | None:
    """Return the model that a name means in Ollama's stores, or None if no store has it.

    Raises:
        ModelConfigError: the manifest cannot be read, does not name exactly one GGUF file, or that file is
            missing; or the model has an adapter.
    """
    if len(name.repository) > 3 or "/" in name.file:
        return None
    unsaid = (REGISTRY, NAMESPACE)[: 3 - len(name.repository)]
    registry, namespace, model = (*unsaid, *name.repository)
    for store in ollama_directories():
        manifest = store / "manifests" / registry / namespace / model / (name.file or TAG)
        if _is_file(manifest):
            return _opened(store, manifest)
    return None


def ollama_models() -> Iterator[OllamaModel | ModelConfigError]:
    """Yield every model of the stores, and an error for each that cannot be used."""
    for store in ollama_directories():
        for manifest in sorted((store / "manifests").glob("*/*/*/*")):
            if not _is_file(manifest):
                continue
            try:
                yield _opened(store, manifest)
            except ModelConfigError as error:
                yield error


def _opened(store: Path, manifest: Path) -> OllamaModel:
    name = _shown_name(manifest.relative_to(store / "manifests").parts)
    layers = _layers(manifest, name)
    of_weights = [layer for layer in layers if layer.mediaType == _MODEL_LAYER]
    if len(of_weights) != 1:
        raise ModelConfigError(
            f"{name} of Ollama's store has {len(of_weights)} layers with a GGUF file; only one is supported.",
            remedy="Pull the model from the hub: `penstock pull ORG/NAME`.",
            param="model",
        )
    path = _blob(store, of_weights[0])
    if not _is_file(path):
        raise ModelConfigError(
            f"{name} of Ollama's store lacks its file: {path} does not exist.",
            remedy=f"Download it again: `ollama pull {name}`.",
            param="model",
        )
    beside = {
        layer.mediaType.removeprefix(_OTHER_LAYERS): _blob(store, layer)
        for layer in layers
        if layer.mediaType.startswith(_OTHER_LAYERS) and layer.mediaType != _MODEL_LAYER
    }
    if _ADAPTER in beside:  # without it, another model would answer
        raise ModelConfigError(
            f"{name} of Ollama's store has an adapter (LoRA) beside its GGUF file, which is not supported.",
            remedy="Merge the adapter into the model, or serve the model without it by the name of its base.",
            param="model",
        )
    return OllamaModel(name=name, path=path, size=of_weights[0].size, beside=beside)


def _layers(manifest: Path, name: str) -> list[_Layer]:
    try:
        with manifest.open("rb") as file:
            content = file.read(_MAX_MANIFEST_BYTES)
        layers = msgspec.json.decode(content, type=_Manifest).layers
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _bad_manifest(manifest, name, str(error)) from error
    for layer in layers:
        if not _DIGEST.fullmatch(layer.digest):
            raise _bad_manifest(manifest, name, f"{layer.digest[:80]!r} is not a digest")
    return layers


def _bad_manifest(manifest: Path, name: str, why: str) -> ModelConfigError:
    return ModelConfigError(
        f"{name} of Ollama's store cannot be read: {manifest}: {why}.",
        remedy=f"Download it again: `ollama pull {name}`.",
        param="model",
    )


def _blob(store: Path, layer: _Layer) -> Path:
    return store / "blobs" / layer.digest.replace(":", "-")


def _shown_name(parts: tuple[str, ...]) -> str:
    *place, model, tag = parts
    shown = [part for part in place if part not in (REGISTRY, NAMESPACE)]
    return f"{'/'.join([*shown, model])}:{tag}"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the store of the system service belongs to another user
        return False
