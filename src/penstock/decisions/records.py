"""The content of a file of decisions: one record for each call of the engine core, as msgpack.

    Assembled ── RequestAdded ── Turned ── Turned ── RequestAborted ── … ── Finished

A record says what the core was asked and what it met: readings of its clock, results, reports, guesses; and
the plans that it made of these. No token of a prompt or an output is in it (`decisions.token_chain`), nor a
salt, a grammar or a session's name. Plain data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from penstock.batch import (
    GREEDY,
    BuiltGrammar,
    RankLoaded,
    RewoundRow,
    ScheduledBatch,
    StageSpans,
    StageTimes,
    StepResult,
)
from penstock.config.engine import Pooling
from penstock.errors import ErrorInfo
from penstock.executor.base import KVPlan
from penstock.operations import Operation
from penstock.process.config import CoreConfig
from penstock.process.control import EndedRequests
from penstock.request import SamplingParams

FORMAT = 1  # of the file; another one is refused
_NS = 1_000_000_000


class Assembled(msgspec.Struct, frozen=True, tag="assembled", kw_only=True, omit_defaults=True):
    """Scheduler and core were made with these settings. A start that was tried again is recorded again.

    Attributes:
        config: without paths and without the draft model.
        config_digest: its digest, as this version of Penstock encodes it.
        drafter: the drafter's name; empty: there was none.
        is_at_tail: the last stage guesses.
    """

    config: CoreConfig
    config_digest: str
    kv_plan: KVPlan
    recovers: bool = False
    epoch: int = 0
    drafter: str = ""
    is_at_tail: bool = False


class RequestAdded(msgspec.Struct, frozen=True, tag="added", kw_only=True, omit_defaults=True):
    """A request was added.

    Attributes:
        prompt: aliases of its tokens, four bytes each, the lowest first.
        sampling: the part that the scheduler reads; the rest has its defaults.
        followers: ids of the sequences that follow it.
        output_ids: aliases of the tokens that another core had given it; None: it is new.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    pooling: Pooling | None = None
    followers: list[str] = []
    follows: str = ""
    output_ids: list[int] | None = None
    num_scores: int = 0


class RequestAborted(msgspec.Struct, frozen=True, tag="aborted"):
    """A request was aborted."""

    request_id: str


class Turned(msgspec.Struct, frozen=True, tag="turn", omit_defaults=True):
    """The core has settled results and made plans."""

    timeout_s: float = 0.0


class EpochLost(msgspec.Struct, frozen=True, tag="lost"):
    """The pipe was broken, which another than the core had noticed."""

    error: ErrorInfo
    ends: EndedRequests


class EpochEntered(msgspec.Struct, frozen=True, tag="entered"):
    """The pipe was joined again."""

    epoch: int
    ranks: list[RankLoaded]


class Operated(msgspec.Struct, frozen=True, tag="operated"):
    """An administrator's operation came into force."""

    operation: Operation


class PipeGivenUp(msgspec.Struct, frozen=True, tag="given_up"):
    """The pipeline was given up."""

    error: ErrorInfo


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The engine has ended; nothing follows. Without this record it was killed, or the disk was full."""


Call = (
    Assembled
    | RequestAdded
    | RequestAborted
    | Turned
    | EpochLost
    | EpochEntered
    | Operated
    | PipeGivenUp
    | Finished
)


class Guess(msgspec.Struct, frozen=True, array_like=True):
    """A draft, with aliases in place of tokens; `Draft` has the same fields."""

    token_ids: list[int]
    chance: float
    more_s: float
    is_forced: bool


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of the core, with lists in the order in which the core asked; see `core_call.CoreCall`.

    Attributes:
        times: readings of the clock, as `packed_times` has them.
        polls: results of each poll, or the error that it raised.
        plans: plans that were submitted, as `without_tokens` has them.
        unsent: errors of plans that could not be submitted, by their place among `plans`.
        drafts, guided: None: there was no guess; an empty list: the drafter has failed.
        stops: sampled aliases that end their request: request id, alias.
        ended: requests that have ended in the call.
        is_refused: the call has raised an error.
    """

    call: Call
    times: list[int | float] = []
    polls: list[list[StepResult] | ErrorInfo] = []
    plans: list[ScheduledBatch] = []
    unsent: dict[int, ErrorInfo] = {}
    grammars: dict[int, list[BuiltGrammar]] = {}
    spans: list[list[StageSpans]] = []
    stage_times: list[list[StageTimes]] = []
    drafts: list[Guess | None] = []
    guided: list[Guess | None] = []
    wants: list[int | None] = []
    news: list[list[int]] = []
    stops: list[tuple[str, int]] = []
    ended: list[str] = []
    is_refused: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes) -> Record:
    """Return a record. Raises `msgspec.DecodeError` for bytes that are not one of this version."""
    return _decoder.decode(data)


def config_digest(config: CoreConfig) -> str:
    """Return the digest of a config, as this version of Penstock encodes it."""
    return hashlib.sha256(_encoder.encode(config)).hexdigest()


def without_tokens(plan: ScheduledBatch) -> ScheduledBatch:
    """Return the plan with the number of tokens in the place of their ids.

    What a request asks of the sampler is left out, too: all that a scheduler decides is left.
    """
    replace = msgspec.structs.replace
    return replace(
        plan,
        drafts={index: [len(ids)] for index, ids in plan.drafts.items()},
        new_rows=[replace(new, token_ids=[len(new.token_ids)], sampling=GREEDY) for new in plan.new_rows],
        rewound=[
            RewoundRow(row.row, row.step, row.num_tokens, [len(row.newest_ids)]) for row in plan.rewound
        ],
        digest=0,
    )


def packed_times(times: Sequence[float], before_ns: int) -> tuple[list[int | float], int]:
    """Return readings of a clock as nanoseconds since the reading before, where nothing is lost by that.

    Args:
        before_ns: the reading before the first.

    Returns:
        The readings, and the last of them in nanoseconds.
    """
    packed: list[int | float] = []
    for time in times:
        now_ns = round(time * _NS)
        packed.append(now_ns - before_ns if now_ns / _NS == time else time)
        before_ns = now_ns
    return packed, before_ns


def unpacked_times(packed: Sequence[int | float], before_ns: int) -> tuple[list[float], int]:
    """Return the readings that `packed_times` was given, and the last one in nanoseconds."""

    def read() -> Iterator[float]:
        nonlocal before_ns
        for entry in packed:
            time = entry if isinstance(entry, float) else (before_ns + entry) / _NS
            before_ns = round(time * _NS)
            yield time

    return list(read()), before_ns
