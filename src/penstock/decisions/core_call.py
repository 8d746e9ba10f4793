"""One call of the engine core as it happened: what it was asked, and all that it read and decided meanwhile.

    begin ── readings of the clock, results, reports, guesses ──▶ plans ── end

Filled on the core's thread, with no more than references to values that nobody changes. What becomes of it,
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
    """Scheduler and core are made, and the stages measured."""

    config: CoreConfig
    kv_plan: KVPlan
    recovers: bool
    epoch: int


class Addition(NamedTuple):
    """A request is added; the fields are those of `EngineCore.add_request`."""

    request: GenerationRequest
    output_ids: Sequence[int] | None
    num_scores: int


class Abortion(NamedTuple):
    """A request is aborted."""

    request_id: str


class Turn(NamedTuple):
    """`EngineCore.step`."""

    timeout_s: float


class Loss(NamedTuple):
    """An epoch is lost, as somebody else than the core has noticed."""

    error: ErrorInfo
    ends: EndedRequests


class Entrance(NamedTuple):
    """Another epoch begins."""

    epoch: int
    ranks: Sequence[RankLoaded]


class Order(NamedTuple):
    """An administrator's operation comes into force."""

    operation: Operation


class GivenUp(NamedTuple):
    """The pipeline is given up for good."""

    error: ErrorInfo


Asked = Assembly | Addition | Abortion | Turn | Loss | Entrance | Order | GivenUp


class HeardDraft(NamedTuple):
    """What a drafter, or a guide of one, has answered; `num_known` tokens of the request stand before it.

    Attributes:
        draft: None: the drafter has failed.
    """

    arrival: int
    num_known: int
    draft: Draft | None


class Unsent(NamedTuple):
    """The plan before it could not be submitted."""

    error: ErrorInfo


@dataclass(slots=True)
class CoreCall:
    """A call of the core.

    Attributes:
        asked: what the call was.
        times: readings of the clock, in their order.
        steps: results of each poll, or the error that it raised, and plans that were submitted, in their
            order.
        grammars: reports on grammars, by the number of the look for them; looks that found none are left out.
        num_looks: how often grammars were looked for.
        spans, stage_times: of each look at them.
        drafts, guided: what drafter and guides have answered.
        wants: tokens that the last stage is to guess, of each question for it.
        news: of each look for it: requests of which more is guessed.
        drafter: who guesses, and whether on the last stage; said when the core is assembled.
        ended: requests that have ended in it.
        is_refused: it has raised an error.
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
