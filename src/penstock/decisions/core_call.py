"""One call of the engine core as it happened: the request to it, and all that it read and decided meanwhile.

    begin ── readings of the clock, results, reports, guesses ──▶ plans ── end

Filled on the core's thread, with no more than references to values that do not change. What becomes of it,
and what of it may be written, is the affair of `decisions.redaction`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.batch import BuiltGrammar, RankLoaded, ScheduledBatch, StageSpans, StageTimes, StepResult
from penstock.errors import ErrorInfo
from penstock.executor.base import KVPlan
from penstock.operations import Operation
from penstock.process.config import CoreConfig
from penstock.process.control import EndedRequests
from penstock.request import GenerationRequest
from penstock.speculation.drafter import Draft


class Assembly(NamedTuple):
    """The call in which scheduler and core are made, and the stages measured."""

    config: CoreConfig
    kv_plan: KVPlan
    recovers: bool
    epoch: int


class Addition(NamedTuple):
    """The call in which a request is added; the fields are those of `EngineCore.add_request`."""

    request: GenerationRequest
    output_ids: Sequence[int] | None
    num_scores: int


class Abortion(NamedTuple):
    """The call in which a request is aborted."""

    request_id: str


class Turn(NamedTuple):
    """A call of `EngineCore.step`."""

    timeout_s: float


class Loss(NamedTuple):
    """The call in which an epoch is lost, where another than the core has noticed the loss."""

    error: ErrorInfo
    ends: EndedRequests


class Entrance(NamedTuple):
    """The call in which another epoch begins."""

    epoch: int
    ranks: Sequence[RankLoaded]


class Order(NamedTuple):
    """The call in which an administrator's operation comes into force."""

    operation: Operation


class GivenUp(NamedTuple):
    """The call in which the pipeline is given up for good."""

    error: ErrorInfo


Asked = Assembly | Addition | Abortion | Turn | Loss | Entrance | Order | GivenUp


class HeardDraft(NamedTuple):
    """The answer of a drafter, or of its guides; `num_known` tokens of the request stand before it.

    Attributes:
        draft: None: the drafter has failed.
    """

    arrival: int
    num_known: int
    draft: Draft | None


class Unsent(NamedTuple):
    """The error of the plan before it, which could not be submitted."""

    error: ErrorInfo


@dataclass(slots=True)
class CoreCall:
    """A call of the core.

    Attributes:
        asked: the request to the core.
        times: readings of the clock, in their order.
        steps: results of each poll, or the error that it raised, and plans that were submitted, in their
            order.
        grammars: reports on grammars, by the number of the look for them; looks that found none are left out.
        num_looks: how often grammars were looked for.
        spans, stage_times: those found by each look at them.
        drafts, guided: answers of drafter and guides.
        wants: tokens that the last stage is to guess, for each question about it.
        news: requests of which more is guessed, for each look for them.
        drafter: the drafter's name, and whether it guesses on the last stage; said when the core is
            assembled.
        ended: requests that have ended in the call.
        is_refused: the call has raised an error.
    """

    asked: Asked
    times: list[float] = field(default_factory=list)
    steps: list[list[StepResult] | ErrorInfo | ScheduledBatch | Unsent] = field(default_factory=list)
    grammars: dict[int, list[BuiltGrammar]] = field(default_factory=dict)
    num_looks: int = 0
    spans: list[list[StageSpans]] = field(default_factory=list)
    stage_times: list[list[StageTimes]] = field(default_factory=list)
    drafts: list[HeardDraft] = field(default_factory=list)
    guided: list[HeardDraft] = field(default_factory=list)
    wants: list[int | None] = field(default_factory=list)
    news: list[list[int]] = field(default_factory=list)
    drafter: tuple[str, bool] | None = None
    ended: list[str] = field(default_factory=list)
    is_refused: bool = False
