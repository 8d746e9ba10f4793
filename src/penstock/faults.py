"""Fault points: named places at which a test can make a stage fail. Unused, they cost nothing.

    PENSTOCK_FAULTS="stage.forward@1:17=kill,rank.load@0:1=raise" penstock serve ...

Here each rank of stage 1 kills its own process at its 17th forward pass of clients' requests, and each rank
of stage 0 raises an error when it loads its weights. The supervisor reads the variable, and puts each fault
into the configs of the ranks that it is for. A rank that takes the place of a lost one gets no fault.

A process calls `armed` once for each fault point, when it puts its parts together. Where no fault is meant
for the point, `armed` returns the function itself, so that calls of the function cost no more than before.

Actions:

    kill, stop   send SIGKILL or SIGSTOP to the own process
    hang         write a line to standard error, and never return
    raise        raise an `InjectedError`, which no code of Penstock expects
    nan          set the hidden states of the step's first token to NaN; for `stage.forward` alone
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

from penstock.errors import UsageError

ENVIRONMENT = "PENSTOCK_FAULTS"
POINTS = ("rank.load", "rank.allocate", "stage.forward", "stage.put")
ACTIONS = ("kill", "stop", "hang", "raise", "nan")

_SPEC = re.compile(r"(?P<point>[a-z.]+)@(?P<stage>\d+)(\.(?P<tp>\d+))?:(?P<count>\d+)=(?P<action>[a-z]+)")

P = ParamSpec("P")
R = TypeVar("R")


class Fault(msgspec.Struct, frozen=True):
    """A fault that happens at the `count`-th call of a fault point in a stage; the first call has number 1.

    Attributes:
        point: one of `POINTS`.
        action: one of `ACTIONS`.
        tp_rank: number of the rank, within the stage, that has the fault; None: each rank of the stage.
    """

    point: str
    stage: int
    count: int
    action: str
    tp_rank: int | None = None


class InjectedError(Exception):
    """The error of the action `raise`."""


def parse(text: str) -> list[Fault]:
    """Return the faults that a text lists, separated by commas. Raises `UsageError`."""
    return [_parse_one(spec.strip()) for spec in text.split(",") if spec.strip()]


def _parse_one(spec: str) -> Fault:
    match = _SPEC.fullmatch(spec)
    if match is None or match["point"] not in POINTS or match["action"] not in ACTIONS:
        raise UsageError(
            f"{ENVIRONMENT}: {spec!r} is not a fault.",
            remedy=f"Write POINT@STAGE:COUNT=ACTION, or STAGE.RANK for one rank of a stage, with a point of "
            f"{POINTS} and an action of {ACTIONS}.",
        )
    tp_rank = None if match["tp"] is None else int(match["tp"])
    return Fault(match["point"], int(match["stage"]), int(match["count"]), match["action"], tp_rank)


def armed(
    faults: Sequence[Fault],
    point: str,
    stage: int,
    function: Callable[P, R],
    counts: Callable[P, bool] = lambda *_, **__: True,
) -> Callable[P, R]:
    """Return `function`; or, if a fault is meant for this point, a function that calls it and has the fault.

    Args:
        faults: those in the config of this rank, which are meant for it.
        counts: called with the arguments of a call; returns whether that call counts.
    """
    assert point in POINTS, point
    meant = {fault.count: fault.action for fault in faults if (fault.point, fault.stage) == (point, stage)}
    if not meant:
        return function
    calls = 0

    def broken(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal calls
        calls += counts(*args, **kwargs)
        action = meant.pop(calls, None)
        if action is None:
            return function(*args, **kwargs)
        if action == "nan":
            result = function(*args, **kwargs)
            _spoil(result)
            return result
        _break(action, point)
        return function(*args, **kwargs)

    return broken


def _break(action: str, point: str) -> None:
    if action == "raise":
        raise InjectedError(f"a fault at {point}")
    if action == "hang":
        sys.stderr.write(f"a fault at {point}: hang\n")
        sys.stderr.flush()
        threading.Event().wait()
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def _spoil(result: Any) -> None:
    """Set the hidden states of the first token to NaN."""
    result.tensors["hidden_states"][0] = float("nan")
