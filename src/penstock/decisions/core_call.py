"""One call of the engine core as it happened: its arguments, and what the core read and decided meanwhile.

    begin ── readings of the clock, results, reports, guesses ──▶ plans ── end

The core's thread fills it, and only with references to values that do not change. Another thread makes a
record of it later; `decisions.redaction` decides which parts may be written.
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
    """The call in which scheduler and core are made, and the stages are measured."""

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
    """The call in which an epoch is ended by a loss that the core did not notice itself."""

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
    """The answer of a drafter, or of its guides.

    Attributes:
        arrival: the arrival number of the request.
        num_known: number of the request's tokens, behind which the guesses stand.
        draft: the guesses; None: the drafter raised an error.
    """

    arrival: int
    num_known: int
    draft: Draft | None


class Unsent(NamedTuple):
    """The error of a plan that could not be submitted; in `CoreCall.steps` it comes right after that plan."""

    error: ErrorInfo


@dataclass(slots=True)
class CoreCall:
    """A call of the core.

    Attributes:
        asked: which call it is, with its arguments.
        times: readings of the clock, in their order.
        steps: all polls and submitted plans, in their order. A poll stands there as its results, or as the
            error that it raised.
        grammars: the outcomes of grammars that the core's n-th look for them found in this call, by n, which
            counts from 0; looks that found none are left out.
        num_looks: how often the core looked for grammars in this call.
        spans, stage_times: the reports that each look at them found.
        free_bytes: the free memory of the host, as each look at it found it; None: it could not be read.
        drafts, guided: the answers of the drafter, and of its guides.
        wants: each answer of the drafter to how many tokens the last stage is to guess.
        news: the requests for which more was guessed, as each poll of the drafter found them.
        drafter: the drafter's name, and whether its guesses are made on the last stage; set only in the call
            that makes the core.
        ended: ids of the requests that ended in the call.
        is_refused: the call raised an error.
    """

    asked: Asked
    times: list[float] = field(default_factory=list)
    steps: list[list[StepResult] | ErrorInfo | ScheduledBatch | Unsent] = field(default_factory=list)
    grammars: dict[int, list[BuiltGrammar]] = field(default_factory=dict)
    num_looks: int = 0
    spans: list[list[StageSpans]] = field(default_factory=list)
    stage_times: list[list[StageTimes]] = field(default_factory=list)
    free_bytes: list[int | None] = field(default_factory=list)
    drafts: list[HeardDraft] = field(default_factory=list)
    guided: list[HeardDraft] = field(default_factory=list)
    wants: list[int | None] = field(default_factory=list)
    news: list[list[int]] = field(default_factory=list)
    drafter: tuple[str, bool] | None = None
    ended: list[str] = field(default_factory=list)
    is_refused: bool = False
