"""Tracks the numeric class of each rank of a pipeline, epoch by epoch, and finds what to tell the user.

The user is told

    all ranks have one class         nothing: tokens are those of every other pipe of that class, bit for bit
    ranks have several classes       which rank has which class, and how all ranks would compute in one
    the class of a rank changes      the old and the new class: its host was exchanged, or its kernels failed

Used by `engine.supervisor.pipeline_processes`.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.engine import NUMERIC_CLASSES
from penstock.engine.supervisor.reports import of_replica
from penstock.process.config import THIS_HOST, RankConfig


class NumericClasses:
    """The numeric classes of the ranks of one pipeline. Ranks of one class compute the same bits."""

    def __init__(self) -> None:
        self._classes: list[str] = []

    @property
    def present(self) -> list[str]:
        """The class of each rank, stage by stage; empty before the first epoch."""
        return self._classes

    def settle(self, ranks: Sequence[RankConfig], classes: Sequence[str]) -> list[str]:
        """Take the classes of all ranks in the epoch that has begun, and return sentences for the user.

        They name ranks whose class has changed, and say when ranks are of several classes.

        Args:
            ranks: ranks of the pipeline, stage by stage, with the hosts that they run on in this epoch.
            classes: the class of each of these ranks.
        """
        before, self._classes = self._classes, list(classes)
        notes = [
            f"{_shown(rank)} now computes in {now} instead of {then}; its earlier KV blocks are not used."
            for rank, now, then in zip(ranks, classes, before, strict=False)
            if now != then
        ]
        return notes + ([self._mixed(ranks)] if len(set(classes)) > 1 else [])

    def _mixed(self, ranks: Sequence[RankConfig]) -> str:
        held = "; ".join(
            f"{_shown(rank)}: {own or 'unknown'}" for rank, own in zip(ranks, self._classes, strict=True)
        )
        return (
            f"numeric classes are mixed ({held}): a token may differ where the two most likely tokens are "
            f"close. {self._remedy(ranks)}"
        )

    def _remedy(self, ranks: Sequence[RankConfig]) -> str:
        """Return a sentence on how all ranks would compute in one class, as far as the names show it."""
        names = [own.partition(" ")[0] for own in self._classes]
        if any("torch" in own for own in self._classes) or not set(names) <= set(NUMERIC_CLASSES):
            return "Run every rank with our kernels for one class."
        if all(rank.numeric_class == name for rank, name in zip(ranks, names, strict=True)):
            return "Use the same compiler and C library on all hosts for one class."
        return f"--numeric-class {min(names, key=NUMERIC_CLASSES.index)} makes all ranks use one class."


def unlike_replicas(replicas: Sequence[NumericClasses]) -> list[str]:
    """Return a sentence for the user if each replica has a single class, but replicas have different ones."""
    own = [set(replica.present) for replica in replicas]
    if any(len(classes) != 1 for classes in own) or len(set().union(*own)) == 1:
        return []
    held = "; ".join(of_replica(number, *classes) for number, classes in enumerate(own))
    return [f"replicas differ in numeric class ({held}): tokens may depend on the replica of a request."]


def _shown(rank: RankConfig) -> str:
    name = of_replica(rank.replica, rank.name)
    return name if rank.host == THIS_HOST else f"{name} on {rank.host}"
