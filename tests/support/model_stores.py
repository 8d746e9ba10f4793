"""Models on disk as other programs keep them: the hub's cache, Ollama's store, LM Studio's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def in_hub_cache(
    cache: Path, name: str, files: Mapping[str, bytes], commit: str = COMMIT, revision: str = "main"
) -> Path:
    """Put a model into the hub's cache; return its snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    for path, content in files.items():
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        link = repository / "snapshots" / commit / path
        for place in (blob, link):
            place.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        up = "../" * (2 + path.count("/"))
        link.symlink_to(f"{up}blobs/{blob.name}")
    return repository / "snapshots" / commit


def in_ollama(store: Path, name: str, layers: Mapping[str, bytes]) -> dict[str, Path]:
    """Put a model into Ollama's store, its layers by kind; return the files of the layers.

    Args:
        name: registry, namespace, model and tag, with slashes.
    """
    files, listed = {}, []
    for kind, content in layers.items():
        digest = hashlib.sha256(content).hexdigest()
        files[kind] = store / "blobs" / f"sha256-{digest}"
        files[kind].parent.mkdir(parents=True, exist_ok=True)
        files[kind].write_bytes(content)
        listed.append(
            {
                "mediaType": f"application/vnd.ollama.image.{kind}",
                "digest": f"sha256:{digest}",
                "size": len(content),
            }
        )
    manifest = store / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": listed}))
    return files


def in_lm_studio(folder: Path, *paths: str) -> None:
    """Put files into LM Studio's folder, by their paths below it."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"GGUF" + path.encode())
