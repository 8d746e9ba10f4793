"""Replays a file of decisions: the engine's core and scheduler read the recording, and plans are compared.

    first pass      which sampled tokens have ended their requests; whether the file is whole
    second pass     record ──▶ the same call of a core without ranks ──▶ plans, compared one by one

No model, no rank and no clock is needed. The replay ends with the first plan that differs: the results in the
rest of the file are those of the recorded plans, and do not fit other ones.
"""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.batch import ScheduledBatch
from penstock.decisions import records
from penstock.decisions.log_file import DecisionFile
from penstock.decisions.records import Assembled, Record, RequestAdded
from penstock.engine.core.core import EngineCore
from penstock.engine.core.core_assembly import build_core
from penstock.engine.core.result_sense import MAX_VOCAB_SIZE
from penstock.errors import DecisionLogError, PenstockError
from penstock.process.config import CoreConfig
from penstock.replay.explanation import PlanExplanation
from penstock.replay.playback import Playback
from penstock.replay.recorded_answers import PlansDifferError, RecordedAnswers
from penstock.replay.replayed_executor import ReplayedExecutor
from penstock.request import Follower, GenerationRequest
from penstock.scheduler.scheduler import Scheduler
from penstock.speculation.grammar_guides import NO_GUIDES

_TICKET = (b"", 0)  # of operations: no client waits for their results
_MEASUREMENT = "it is a measurement at the start, with artificial rows and tokens"

Stops = Mapping[str, set[int]]


class _ReachedError(Exception):
    """Raised when the plan of the step is made with which the replay is to end."""


class _AdmissionDiffersError(Exception):
    """A request was refused when recorded and is admitted now, or the other way round.

    The message names the request, and the error if it is refused now.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDifference:
    """The first difference between the recording and the replay.

    Attributes:
        step: number of the first plan that differs; if an admission differs, the next plan's number.
        recorded, made: the recorded plan, and the plan of the replay; None: there is no such plan.
        admission: a sentence about a request that was refused when recorded and is admitted now, or the other
            way round; empty: a plan differs.
    """

    step: int
    recorded: ScheduledBatch | None = None
    made: ScheduledBatch | None = None
    admission: str = ""

    def fields(self) -> list[tuple[str, object, object]]:
        """Return the fields that differ: the name, the recorded value, the value that was made."""
        names = ScheduledBatch.__struct_fields__
        pairs = [(name, getattr(self.recorded, name, None), getattr(self.made, name, None)) for name in names]
        return [pair for pair in pairs if pair[1] != pair[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of a replay.

    Attributes:
        num_plans: number of plans that were made and are equal to the recorded ones.
        num_requests: number of requests, followers counted, that had come when the replay ended.
        is_whole: the file ends with the end of the engine. If not, the engine was killed or still runs, or
            the recording was stopped.
        is_partial: the replay ended at the step `until`.
        difference: the first difference; None: there is none.
        explanation: sentences about the plan of the step `explain`; None: that plan was not made, or no step
            was given.
    """

    num_plans: int
    num_requests: int
    is_whole: bool
    is_partial: bool
    difference: PlanDifference | None
    explanation: list[str] | None


class Replayer:
    """One replay of a file.

    Args:
        path: path of the file.
        until: the step with whose plan the replay ends; None: it ends with the file.
        explain: the step whose plan is explained; None: no plan is explained.
    """

    def __init__(self, path: Path, *, until: int | None = None, explain: int | None = None) -> None:
        self._file = DecisionFile(path)
        self._path = path
        self._until, self._explain = until, explain
        self._answers = RecordedAnswers(self._planned)
        self._core: EngineCore | None = None
        self._scheduler: Scheduler | None = None
        self._num_requests = 0
        self._is_whole = False
        self._explanation: list[str] | None = None

    def run(self) -> Replay:
        """Replay the file.

        Raises:
            DecisionLogError: the file cannot be read, is not a file of decisions, or cannot be replayed by
                this version.
        """
        stops, difference, is_partial = self._find_stops(), None, False
        try:
            for record in self._file.records():
                self._take(record, stops)
        except PlansDifferError as error:
            difference = _difference(error)
        except _AdmissionDiffersError as error:
            next_step = 0 if self._core is None else self._core.steps_in_flight[1]
            difference = PlanDifference(step=next_step, admission=str(error))
        except _ReachedError:
            is_partial = True
        return Replay(
            num_plans=self._answers.num_plans,
            num_requests=self._num_requests,
            is_whole=self._is_whole,
            is_partial=is_partial,
            difference=difference,
            explanation=self._explanation,
        )

    def _find_stops(self) -> Stops:
        """Return, for each request, the aliases of the tokens that ended it.

        They must be known before the replay begins: a request that is added lists its stop tokens, but the
        recording has them only with the results.
        """
        stops: dict[str, set[int]] = defaultdict(set)
        num_records = 0
        for record in self._file.records():
            num_records += 1
            for request_id, alias in record.stops:
                stops[request_id].add(alias)
        self._is_whole = self._file.is_whole
        if not num_records:
            raise DecisionLogError(
                f"{self._path} does not hold a complete record.",
                remedy="Record longer: decisions reach the file within a second.",
                code="no_record",
            )
        return stops

    def _take(self, record: Record, stops: Stops) -> None:
        self._answers.begin(record)
        name = record.call.request_id if isinstance(record.call, RequestAdded) else "a call"
        try:
            self._call(record.call, stops)
        except DecisionLogError:
            raise
        except PenstockError as error:
            if not record.is_refused:
                text = f"{name} was admitted when recorded, but is refused now: {error}"
                raise _AdmissionDiffersError(text) from error
        else:
            if record.is_refused and isinstance(record.call, RequestAdded):
                raise _AdmissionDiffersError(f"{name} was refused when recorded, but is admitted now")
        self._answers.end()

    def _call(self, call: records.Call, stops: Stops) -> None:
        if isinstance(call, Assembled):
            self._assemble(call)
            return
        core = self._core
        if core is None:
            raise DecisionLogError(
                f"{self._path} does not begin with the settings of its engine.",
                remedy="Record again.",
                code="damaged",
            )
        if isinstance(call, records.Turned):
            core.step(call.timeout_s)
        elif isinstance(call, RequestAdded):
            self._num_requests += 1 + len(call.followers)
            core.add_request(_request(call, stops), call.output_ids, call.num_scores)
        elif isinstance(call, records.RequestAborted):
            core.abort(call.request_id)
        elif isinstance(call, records.EpochLost):
            core.lose_epoch(call.error, ends=call.ends)
        elif isinstance(call, records.EpochEntered):
            core.enter_epoch(call.epoch, ReplayedExecutor(self._answers), ranks=call.ranks)
        elif isinstance(call, records.Operated):
            core.operate(_TICKET, call.operation)
        elif isinstance(call, records.PipeGivenUp):
            core.fail(call.error)

    def _assemble(self, call: Assembled) -> None:
        if records.config_digest(call.config) != call.config_digest:
            raise DecisionLogError(
                f"{self._path} was recorded with settings unknown to this version.",
                remedy="Replay it with the version that recorded it.",
                code="other_config",
            )
        self._core = self._scheduler = None
        self._core, self._scheduler = build_core(
            _replayed_config(call.config),
            ReplayedExecutor(self._answers),
            call.kv_plan,
            self._answers.read_clock,
            recovers=call.recovers,
            epoch=call.epoch,
            guides=NO_GUIDES,
            recorder=Playback(call, self._answers),
        )

    def _planned(self, plan: ScheduledBatch) -> None:
        if plan.step_id == self._explain:
            scheduler = self._scheduler
            self._explanation = (
                [_MEASUREMENT] if scheduler is None else PlanExplanation(scheduler.parts()).sentences(plan)
            )
        if plan.step_id == self._until:
            raise _ReachedError


def _replayed_config(config: CoreConfig) -> CoreConfig:
    """Return the config for a core that gets aliases in place of tokens.

    Its vocabulary has all numbers that an alias can have, and no end-of-sequence ids.
    """
    return msgspec.structs.replace(config, vocab_size=MAX_VOCAB_SIZE, eos_token_ids=[])


def _request(call: RequestAdded, stops: Stops) -> GenerationRequest:
    prompt = array("I", call.prompt)
    if sys.byteorder == "big":
        prompt.byteswap()
    ids = {alias for name in (call.request_id, *call.followers) for alias in stops.get(name, ())}
    return GenerationRequest(
        request_id=call.request_id,
        prompt_token_ids=prompt.tolist(),
        sampling=msgspec.structs.replace(call.sampling, stop_token_ids=sorted(ids)),
        pooling=call.pooling,
        followers=[Follower(request_id, None) for request_id in call.followers],
        follows=call.follows,
    )


def _difference(error: PlansDifferError) -> PlanDifference:
    plan = error.recorded or error.made
    assert plan is not None, "there is one of the two"
    return PlanDifference(step=plan.step_id, recorded=error.recorded, made=error.made)
