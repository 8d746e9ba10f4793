"""`penstock replay`: makes a recorded engine's decisions again, and compares them.

Called by `cli.program`. Neither the model nor the machine of the recording is needed: the engine's own core
and scheduler get the recorded input (`replay.replayer`), and this module shows the outcome.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from penstock.cli.flags import flag
from penstock.cli.terminal import Invocation, printable
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.replay.replayer import PlanDifference, Replay

_NONE = "(no plan)"


def replay(
    file: Path | None = None,
    /,
    *,
    until: Annotated[int | None, flag("stop after the plan of this step", "--until", group="replay")] = None,
    explain: Annotated[int | None, flag("explain the plan of this step", "--explain", group="replay")] = None,
    as_json: Annotated[bool, flag("print the report as JSON", "--json", group="replay")] = False,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """Run the command. Returns 0 if all plans are equal, else 1."""
    if file is None:
        raise UsageError(
            "no file is given.",
            remedy="Use `penstock replay FILE`; `penstock serve --record-decisions FILE` writes one.",
        )
    from penstock.replay.replayer import Replayer

    logging.getLogger("penstock").addHandler(logging.NullHandler())  # warnings of the replay are not shown
    came = Replayer(file, until=until, explain=explain).run()
    if explain is not None and came.explanation is None and came.difference is None:
        raise UsageError(
            f"step {explain} is not among the {came.num_plans} plans that were replayed.",
            remedy="Name a step of a plan in the file, at or before the step of --until.",
            param="explain",
        )
    if as_json:
        invocation.say(json.dumps(_numbers(came), ensure_ascii=False))
    else:
        invocation.say(*map(printable, _lines(came)))
    return 0 if came.difference is None else 1


def _numbers(came: Replay) -> dict[str, Any]:
    difference = came.difference
    return {
        "plans": came.num_plans,
        "requests": came.num_requests,
        "equal": difference is None,
        "whole": came.is_whole,
        "difference": None if difference is None else _difference_numbers(difference),
        "explanation": came.explanation,
    }


def _difference_numbers(difference: PlanDifference) -> dict[str, Any]:
    return {
        "step": difference.step,
        "admission": difference.admission or None,
        "recorded": msgspec.to_builtins(difference.recorded),
        "made": msgspec.to_builtins(difference.made),
    }


def _lines(came: Replay) -> Iterator[str]:
    yield from came.explanation or ()
    difference = came.difference
    if difference is None:
        yield f"{came.num_plans} steps, all plans equal; {came.num_requests} requests"
        if not came.is_whole:
            yield "the file ends early: the engine was killed, is still running, or the disk was full"
        return
    yield f"{came.num_plans} plans were equal; step {difference.step} differs"
    if difference.admission:
        yield f"  {difference.admission}"
        return
    rows = [("", "recorded", "made now"), *_compared(difference)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for row in rows:
        yield f"  {row[0].ljust(widths[0])}  {row[1].ljust(widths[1])}  {row[2]}".rstrip()


def _compared(difference: PlanDifference) -> Iterator[tuple[str, str, str]]:
    """Yield the fields in which the two plans differ; if only one of them exists, its rows."""
    recorded, made = difference.recorded, difference.made
    if recorded is None or made is None:
        before, now = (_NONE if plan is None else _shown(plan.rows) for plan in (recorded, made))
        yield "rows", before, now
        return
    for name, *values in difference.fields():
        before, now = map(_shown, values)
        yield name, before, now


def _shown(value: object) -> str:
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":"))
