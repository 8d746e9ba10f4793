"""Chooses the hosts that an engine runs on, by the executor backend that its user has named.

    mp            this host alone, or with the workers that join it    `hosts.gathering`
    ray           the same; Ray starts the workers                     `ray_hosts`
    MODULE:CLASS  the hosts that a class of the user's own makes       `engine_hosts.MakeHosts`

Called by `engine.supervisor.supervisor` and by `penstock plan`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from penstock.config.engine import EngineConfig
from penstock.config.executor_backend import PROCESSES, is_own_class
from penstock.errors import UsageError, describe
from penstock.hosts.gathering import GatheredHosts
from penstock.hosts.launchers.engine_hosts import EngineHosts, MakeHosts, OneHost, Voices

_REQUIRED = ("gather", "admit", "tend", "close")


def open_hosts(engine: EngineConfig, voices: Voices) -> EngineHosts:
    """Return the object that brings the hosts of an engine together, as its executor backend does it.

    This does not wait for workers.

    Args:
        voices: functions by which the backend speaks to the user.

    Raises:
        UsageError: there are more hosts than stages, a setting does not fit several hosts, or the backend
            cannot be used.
        Exception: what the constructor of a user's class raises passes unchanged.
    """
    name = engine.parallel.backend
    if is_own_class(name):
        return _own_hosts(name, engine, voices)
    if engine.cluster.hosts == 1:
        return OneHost()
    _require_a_stage_for_each_host(engine)
    return _MAKERS[name](engine, voices)


def _joined_hosts(engine: EngineConfig, voices: Voices) -> EngineHosts:
    engine.cluster.require_joining()
    if not engine.cluster.discover:
        return GatheredHosts(engine.cluster, voices)
    from penstock.hosts.launchers.announced import Announced

    return GatheredHosts(engine.cluster, voices, Announced(voices.tell))


def _ray_hosts(engine: EngineConfig, voices: Voices) -> EngineHosts:
    from penstock.hosts.launchers.ray_hosts import RayHosts

    return RayHosts(engine.cluster, voices)


_MAKERS: dict[str, Callable[[EngineConfig, Voices], EngineHosts]] = {"mp": _joined_hosts, "ray": _ray_hosts}


def _own_hosts(name: str, engine: EngineConfig, voices: Voices) -> EngineHosts:
    """Make an object of the user's class; check that it has what is needed, and takes several stages."""
    make = _own_class(name)
    num_stages = engine.parallel.pipeline_parallel_size
    if num_stages > 1 and not getattr(make, "supports_pp", False):
        raise UsageError(
            f"the executor backend {name!r} does not support pipelines (supports_pp), but --pp is "
            f"{num_stages}.",
            remedy=f"Use --pp 1, or another backend: {', '.join(PROCESSES)}, or MODULE:CLASS.",
            param="distributed_executor_backend",
            code="unsupported",
        )
    hosts = make(engine, voices)
    missing = [method for method in _REQUIRED if not callable(getattr(hosts, method, None))]
    missing += [value for value in ("hosts", "sources") if not hasattr(hosts, value)]
    if missing:
        raise UsageError(
            f"the executor backend {name!r} makes {type(hosts).__name__}, which has no {missing[0]!r}.",
            remedy="Implement `hosts.launchers.engine_hosts.EngineHosts`; see docs/clusters.md.",
            param="distributed_executor_backend",
        )
    return hosts


def _own_class(name: str) -> MakeHosts:
    """Import MODULE:CLASS and return the class; errors of the module become an error that names it."""
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"the executor backend {name!r} cannot be imported: {describe(error).message}",
            remedy="Make its module importable, with PYTHONPATH or by installing it.",
            param="distributed_executor_backend",
        ) from error
    found = getattr(module, class_name, None)
    if not callable(found):
        raise UsageError(
            f"the module {module_name} has no class {class_name!r} for an executor backend.",
            remedy="Write MODULE:CLASS as Python imports them.",
            param="distributed_executor_backend",
        )
    return cast(MakeHosts, found)


def _require_a_stage_for_each_host(engine: EngineConfig) -> None:
    num_hosts, num_stages = engine.cluster.hosts, engine.parallel.pipeline_parallel_size
    num_replicas = engine.parallel.data_parallel_size
    if num_hosts > num_stages * num_replicas:
        stages = f"{num_stages} stage" + "s" * (num_stages != 1)
        pipelines = "the pipeline has" if num_replicas == 1 else f"each of {num_replicas} pipelines has"
        raise UsageError(
            f"--hosts is {num_hosts}, but {pipelines} {stages}.",
            remedy="Raise --pp or --dp, so that each host has a stage.",
            param="hosts",
        )
