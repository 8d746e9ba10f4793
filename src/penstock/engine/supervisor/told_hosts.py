"""Sends a core the hosts of its stages, with the measured network paths and clock offsets between them.

A core needs them to put the times of all stages on one clock, and its clients show them. They are sent when
stages or links change, and every few seconds because clocks drift. What the core then reports about slow
links is passed on to the user. Used by `engine.supervisor.pipe_layout`, `pipeline_processes` and `fronts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.engine.supervisor.launch import LaunchPlan
from penstock.engine.supervisor.reports import Caution, Notice
from penstock.families.spec import ITEM_SIZES
from penstock.hosts.member import Member
from penstock.hosts.network.link_choice import speed_text
from penstock.hosts.rank_host import Hosts
from penstock.pipeline.links.frame import NUM_CARRIED
from penstock.process.child import LinkJudged
from penstock.process.pipe_hosts import NO_PIPE_HOSTS, PipeHosts
from penstock.process.rhythm import next_beat

CLOCKS_EVERY_S = 5.0  # in this time two clocks drift apart by less than half a millisecond
MOVED_NS = 1_000_000  # a larger change is not drift: the host, and with it the clock, has started anew


class ToldHosts:
    """Sends one core the facts about its stages' hosts, and remembers what was sent.

    Args:
        hosts: all hosts.
        clock: monotonic seconds.
    """

    def __init__(self, hosts: Hosts, clock: Callable[[], float]) -> None:
        self._hosts = hosts
        self._clock = clock
        self._core: Member | None = None
        self._told = NO_PIPE_HOSTS
        self._told_at = -math.inf

    def tell(self, core: Member, plan: LaunchPlan) -> None:
        """Send a core the hosts, links and clocks of its stages, if they have changed or time has passed.

        Without other hosts nothing is sent.

        Args:
            core: a core that serves; one that still joins would take the message as the end of its epoch.
        """
        if len(self._hosts) == 1:
            return
        now = self._clock()
        present = self._present(plan)
        is_new = core is not self._core or _is_news(present, self._told)
        if is_new or now >= next_beat(self._told_at, CLOCKS_EVERY_S):
            self._core, self._told, self._told_at = core, present, now
            core.hand(present)

    def _present(self, plan: LaunchPlan) -> PipeHosts:
        return PipeHosts(
            stages=[shape.host for shape in plan.stage_shapes],
            links=list(self._hosts.routes.links()),
            clocks=self._hosts.clocks(),
            token_bytes=token_bytes(plan),
        )


def token_bytes(plan: LaunchPlan) -> int:
    """Return the bytes of hidden states that cross from stage to stage for each token."""
    return NUM_CARRIED * plan.spec.hidden_size * ITEM_SIZES[plan.ranks[0].dtype]


def link_speed_report(link: LinkJudged) -> Caution | Notice:
    """Return the message for the user about a link that has become slow while in use, or is well again."""
    way, measured = f"The link from {link.sender} to {link.receiver}", speed_text(link.measured_bytes_per_s)
    if not link.is_slow:
        return Notice(text=f"{way} has recovered: it carries at least half of the measured {measured}.")
    return Caution(
        text=f"{way} carries {speed_text(link.bytes_per_s)} instead of the measured {measured}. Look for "
        "other traffic, a damaged cable or a weak signal."
    )


def _is_news(present: PipeHosts, told: PipeHosts) -> bool:
    """Return whether stages or links have changed, or a clock is new or has moved."""
    if (present.stages, present.links) != (told.stages, told.links):
        return True
    offsets = {clock.host: clock.offset_ns for clock in told.clocks}
    return any(
        clock.host not in offsets or abs(clock.offset_ns - offsets[clock.host]) > MOVED_NS
        for clock in present.clocks
    )
