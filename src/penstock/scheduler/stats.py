"""The statistics of the scheduler, as plain data."""

from __future__ import annotations

import msgspec


class SpeculationStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """The counts of drafts (guessed tokens) since the start.

    Attributes:
        drafter: name of what guesses; empty where nothing does.
        num_drafted: drafts that were sent, and decided on by the last stage.
        num_accepted: drafts among these that were right, and that came before the end of their request.
        num_cancelled: drafts that were sent behind a wrong one, and never decided on.
        is_exact: whether drafts change no token. That is so if on all ranks a number does not depend on what
            is computed with it.
        num_forced_drafted, num_forced_accepted: how many of `num_drafted` and of `num_accepted` a grammar
            forced.
    """

    drafter: str = ""
    num_drafted: int = 0
    num_accepted: int = 0
    num_cancelled: int = 0
    is_exact: bool = True
    num_forced_drafted: int = 0
    num_forced_accepted: int = 0

    def plus(
        self, num_drafted: int = 0, num_accepted: int = 0, num_cancelled: int = 0, *, is_forced: bool = False
    ) -> SpeculationStats:
        """Return these counts with the given ones added.

        Args:
            is_forced: a grammar forced the given drafts: they are counted among the forced ones too.
        """
        return msgspec.structs.replace(
            self,
            num_drafted=self.num_drafted + num_drafted,
            num_accepted=self.num_accepted + num_accepted,
            num_cancelled=self.num_cancelled + num_cancelled,
            num_forced_drafted=self.num_forced_drafted + is_forced * num_drafted,
            num_forced_accepted=self.num_forced_accepted + is_forced * num_accepted,
        )

    def by_drafter(self) -> dict[str, tuple[int, int]]:
        """Return (drafts decided on, drafts that were right) by the drafter's name.

        Drafts that a grammar forced stand under "grammar", if there are any.
        """
        forced = self.num_forced_drafted, self.num_forced_accepted
        own = self.num_drafted - forced[0], self.num_accepted - forced[1]
        return {self.drafter: own} | ({"grammar": forced} if any(forced) else {})


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The scheduler's statistics: how many requests run and wait now, and totals since the start."""

    paused: bool = False  # by an administrator (`penstock.operations`)
    held_back: str = ""  # why no waiting request starts; empty: nothing stands in its way
    num_running: int = 0
    num_waiting: int = 0  # preempted requests included
    num_preemptions: int = 0
    recovered_requests: int = 0  # requests that a lost stage has interrupted, once for each loss
    failed_steps: int = 0  # steps for which a stage had no memory
    prompt_tokens: int = 0  # of requests that have yielded their first token, or ended without one
    generated_tokens: int = 0
    micro_batches: int = 0  # into which the decoding requests were split for the last plan
    fill_plans: int = 0  # how many plans in flight fill the pipe
    speculation: SpeculationStats = SpeculationStats()
    wire_s: float = 0.0  # latency of all links between stages, there and back, for a plan of no bytes
