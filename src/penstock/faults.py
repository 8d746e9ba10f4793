"""Fault points: named places at which a test can make a stage fail. Unused, they cost nothing.

    PENSTOCK_FAULTS="stage.forward@1:17=kill,rank.load@0:1=raise" penstock serve ...

At the 17th forward pass of requests in stage 1 the process kills itself, at its first load stage 0 raises.
The supervisor reads the variable and tells the stages in their configs; a stage that takes the place of a
lost one is told nothing. `armed` is called once for each place, when a process puts its parts together, and
returns the function itself where no fault is meant for it: the hot path has not one call more.

Actions: `kill` (SIGKILL), `stop` (SIGSTOP), `hang` (say so on standard error, and never come back), `raise`
(an exception that is nobody's own), `nan` (the first row of the result's hidden states is not a number).
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
    """A fault that happens at the `count`-th call of a place in a stage; calls count from 1.

    Attributes:
        tp_rank: number of the rank of the stage; None: each.
    """

    point: str
    stage: int
    count: int
    action: str
    tp_rank: int | None = None


class InjectedError(Exception):
    """The error of the action `raise`."""


def parse(text: str) -> list[Fault]:
    """Return the faults in a text, separated by commas. Raises `UsageError`."""
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
    """Return `function`, or where a fault is meant for this place a function that has it.

    Args:
        counts: whether a call, with the arguments of `function`, is one of those that are counted.
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
    """Make the first row of intermediate tensors NaN."""
    result.tensors["hidden_states"][0] = float("nan")
