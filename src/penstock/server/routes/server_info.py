"""The route `GET /server_info`: what this server runs with, for all its users. It shows no secret.

The command line passes the settings on without their secrets (`cli.shown_settings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from penstock import __version__
from penstock.engine.stats import StageMemory
from penstock.process.config import HostLink, StageShape, rank_names
from penstock.process.pipe_hosts import HostClock, PipeHosts
from penstock.server.engine_port import EngineLike, ServedModel
from penstock.server.http.errors import json_response


class SpeculationInfo(msgspec.Struct, frozen=True):
    """The speculation in force.

    Attributes:
        drafter: name of the drafter; empty: there is none.
        is_exact: whether every token is the same as it would be without speculation.
    """

    drafter: str = ""
    is_exact: bool = True


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that this server runs with.

    Attributes:
        max_model_len: the longest context now: the model's, or less if the KV cache holds less.
        stages: the stages of a replica. Their hosts are those on which the first replica's stages are now.
        numeric_classes: for each replica, the numeric class of each rank, by the rank's name; empty until its
            core has reported.
        are_classes_mixed: whether the ranks of all replicas compute in more than one class.
        memory: the use of memory of each stage of each replica, in bytes, as the cores have reported it.
        links: the network paths between hosts, as they were measured; empty with a single host.
        clocks: offset and possible error of each host's clock against the head's, as traces are corrected.
        settings: the settings by their names in a settings file; empty if the server was not started by the
            command line.
    """

    version: str
    model: str
    max_model_len: int
    vocab_size: int
    num_replicas: int
    stages: list[StageShape]
    numeric_classes: list[dict[str, str]]
    are_classes_mixed: bool
    speculation: SpeculationInfo
    memory: list[StageMemory]
    links: list[HostLink]
    clocks: list[HostClock]
    settings: dict[str, Any]


def shapes_on(hosts: PipeHosts, shapes: Sequence[StageShape]) -> list[StageShape]:
    """Return the stages as they were laid out at the start, with the hosts that they are on now."""
    if len(hosts.stages) != len(shapes):  # the core has reported no hosts
        return list(shapes)
    return [
        msgspec.structs.replace(shape, host=host) for shape, host in zip(shapes, hosts.stages, strict=True)
    ]


class ServerInfoRoute:
    """Shows what this server runs with.

    Args:
        settings: the settings to show, without secrets.
    """

    def __init__(self, model: ServedModel, engine: EngineLike, settings: dict[str, Any]) -> None:
        self._model = model
        self._engine = engine
        self._settings = settings

    async def get(self) -> Response:
        """Return version, model, layout and every effective setting that is not secret."""
        model, classes, hosts = self._model, self._numeric_classes(), self._engine.status().hosts
        info = ServerInfo(
            version=__version__,
            model=model.name,
            max_model_len=model.context_length(self._engine),
            vocab_size=model.vocab_size,
            num_replicas=len(self._engine.statuses()),
            stages=shapes_on(self._engine.statuses()[0].hosts, model.stages),
            numeric_classes=classes,
            are_classes_mixed=len({each for of_ranks in classes for each in of_ranks.values()}) > 1,
            speculation=self._speculation(),
            memory=self._memory(),
            links=hosts.links or list(model.host_links),
            clocks=hosts.clocks,
            settings=self._settings,
        )
        return json_response(msgspec.json.encode(info))

    def _speculation(self) -> SpeculationInfo:
        """Return the speculation that the first replica with a core reports."""
        for status in self._engine.statuses():
            if status.stats is not None:
                told = status.stats.scheduler.speculation
                return SpeculationInfo(told.drafter, told.is_exact)
        return SpeculationInfo()

    def _memory(self) -> list[StageMemory]:
        """Return the memory of the stages of all replicas whose cores have reported it."""
        stats = self._engine.status().stats
        return [] if stats is None else stats.stage_memory

    def _numeric_classes(self) -> list[dict[str, str]]:
        """Return the numeric class of each rank of each replica, as the replica's core reports it."""
        names = rank_names(
            [stage for stage, shape in enumerate(self._model.stages) for _ in range(shape.num_ranks)]
        )
        told = [status.stats.numeric_classes if status.stats else [] for status in self._engine.statuses()]
        return [dict(zip(names, classes, strict=False)) for classes in told]
