"""Links between hosts, as the planner has them: which they are, and how long a request occupies them."""

from __future__ import annotations

import msgspec
import pytest

from penstock.families.registry import resolve_model_directory
from penstock.planner.hops import Hop, hops_between
from penstock.planner.mix import Mix
from penstock.process.config import HostLink, RankConfig
from rank_configs import make_rank_configs

LINK = HostLink(
    hosts=("desk", "tower"),
    interfaces=("eth0", "enp3"),
    round_trip_s=0.002,
    bytes_per_s_out=1e6,
    bytes_per_s_in=4e6,
)


def on_hosts(*names: str) -> list[RankConfig]:
    stages = make_rank_configs(resolve_model_directory("demo"), len(names))
    return [msgspec.structs.replace(rank, host=name) for rank, name in zip(stages, names, strict=True)]


def test_g1_each_link_between_hosts_is_a_hop_in_its_direction() -> None:
    hops = hops_between(on_hosts("tower", "tower", "desk", "tower", "attic"), [LINK], 100, 4)
    assert [(hop.stage, hop.sender, hop.receiver, hop.bytes_per_s) for hop in hops] == [
        (1, "tower", "desk", 4e6),
        (2, "desk", "tower", 1e6),
    ]
    assert hops[0].token_bytes == 100 * 4
    assert hops_between(on_hosts("tower", "tower"), [LINK], 100, 4) == []


@pytest.mark.parametrize(
    ("bytes_per_s", "mix", "seconds"), [(1e6, Mix(300, 200), 0.5), (0.0, Mix(0, 1), 1000.0)]
)
def test_g1_a_request_occupies_the_wire_with_all_its_tokens(
    bytes_per_s: float, mix: Mix, seconds: float
) -> None:
    hop = Hop(
        stage=0,
        sender="tower",
        receiver="desk",
        token_bytes=1000,
        bytes_per_s=bytes_per_s,
        round_trip_s=0.002,
    )
    assert hop.request_s(mix) == pytest.approx(seconds)
