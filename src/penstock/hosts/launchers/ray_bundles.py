"""Computes what Ray reserves for the hosts of an engine: one bundle of a placement group for each host.

    bundle 0      for the head, bound to the node where the driver and the head run
    bundle 1 …    one for each worker

It imports nothing of Ray; used by `ray_driver`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_THIS_NODE = 0.001  # of the resource "node:ADDRESS", which only that node has: it binds a bundle to the node
_STRATEGIES = {"spread": "STRICT_SPREAD", "pack": "PACK"}


def strategy_of(placement: str) -> str:
    """Return Ray's name for a placement of the hosts, `spread` or `pack`."""
    return _STRATEGIES[placement]


def bundles(
    num_workers: int, resources: Mapping[str, float], nodes: Sequence[Mapping[str, Any]], own_address: str
) -> list[dict[str, float]]:
    """Return the bundles of an engine, what Ray reserves for each host: the head's, then each worker's.

    Args:
        num_workers: number of workers.
        resources: what to reserve for each host, as the user has set it; empty: one CPU, and as many GPUs as
            the node with the fewest has.
        nodes: nodes of the cluster, as `ray.nodes()` returns them.
        own_address: address of the head's node.
    """
    each = dict(resources) or _found(nodes)
    return [each | {f"node:{own_address}": _THIS_NODE}, *(dict(each) for _ in range(num_workers))]


def why_not_placed(num_hosts: int, placement: str, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for the user while Ray has not placed the hosts: what is wanted, and the live nodes."""
    alive = [node for node in nodes if node.get("Alive")]
    how = "each on its own node" if placement == "spread" else "on as few nodes as possible"
    there = ", ".join(_shown(node) for node in alive)
    return f"waiting for Ray to place {num_hosts} hosts, {how}; live nodes: {there or 'none'}"


def _found(nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    alive = [node["Resources"] for node in nodes if node.get("Alive")]
    num_gpus = min((node.get("GPU", 0.0) for node in alive), default=0.0)
    return {"CPU": 1.0} | ({"GPU": num_gpus} if num_gpus >= 1 else {})


def _shown(node: Mapping[str, Any]) -> str:
    amounts = [f"{node['Resources'].get(name, 0):g} {name}" for name in ("CPU", "GPU")]
    return f"{node.get('NodeManagerAddress', 'a node')} with {' and '.join(amounts)}"
