"""Decides how many plans the core may have in flight at most, and how many frames each link must hold.

A frame has the hidden states of one plan. On one host, as many plans may be in flight as there are stages and
plans issued ahead. Between hosts, plans are on the wires too. How many that should be is measured later
(`engine.core.plan_depth`); here is decided how many it may be at most. Called by `engine.supervisor.launch`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.config.engine import PLANS_ON_WIRES, ParallelConfig
from penstock.hosts.resources import HostResources
from penstock.process.config import RankConfig

LINK_BYTES = 256 << 20  # the most bytes for the frames at each end of a link between hosts


def with_plans_in_flight(parallel: ParallelConfig, homes: Sequence[HostResources]) -> ParallelConfig:
    """Return the config with a number for `max_plans_in_flight` in place of `auto`.

    It is larger where stages run on several hosts, since the wires between them hold plans too.

    Args:
        homes: the host of each rank.
    """
    if parallel.max_plans_in_flight != "auto":
        return parallel
    has_wires = len({home.name for home in homes}) > 1
    number = parallel.least_plans_in_flight + (PLANS_ON_WIRES if has_wires else 0)
    return msgspec.structs.replace(parallel, max_plans_in_flight=number)


def with_link_frames(
    ranks: Sequence[RankConfig], parallel: ParallelConfig, frame_bytes: int
) -> list[RankConfig]:
    """Return the ranks of one replica with `link_frames`: how many frames each link to the next stage holds.

    On one host the next stage takes a frame as soon as it can, so one more than the plans issued ahead is
    enough. Between hosts, all plans that are not in a stage may be in the link, if memory allows.

    Args:
        parallel: has the largest number of plans in flight.
        frame_bytes: size of a frame.
    """
    near = parallel.max_async_depth + 1
    wanted = parallel.depth - parallel.pipeline_parallel_size + 1
    far = max(near, min(wanted, LINK_BYTES // frame_bytes))
    hosts = {rank.stage: rank.host for rank in ranks}
    return [
        msgspec.structs.replace(rank, link_frames=far if _sends_far(rank, hosts) else near) for rank in ranks
    ]


def num_links_between_hosts(ranks: Sequence[RankConfig]) -> int:
    """Return how often a plan passes from one host to another on its way through the stages of a replica."""
    hosts = {rank.stage: rank.host for rank in ranks}
    return sum(_sends_far(rank, hosts) for rank in ranks if rank.tp_rank == 0)


def notes_on_frames(ranks: Sequence[RankConfig], given: ParallelConfig, frame_bytes: int) -> list[str]:
    """Return a sentence for the user if links between hosts hold fewer frames than the plans in flight need.

    Args:
        ranks: ranks of one replica, with `link_frames`.
        given: the settings as the user gave them; if `max_plans_in_flight` is `auto`, there is no sentence.
        frame_bytes: size of a frame.
    """
    frames = max(rank.link_frames for rank in ranks)
    wanted = given.depth - given.pipeline_parallel_size + 1
    if given.max_plans_in_flight == "auto" or not num_links_between_hosts(ranks) or frames >= wanted:
        return []
    return [
        f"each end of a link between hosts has room for {frames} frames of {frame_bytes / 1e6:.0f} MB, and "
        f"{wanted} plans may be on the wire: a smaller --max-num-batched-tokens makes frames smaller."
    ]


def _sends_far(rank: RankConfig, hosts: dict[int, str]) -> bool:
    """Return whether the next stage is on another host."""
    return hosts.get(rank.stage + 1, rank.host) != rank.host
