"""Checks that the messages of a rank are usable, since its host may be faulty or hostile.

Decoding has checked the types and bounds of a message (`penstock.bounds`). This module checks what no type
says, such as lists that must be of the same length, so that the users of a message need not. A message that
fails ends the epoch, as the loss of its rank does. Results of steps are compared with their plans elsewhere,
in `engine.core.steps_in_flight`. Used by `executor.base`.
"""

from __future__ import annotations

from itertools import pairwise

from penstock.batch import (
    EntryAnswers,
    GrammarsBuilt,
    OrdersDone,
    RankFailed,
    RankLoaded,
    RankReady,
    RankToCore,
    StageSpans,
    StageTimes,
    StepResult,
)
from penstock.errors import ProtocolError
from penstock.told_text import cleaned
from penstock.trace.phases import Phase

_WITH_TEXT = RankFailed | RankLoaded | GrammarsBuilt | EntryAnswers
_WITH_STAGE = RankFailed | RankLoaded | RankReady | StageTimes | StageSpans


def sensible(message: RankToCore, stage: int) -> RankToCore:
    """Check a message of a rank, and return it with its texts cleaned, so that they can be shown to users.

    Args:
        stage: the stage to which the rank belongs.

    Raises:
        ProtocolError: the message contradicts itself, or names another stage.
    """
    if isinstance(message, _WITH_STAGE) and message.stage != stage:
        raise _nonsense(stage, f"reports as stage {message.stage}")
    if isinstance(message, StageSpans) and not _is_whole(message):
        raise _nonsense(stage, "reports inconsistent spans")
    if isinstance(message, StageTimes) and len(message.phase_ns) != len(Phase):
        raise _nonsense(stage, f"reports {len(message.phase_ns)} phases, expected {len(Phase)}")
    return cleaned(message) if _has_text(message) else message


def _has_text(message: RankToCore) -> bool:
    if isinstance(message, OrdersDone):
        return bool(message.use.failure)
    if isinstance(message, StepResult):
        return message.error is not None
    return isinstance(message, _WITH_TEXT)


def _is_whole(report: StageSpans) -> bool:
    """Return whether each span has a known phase and a duration, and the steps begin at spans, in order."""
    begins = [begin for begin, _, _ in report.steps]
    return (
        len(report.durations_ns) == len(report.phases)
        and max(report.phases, default=0) < len(Phase)
        and all(0 <= begin <= len(report.phases) for begin in begins)
        and all(earlier <= later for earlier, later in pairwise(begins))
        and report.prompt_tokens.keys() <= {step for _, step, _ in report.steps}
    )


def _nonsense(stage: int, what: str) -> ProtocolError:
    return ProtocolError(f"a rank of stage {stage} {what}.", stage=stage)
