"""Finds where the ranks of a pipeline keep their parts of blocks: in the core's store, or in their hosts'.

Each rank reports its host's store when it has loaded its weights. Used by the core, once an epoch, and by
`kvcache.hosts_catalogue`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.batch import RankLoaded
from penstock.kvstore.layer_share import WHOLE, LayerShare


class HostStore(NamedTuple):
    """A KV store that a host other than the core's has to itself, such as one on its disk.

    Attributes:
        host: the name of the host.
        rank: the number of the rank that answers for the store, counted over all stages.
        share: the layers of all ranks there, whose parts of blocks the store has.
    """

    host: str
    rank: int
    share: LayerShare


@dataclass(frozen=True, slots=True)
class StoreSites:
    """The stores in which the ranks of a pipeline keep their parts of KV blocks.

    Attributes:
        own: layers of the ranks that use the core's store.
        others: the stores that other hosts have to themselves.
    """

    own: LayerShare = WHOLE
    others: tuple[HostStore, ...] = ()


ONE_STORE = StoreSites()


def store_sites(ranks: Sequence[RankLoaded]) -> StoreSites:
    """Return the stores in which these ranks keep their parts of KV blocks.

    Args:
        ranks: what each rank has reported of itself, stage by stage.
    """
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
