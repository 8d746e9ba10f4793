"""Turns calls of the core into records: they keep what the scheduler reads of a request, but not its text.

    tokens                          aliases (`decisions.token_chain`)
    salts, names of sessions        aliases
    grammars                        aliases of the same length: the scheduler reckons their memory by length
    log-probabilities, vectors      placeholders, as many as there were
    how a token is sampled          left out

It runs on the thread that writes (`decisions.log_writer`), some time after the call. So it cannot ask the
core which request holds which row, and which tokens that request has: it keeps track of both from the calls.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.batch import BuiltGrammar, ScheduledBatch, SpansKey, StageSpans, StepResult
from penstock.decisions import core_call, records
from penstock.decisions.core_call import CoreCall, HeardDraft
from penstock.decisions.records import Guess, Record
from penstock.decisions.token_chain import NO_ALIAS, TokenChain
from penstock.errors import ErrorInfo
from penstock.operations import CloseSession, OpenSession, Operation
from penstock.process.config import CoreConfig
from penstock.request import GenerationRequest, SamplingParams, StructuredOutputs, TokenLogprobs
from penstock.speculation.drafter import NO_DRAFT

_KEY_BYTES = 32
_NAME_BYTES = 8
_NO_SCORE = TokenLogprobs(0.0, 1, [], [])
_FINITE_VECTOR = b"\0\0\0\0"
_UNTOLD = "not recorded"
_ALIAS_CHARACTERS = 126  # "\x01" to "\x7e", digits of one byte each; "\x7f" fills up to the length


@dataclass(slots=True)
class _Live:
    """A request that has not ended.

    Attributes:
        stops: token ids that end the request.
        text: the states of its tokens, from which aliases follow.
    """

    request_id: str
    stops: frozenset[int]
    text: TokenChain


class Redaction:
    """Makes the records of calls; it must get all calls, in their order.

    Args:
        key: the key of the aliases; None: a random one.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(_KEY_BYTES)
        self._grammars: dict[bytes, int] = {}  # numbers by digest: a grammar itself may have many bytes
        self._stops: list[tuple[str, int]] = []  # of the call, as in `Record`
        self._now_ns = 0
        self._begin(eos_token_ids=())

    def record(self, call: CoreCall) -> Record:
        """Return the record of a call, in which aliases and placeholders replace what must not be written."""
        asked = self._asked(call)
        self._stops = []
        polls: list[list[StepResult] | ErrorInfo] = []
        plans: list[ScheduledBatch] = []
        unsent: dict[int, ErrorInfo] = {}
        for entry in call.steps:
            if isinstance(entry, ScheduledBatch):
                self._follow(entry)
                plans.append(records.without_tokens(entry))
            elif isinstance(entry, core_call.Unsent):
                unsent[len(plans) - 1] = entry.error
            else:
                polls.append(entry if isinstance(entry, ErrorInfo) else list(map(self._result, entry)))
        times, self._now_ns = records.packed_times(call.times, self._now_ns)
        record = Record(
            call=asked,
            times=times,
            polls=polls,
            plans=plans,
            unsent=unsent,
            grammars={look: list(map(_without_reason, found)) for look, found in call.grammars.items()},
            spans=list(map(self._new_spans, call.spans)),
            stage_times=call.stage_times,
            free_bytes=call.free_bytes,
            drafts=list(map(self._guess, call.drafts)),
            guided=list(map(self._guess, call.guided)),
            wants=call.wants,
            news=call.news,
            stops=self._stops,
            ended=call.ended,
            is_refused=call.is_refused,
        )
        self._forget(call.ended)
        for live in self._touched:
            live.text.forget_past()
        self._touched.clear()
        return record

    def _begin(self, eos_token_ids: Sequence[int]) -> None:
        """Forget all requests, since a new core is made, which knows none."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self._live: dict[int, _Live] = {}  # by arrival
        self._arrivals: dict[str, int] = {}  # request id -> arrival, of the same requests
        self._num_arrivals = 0
        self._rows: dict[int, int] = {}  # arrival of the request that holds a row, or held it last
        self._sampled: dict[int, list[int | None]] = {}  # by step in flight: arrivals of the rows it samples
        self._touched: list[_Live] = []  # requests to which the call brings tokens
        self._seen_spans: set[SpansKey] = set()
        self._now_ns = 0

    # --- what was asked --------------------------------------------------------------------------

    def _asked(self, call: CoreCall) -> records.Call:
        asked = call.asked
        if isinstance(asked, core_call.Turn):
            return records.Turned(asked.timeout_s)
        if isinstance(asked, core_call.Addition):
            return self._addition(asked, is_refused=call.is_refused)
        if isinstance(asked, core_call.Abortion):
            self._forget([asked.request_id])
            return records.RequestAborted(asked.request_id)
        if isinstance(asked, core_call.Assembly):
            self._begin(asked.config.eos_token_ids)
            return _assembled(asked, *(call.drafter or ("", False)))
        if isinstance(asked, core_call.Loss):
            return records.EpochLost(asked.error, asked.ends)
        if isinstance(asked, core_call.Entrance):
            self._sampled.clear()
            return records.EpochEntered(asked.epoch, list(asked.ranks))
        if isinstance(asked, core_call.Order):
            return records.Operated(self._operation(asked.operation))
        return records.PipeGivenUp(asked.error)

    def _addition(self, asked: core_call.Addition, *, is_refused: bool) -> records.RequestAdded:
        request, sampling = asked.request, asked.request.sampling
        text = TokenChain(self._key, sampling.cache_salt.encode("utf-8", "surrogatepass"))
        prompt = array("I", text.extend(request.prompt_token_ids))
        if sys.byteorder == "big":
            prompt.byteswap()
        output_ids = None if asked.output_ids is None else text.extend(asked.output_ids)
        text.forget_past()
        if not is_refused:
            stops = frozenset(sampling.stop_token_ids)
            stops = stops if sampling.ignore_eos else stops | self._eos_token_ids
            for sequence in request.alone():
                live = _Live(sequence.request_id, stops, text.copy())
                self._live[self._num_arrivals] = live
                self._arrivals[sequence.request_id] = self._num_arrivals
                self._num_arrivals += 1
        return records.RequestAdded(
            request_id=request.request_id,
            prompt=prompt.tobytes(),
            sampling=self._sampling(request),
            pooling=request.pooling,
            followers=[follower.request_id for follower in request.followers],
            follows=request.follows,
            output_ids=output_ids,
            num_scores=asked.num_scores,
        )

    def _sampling(self, request: GenerationRequest) -> SamplingParams:
        """Return the fields that the scheduler reads; the others get fixed values.

        The ids that end the request are not among them: `Record.stops` has those that were sampled.
        """
        sampling = request.sampling
        return SamplingParams(
            temperature=0.0,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            ignore_eos=True,
            prompt_logprobs=None if sampling.prompt_logprobs is None else 0,
            cache_salt=self._name(sampling.cache_salt),
            priority=sampling.priority,
            session_id=self._name(sampling.session_id),
            structured_outputs=self._grammar(sampling.structured_outputs),
            speculative=sampling.speculative,
        )

    def _operation(self, operation: Operation) -> Operation:
        if isinstance(operation, OpenSession | CloseSession):
            return msgspec.structs.replace(operation, session_id=self._name(operation.session_id))
        return operation

    def _name(self, text: str) -> str:
        """Return the alias of a name; the alias of an empty name is empty."""
        data = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=self._key, digest_size=_NAME_BYTES).hexdigest() if text else ""

    def _grammar(self, structured: StructuredOutputs | None) -> StructuredOutputs | None:
        if structured is None:
            return None
        data = msgspec.msgpack.encode(structured)
        number = self._grammars.setdefault(hashlib.sha256(data).digest(), len(self._grammars))
        return _grammar_of_size(len(data), number)

    # --- what has come ---------------------------------------------------------------------------

    def _follow(self, plan: ScheduledBatch) -> None:
        """Learn from a plan which requests get rows, and to which requests its result will bring tokens."""
        for new in plan.new_rows:
            self._rows[new.row] = self._arrivals.get(new.request_id, -1)
        self._sampled[plan.step_id] = [self._rows.get(row) for row in plan.sampled_rows]

    def _result(self, result: StepResult) -> StepResult:
        arrivals = self._sampled.pop(result.step_id, [])
        if result.error is not None:
            arrivals = []  # the core appends nothing to a text
        token_ids = [
            self._aliases(self._live.get(-1 if arrival is None else arrival), ids, index in result.failed)
            for index, (arrival, ids) in enumerate(zip(arrivals, result.token_ids, strict=False))
        ]
        token_ids += [[NO_ALIAS] * len(ids) for ids in result.token_ids[len(token_ids) :]]
        return StepResult(
            step_id=result.step_id,
            epoch=result.epoch,
            token_ids=token_ids,
            num_rejected=result.num_rejected,
            failed=result.failed,
            unmet=dict.fromkeys(result.unmet, _UNTOLD),
            scores=[[_NO_SCORE] * len(scores) for scores in result.scores],
            pooled=[_FINITE_VECTOR if vector else b"" for vector in result.pooled],
            error=result.error,
        )

    def _aliases(self, live: _Live | None, ids: Sequence[int], has_failed: bool) -> list[int]:
        accepted = ids[:-1] if has_failed else ids
        if live is None:
            aliases = [NO_ALIAS] * len(accepted)
        else:
            self._touched.append(live)
            aliases = live.text.extend(accepted)
            ends = zip(accepted, aliases, strict=True)
            self._stops += [(live.request_id, alias) for token, alias in ends if token in live.stops]
        return [*aliases, -1] if has_failed and ids else aliases

    def _guess(self, heard: HeardDraft) -> Guess | None:
        draft = heard.draft
        if draft is None:
            return Guess([], -1.0, 0.0, False)
        if draft is NO_DRAFT:
            return None
        live = self._live.get(heard.arrival)
        ids = [] if live is None else live.text.aliases_behind(heard.num_known, draft.token_ids)
        return Guess(ids, draft.chance, draft.more_s, draft.is_forced)

    def _new_spans(self, reports: Sequence[StageSpans]) -> list[StageSpans]:
        """Return the reports that the look before did not find; the engine returns each for some seconds."""
        new = [report for report in reports if report.key not in self._seen_spans]
        self._seen_spans = {report.key for report in reports}
        return new

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._live.pop(self._arrivals.pop(request_id, -1), None)


def _assembled(asked: core_call.Assembly, drafter: str, is_at_tail: bool) -> records.Assembled:
    config = without_places(asked.config)
    return records.Assembled(
        config=config,
        config_digest=records.config_digest(config),
        kv_plan=asked.kv_plan,
        recovers=asked.recovers,
        epoch=asked.epoch,
        drafter=drafter,
        is_at_tail=is_at_tail,
    )


def without_places(config: CoreConfig) -> CoreConfig:
    """Return a config without what decisions do not depend on: paths, CPU numbers and the draft model."""
    return msgspec.structs.replace(config, model_path="", cpus=(), drafter=None, record_decisions="")


def _without_reason(report: BuiltGrammar) -> BuiltGrammar:
    return msgspec.structs.replace(report, why=_UNTOLD if report.why else "")


def _grammar_of_size(num_bytes: int, number: int) -> StructuredOutputs:
    """Return a grammar that stands for a number, and has a given size as msgpack if possible.

    Args:
        num_bytes: the size. If no form of grammar can have it, the smallest JSON form is returned.
        number: tells this alias from others.
    """
    digits = []
    while number:
        number, digit = divmod(number, _ALIAS_CHARACTERS)
        digits.append(chr(1 + digit))
    text, forms = "".join(digits), (_as_json, _as_regex, _as_grammar)
    for make in forms:  # no form can have all sizes: msgpack's header of a text grows with the text's length
        for length in range(max(len(text), num_bytes - 20), num_bytes):
            structured = make(text.ljust(length, "\x7f"))
            if len(msgspec.msgpack.encode(structured)) == num_bytes:
                return structured
    return _as_json(text)


def _as_json(text: str) -> StructuredOutputs:
    return StructuredOutputs(json=text)


def _as_regex(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


def _as_grammar(text: str) -> StructuredOutputs:
    return StructuredOutputs(grammar=text)
