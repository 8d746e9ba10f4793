"""Finds where the ranks of a pipeline keep their parts of blocks: in the core's store, or in their hosts'.

Ranks say it when they have loaded. Used by the core, once an epoch, and by `kvcache.hosts_catalogue`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.batch import RankLoaded
from penstock.kvstore.layer_share import WHOLE, LayerShare


class HostStore(NamedTuple):
    """A store that another host has to itself.

    Attributes:
        host: its name.
        rank: the rank that answers for it.
        share: layers of all ranks there.
    """

    host: str
    rank: int
    share: LayerShare


@dataclass(frozen=True, slots=True)
class StoreSites:
    """The stores in which the ranks of a pipeline keep their parts of blocks.

    Attributes:
        own: layers of the ranks that use the core's store.
        others: all other stores.
    """

    own: LayerShare = WHOLE
    others: tuple[HostStore, ...] = ()


ONE_STORE = StoreSites()


def store_sites(ranks: Sequence[RankLoaded]) -> StoreSites:
    """Return the stores in which these ranks, given stage by stage, keep their parts of blocks."""
    if not any(rank.store_host for rank in ranks):
        return ONE_STORE
    ends = {rank.stage: rank.end_layer for rank in ranks}
    num_layers = max(ends.values())
    layers: dict[str, set[int]] = {}
    answering: dict[str, int] = {}
    for number, rank in enumerate(ranks):
        own = range(ends.get(rank.stage - 1, 0), rank.end_layer)
        layers.setdefault(rank.store_host, set()).update(own)
        answering.setdefault(rank.store_host, number)
    others = [
        HostStore(host, rank, LayerShare.of(layers[host], num_layers))
        for host, rank in answering.items()
        if host
    ]
    return StoreSites(LayerShare.of(layers.get("", ()), num_layers), tuple(others))
