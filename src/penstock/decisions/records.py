"""The content of a file of decisions: one record for each call of the engine core, as msgpack.

    Assembled ── RequestAdded ── Turned ── Turned ── RequestAborted ── … ── Finished

A record says which call of the core it was, and what the core read meanwhile: its clock, results, reports and
guesses. It also has the plans that the core made. Tokens of prompts and outputs are not in it, nor are salts,
grammars and names of sessions; it has aliases in their place (`decisions.token_chain`). Plain data.
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

FORMAT = 1  # of the file; a file of another format is not read
_NS = 1_000_000_000


class Assembled(msgspec.Struct, frozen=True, tag="assembled", kw_only=True, omit_defaults=True):
    """The scheduler and the core were made with these settings, and the stages were measured.

    If a start fails and is tried again, there is a record of each attempt.

    Attributes:
        config: the core's settings, without paths, CPU numbers and the draft model.
        config_digest: the digest of `config`, as the recording version of Penstock encodes it.
        kv_plan: the number of KV blocks, and the reports of the ranks.
        recovers: whether a lost pipe is connected again.
        epoch: number of the epoch in which the core began.
        drafter: name of the drafter; empty: there was none.
        is_at_tail: the drafter's guesses are made on the last stage.
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
        prompt: aliases of the prompt's tokens, four bytes each, the lowest first.
        sampling: the fields that the scheduler reads, with aliases of names and grammars. All other fields
            have fixed values.
        followers: ids of the followers, as in `GenerationRequest`.
        follows: as in `GenerationRequest`.
        output_ids: aliases of the tokens that a lost core had returned for the request; None: it is new.
        num_scores: number of prompt tokens whose log-probabilities that core had returned.
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
    """A call of `EngineCore.step`: the core has settled results and made plans."""

    timeout_s: float = 0.0


class EpochLost(msgspec.Struct, frozen=True, tag="lost"):
    """The epoch was ended because another process than the core noticed that the pipe was broken.

    Attributes:
        ends: which requests end with the error, as in `EngineCore.lose_epoch`.
    """

    error: ErrorInfo
    ends: EndedRequests


class EpochEntered(msgspec.Struct, frozen=True, tag="entered"):
    """The next epoch began: the core was connected with all ranks again.

    Attributes:
        ranks: the reports of the ranks that have loaded.
    """

    epoch: int
    ranks: list[RankLoaded]


class Operated(msgspec.Struct, frozen=True, tag="operated"):
    """An administrator's operation came into force."""

    operation: Operation


class PipeGivenUp(msgspec.Struct, frozen=True, tag="given_up"):
    """The pipeline was given up for good; all requests end with the error."""

    error: ErrorInfo


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The engine has ended, and no record follows.

    A file without this record is of an engine that was killed or still runs, or the recording was stopped.
    """


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
    """A draft, with aliases in place of tokens; the fields are those of `Draft`.

    A negative `chance` stands for a drafter that failed instead of answering.
    """

    token_ids: list[int]
    chance: float
    more_s: float
    is_forced: bool


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of the core. Lists have the order in which the core read their entries.

    Fields that are not listed here are those of `core_call.CoreCall`.

    Attributes:
        call: which call it was, with its arguments.
        times: readings of the clock, in the form of `packed_times`.
        polls: for each poll of the executor, the results, or the error that it raised.
        plans: the plans that were submitted, in the form of `without_tokens`.
        unsent: index in `plans` -> the error, for plans that could not be submitted.
        spans: for each look at the ranks' timed work, the reports that had come since the look before.
        drafts, guided: the answers of the drafter, and of its guides; None: there was no guess (`NO_DRAFT`).
        stops: the sampled tokens that end their request: pairs of the request's id and the token's alias.
        ended: ids of the requests that ended in the call.
        is_refused: the call raised an error.
    """

    call: Call
    times: list[int | float] = []
    polls: list[list[StepResult] | ErrorInfo] = []
    plans: list[ScheduledBatch] = []
    unsent: dict[int, ErrorInfo] = {}
    grammars: dict[int, list[BuiltGrammar]] = {}
    spans: list[list[StageSpans]] = []
    stage_times: list[list[StageTimes]] = []
    free_bytes: list[int | None] = []
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
    """Return the record that these bytes encode. Raises `msgspec.DecodeError` if they encode none."""
    return _decoder.decode(data)


def config_digest(config: CoreConfig) -> str:
    """Return the digest of a config, as this version of Penstock encodes it."""
    return hashlib.sha256(_encoder.encode(config)).hexdigest()


def without_tokens(plan: ScheduledBatch) -> ScheduledBatch:
    """Return the plan with numbers of tokens in the place of their ids, and without sampling and digest.

    All that the scheduler decides is still there.
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
    """Return readings of a clock, each as whole nanoseconds since the reading before it.

    A reading that whole nanoseconds cannot express exactly stays a float, in seconds.

    Args:
        before_ns: the reading before the first of `times`.

    Returns:
        The packed readings, and the last reading in nanoseconds.
    """
    packed: list[int | float] = []
    for time in times:
        now_ns = round(time * _NS)
        packed.append(now_ns - before_ns if now_ns / _NS == time else time)
        before_ns = now_ns
    return packed, before_ns


def unpacked_times(packed: Sequence[int | float], before_ns: int) -> tuple[list[float], int]:
    """Return the readings that `packed_times` packed, and the last of them in nanoseconds."""

    def read() -> Iterator[float]:
        nonlocal before_ns
        for entry in packed:
            time = entry if isinstance(entry, float) else (before_ns + entry) / _NS
            before_ns = round(time * _NS)
            yield time

    return list(read()), before_ns
