"""The arguments of `LLM` and `AsyncLLM`: they become an `EngineConfig`, and a plan of the ranks to start."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from penstock.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from penstock.config.executor_backend import is_own_class
from penstock.config.hosts import HostsConfig
from penstock.config.refused_settings import refuse_if_known, refuse_replicas
from penstock.config.speculation import SpeculationConfig, with_speculative_config
from penstock.config.topology import with_topology
from penstock.engine.supervisor.auto_partition import settle_partition
from penstock.engine.supervisor.launch import LaunchPlan, resolve
from penstock.engine.supervisor.reports import LogReporter
from penstock.errors import UsageError
from penstock.hosts.local import LocalHost
from penstock.hosts.rank_host import Hosts
from penstock.pipeline.partition import AUTO_POLICY

NO_INTER_TOKEN_TARGET_MS = 1e9
# The caller gives all requests at once and waits for them, so any number may wait for any time.
_NO_BOUNDS = {"max_waiting_requests": 1 << 31, "max_waiting_tokens": 1 << 62, "queue_timeout_s": 1e12}
_PARTS = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "speculation": SpeculationConfig,
    "cluster": HostsConfig,
}


def engine_config(
    given: Mapping[str, Any], backend: str, topology: str | os.PathLike[str] | None = None
) -> EngineConfig:
    """Return the configuration that the arguments ask for, with checked types and ranges.

    Args:
        given: arguments by name; those that are not fields of a config are ignored.
        backend: name of the executor backend.
        topology: topology file; None: the arguments alone define the stages.

    Raises:
        UsageError: a type, a value or the topology file cannot be used.
    """
    given = {**given, **_NO_BOUNDS, "model": str(given["model"]), "backend": backend}
    values: dict[str, Any] = {
        part: {name: given[name] for name in fields.__struct_fields__ if name in given}
        for part, fields in _PARTS.items()
    }
    log = given.get("record_decisions")
    values |= {"seed": given["seed"], "record_decisions": None if log is None else str(log)}
    try:
        config = msgspec.convert(values, EngineConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UsageError):  # a range, checked by its owner
            raise error.__cause__ from None
        raise UsageError(f"an argument of LLM has the wrong type or value: {error}.") from error
    if topology is not None:
        config = msgspec.structs.replace(config, parallel=with_topology(config.parallel, topology))
    speculation = with_speculative_config(config.speculation, given.get("speculative_config"))
    return msgspec.structs.replace(config, speculation=speculation).with_partition_of(os.environ)


def settled(config: EngineConfig) -> tuple[EngineConfig, LaunchPlan]:
    """Return the configuration, and the plan of its launch.

    On this host alone, the configuration gets layers in place of an `auto` partition. For that the stages are
    measured, unless their costs are known from an earlier start. If ranks may run on other hosts, the
    supervisor does so once these are there. Of the plan, only the model and the limits of requests then hold.

    Raises:
        UsageError: several hosts are asked for, and ranks that are threads of this process.
    """
    backend, num_hosts = config.parallel.backend, config.cluster.hosts
    if backend == "inprocess" and num_hosts > 1:
        raise UsageError(
            f"hosts is {num_hosts}, but ranks that are threads of this process run on this host alone.",
            remedy='Use distributed_executor_backend="mp", or leave hosts out.',
            param="hosts",
        )
    hosts = Hosts(LocalHost())
    if num_hosts > 1 or is_own_class(backend):
        return config, _plan_without_hosts(config, hosts)
    config = settle_partition(config, hosts, LogReporter())
    return config, resolve(config, hosts.resources())


def _plan_without_hosts(config: EngineConfig, head: Hosts) -> LaunchPlan:
    """Return a plan in which all ranks run on a host that has room for everything."""
    boundless = [msgspec.structs.replace(host, free_bytes=1 << 62) for host in head.resources()]
    parallel = msgspec.structs.replace(config.parallel, device="cpu", pin_threads="off")
    if parallel.partition == AUTO_POLICY:
        parallel = msgspec.structs.replace(parallel, partition="last")
    return resolve(msgspec.structs.replace(config, parallel=parallel, cache=CacheConfig()), boundless)


def refuse_unknown(unknown: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise `UsageError` for the first unknown argument, if there is any.

    The error says why a setting of other engines is not supported, or names the known argument that is
    spelled most alike.
    """
    if not unknown:
        return
    name = next(iter(unknown))
    refuse_if_known(name)
    if name == "data_parallel_size":
        refuse_replicas()
    nearest = difflib.get_close_matches(name, known, n=1)
    remedy = f"Did you mean {nearest[0]}?" if nearest else "See help(penstock.LLM)."
    raise UsageError(f"LLM has no argument {name!r}.", remedy=remedy, param=name, code="unknown_argument")
