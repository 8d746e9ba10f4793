"""Where ranks keep their parts of blocks, by what they have said of themselves."""

from __future__ import annotations

import msgspec
import pytest

from penstock.batch import RankLoaded
from penstock.kvcache.store_sites import ONE_STORE, HostStore, StoreSites, store_sites
from penstock.kvstore.layer_share import NO_LAYERS, WHOLE, LayerShare
from stand_in_hosts import LOADED


def ranks(*stages: tuple[int, int, str]) -> list[RankLoaded]:
    """Of stages: the layer behind their last one, their ranks, and the host that has their store."""
    return [
        msgspec.structs.replace(LOADED, stage=stage, tp_rank=tp_rank, end_layer=end, store_host=host)
        for stage, (end, num_ranks, host) in enumerate(stages)
        for tp_rank in range(num_ranks)
    ]


def share(*layers: int) -> LayerShare:
    return LayerShare.of(layers, 6)


@pytest.mark.parametrize("given", [[], [LOADED], ranks((2, 2, ""), (6, 1, ""))])
def test_one_store_for_all_ranks_has_all_layers(given: list[RankLoaded]) -> None:
    assert store_sites(given) == ONE_STORE
    assert ONE_STORE.own == WHOLE


def test_g1_each_host_has_the_layers_of_its_ranks_and_the_first_of_them_answers() -> None:
    given = ranks((1, 2, ""), (2, 1, ""), (3, 2, "desk"), (5, 1, "desk"), (6, 1, "shelf"))
    assert store_sites(given) == StoreSites(
        own=share(0, 1),
        others=(HostStore("desk", 3, share(2, 3, 4)), HostStore("shelf", 6, share(5))),
    )


def test_g1_stages_of_a_host_need_not_be_neighbours() -> None:
    given = ranks((2, 1, ""), (3, 1, "desk"), (5, 1, ""), (6, 1, "desk"))
    assert store_sites(given) == StoreSites(
        own=share(0, 1, 3, 4), others=(HostStore("desk", 1, share(2, 5)),)
    )


def test_a_head_without_a_rank_of_its_own_store_has_no_layers() -> None:
    sites = store_sites(ranks((2, 1, "shelf"), (6, 1, "desk")))
    assert sites.own.is_empty
    assert not sites.own.includes(share(0))
    assert not NO_LAYERS.includes(share(0))
