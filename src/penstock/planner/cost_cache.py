"""The cache of measured costs: in the folder `partition`, JSON per model, setting and machine.

The file's name is a hash of all that the costs depend on; deleting it, or the folder, measures again. So does
a file that is damaged. The cache is not needed: without a folder that only we can write to, nothing is kept.

Costs are not to be kept (`are_to_keep`) if they were measured without our kernels where these could be built:
the next start may have them; nor on a GPU, whose free memory is another each time.
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

# Of a rank's config, what its steps do not depend on.
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
        hardware: hardware of the host of each rank.
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
    """Return whether the next start would measure about the same.

    It would with our kernels, or where none can be built.
    """
    return all(stage.has_kernels for stage in costs) or not build_key(environ, Machine.detect())


class CostCache:
    """The cache of costs, by key.

    Args:
        folder: a folder that only we can write to; None: nothing is kept.
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
        """Return the file for costs of this key."""
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
        """Keep costs, in one rename. A disk that is full or read-only does not raise an error."""
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
    """Return the installed version; "" for sources that are run where they lie."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
