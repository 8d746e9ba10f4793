"""The files of `deploy/` as tests read them: what kustomize makes of a folder, units of systemd, typed lines.

Of kustomize it knows what our folders use: resources, names of images, and JSON patches that add.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from typed_hosts import commands_of


def documents(path: Path) -> list[Any]:
    """Return what stands in a YAML file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def built(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that `kubectl apply -k` makes of a folder. Changing them changes no others."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    known = {"apiVersion", "kind", "resources", "images", "patches"}
    assert set(kustomization) <= known, "this is not all of kustomize"
    objects: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        path = folder / name
        objects += built(path) if path.is_dir() else documents(path)
    objects = msgspec.json.decode(msgspec.json.encode(objects))  # without what anchors share
    for patch in kustomization.get("patches", []):
        (target,) = [each for each in objects if _is_target(each, patch["target"])]
        for operation in yaml.safe_load(patch["patch"]):
            _add(target, **operation)
    names = {image["name"]: image["newName"] for image in kustomization.get("images", [])}
    _rename_images(objects, names)
    return objects


def _is_target(each: dict[str, Any], target: dict[str, str]) -> bool:
    return (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])


def _add(target: Any, op: str, path: str, value: Any) -> None:
    assert op == "add"
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    for part in way:
        target = target[int(part) if isinstance(target, list) else part]
    if isinstance(target, list):
        assert last == "-"
        target.append(value)
    else:
        target[last] = value


def _rename_images(node: Any, names: dict[str, str]) -> None:
    if isinstance(node, list):
        for each in node:
            _rename_images(each, names)
    elif isinstance(node, dict):
        if isinstance(image := node.get("image"), str):
            name, colon, tag = image.partition(":")
            node["image"] = names.get(name, name) + colon + tag
        for each in node.values():
            _rename_images(each, names)


# --- LeaderWorkerSet: leaderworkerset.x-k8s.io/v1, the fields that we use; their spelling is Kubernetes' ----


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An object without other fields than those of its class."""


class LeaderWorkerTemplate(_Strict):
    """The pods of a group: pod templates stay as they are, for the schemas of Kubernetes."""

    workerTemplate: dict[str, Any]
    leaderTemplate: dict[str, Any]
    size: int = 1
    restartPolicy: Literal["RecreateGroupOnPodRestart", "None"] = "RecreateGroupOnPodRestart"


class LeaderWorkerSetSpec(_Strict):
    """How many groups there are, and how they start."""

    leaderWorkerTemplate: LeaderWorkerTemplate
    replicas: int = 1
    startupPolicy: Literal["LeaderCreated", "LeaderReady"] = "LeaderCreated"


class _Metadata(_Strict):
    name: str
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class LeaderWorkerSet(_Strict):
    """One object."""

    apiVersion: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: _Metadata
    spec: LeaderWorkerSetSpec


def lws_of(manifest: dict[str, Any]) -> LeaderWorkerSet:
    """Return a LeaderWorkerSet; raises `msgspec.ValidationError` if it has other fields or values."""
    return msgspec.convert(manifest, LeaderWorkerSet)


# --- lines ------------------------------------------------------------------------------------------------


def stated_commands(page: str, heading: str) -> list[list[str]]:
    """Return the words of each line that a section of a page has typed, without variables before them."""
    lines = [shlex.split(line) for line in commands_of(page, heading)]
    return [[word for at, word in enumerate(words) if at or "=" not in word] for words in lines]


def units(path: Path) -> dict[str, dict[str, list[str]]]:
    """Return the sections of a unit of systemd: for each name its values, as often as it stands there."""
    sections: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8")).splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            section.setdefault(name, []).append(value)
    return sections


def dockerfile(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each with its arguments on one line."""
    text = re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, arguments) for name, _, arguments in (line.partition(" ") for line in lines)]


def arguments_of(instructions: Sequence[tuple[str, str]], name: str) -> list[str]:
    """Return the arguments of each instruction of this name."""
    return [arguments for each, arguments in instructions if each == name]
