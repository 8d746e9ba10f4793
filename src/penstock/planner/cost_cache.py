"""The cache of measured costs, in the folder `partition`: a file of JSON per model, settings and machines.

The name of a file is a hash of all that the costs depend on. If a file is deleted or damaged, the costs are
measured again. If there is no folder that only this user can write to, nothing is kept.

Costs that were measured without Penstock's CPU kernels are not kept (`are_to_keep`) if this machine can build
the kernels, because the next start may run with them. That holds for ranks on GPUs too, which never run these
kernels.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from penstock.families.spec import ModelSpec
from penstock.kernels.cpu.build_cache import FolderUnusableError, cache_folder, trusted_folder
from penstock.kernels.cpu.compiler import Machine, build_key
from penstock.planner.stage_costs import StageCosts
from penstock.process.config import MeasureConfig

# The fields of a rank's config on which the times of its steps do not depend.
_IRRELEVANT = frozenset(
    {"model_path", "model_identity", "num_blocks", "kv_cache_bytes", "wait_timeout_s", "store", "host"}
)


def cost_key(
    configs: Sequence[MeasureConfig],
    hardware: Sequence[Sequence[object]],
    spec: ModelSpec,
    environ: Mapping[str, str],
) -> str:
    """Hash all that the costs depend on: model, settings of all ranks, kernels, versions and machines.

    Args:
        configs: configs of the ranks' measuring processes.
        hardware: for each rank, values that describe the hardware of its host.
    """
    settings = []
    for config in configs:
        fields = msgspec.to_builtins(config)
        fields["rank"] = {name: value for name, value in fields["rank"].items() if name not in _IRRELEVANT}
        settings.append({name: fields[name] for name in ("rank", "num_rows", "context", "prefill_tokens")})
    parts = {
        "versions": [_version(name) for name in ("penstock", "torch")],
        "settings": settings,
        "spec": spec,
        "kernels": build_key(environ, Machine.detect()),
        "hardware": hardware,
        "visible_gpus": environ.get("CUDA_VISIBLE_DEVICES", ""),
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:32]


def are_to_keep(costs: Sequence[StageCosts], environ: Mapping[str, str]) -> bool:
    """Return whether the next start would measure about the same costs.

    It would if all stages ran with Penstock's CPU kernels, or if this machine cannot build these.
    """
    return all(stage.has_kernels for stage in costs) or not build_key(environ, Machine.detect())


class CostCache:
    """The cache of costs, by key.

    Args:
        folder: a folder that only this user can write to; None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def open(cls, environ: Mapping[str, str]) -> CostCache:
        """Open the cache of this user."""
        try:
            return cls(trusted_folder(cache_folder(environ, "partition")))
        except FolderUnusableError:
            return cls(None)

    def path(self, key: str) -> Path | None:
        """Return the path of the file for the costs with this key; None: nothing is kept."""
        return None if self._folder is None else self._folder / f"{key}.json"

    def find(self, key: str, num_stages: int) -> list[StageCosts] | None:
        """Return the costs of all stages, or None if they are missing or not complete."""
        path = self.path(key)
        try:
            costs = msgspec.json.decode(path.read_bytes(), type=list[StageCosts]) if path else []
        except (OSError, msgspec.MsgspecError):
            return None
        is_whole = len(costs) == num_stages and all(stage.decode for stage in costs)
        return costs if is_whole else None

    def put(self, key: str, costs: Sequence[StageCosts]) -> None:
        """Keep the costs of all stages. If the disk is full or read-only, nothing is kept, without an error.

        The file appears by one rename, so that no reader finds a part of it.
        """
        path = self.path(key)
        if path is None:
            return
        try:
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix="measured-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(costs))
            os.replace(name, path)
        except OSError:
            return


def _version(distribution: str) -> str:
    """Return the version of an installed distribution; "" if it is run from its sources instead."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
