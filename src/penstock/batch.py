"""The plan: the only types that cross between the scheduler (engine core) and the stages.

A `ScheduledBatch` is one micro-batch for one trip through the pipe. The core encodes it once and sends the
same bytes to every rank; a rank works out no shape and no decision on its own. The last stage answers with a
`StepResult`, and sends `SampledTokens` to the first stage and `SampledCounts` to those between
(`pipeline.token_return`).

Rows: a *row* is the index of a request in every rank's row table, the same on all ranks. A freed row may be
used again; its *generation* then grows by one, so that late tokens of the former request are recognised.
Lists that run "per row of the plan" are aligned with `ScheduledBatch.rows`. No torch here.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Container, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from penstock.bounds import Count, LayerNumber, Nanoseconds, Seconds, Sentence, Small, TokenId, Word
from penstock.config.engine import Pooling
from penstock.errors import ErrorInfo, ProtocolError
from penstock.request import StructuredOutputs, TokenLogprobs

MADE_UP = "calibration-"  # ids of rows that no client has asked for begin so
NO_GRAMMAR = -1
KNOWN = -1  # token_from: the row's input ids are in the row table already (prompt, or a resumed request)
GUESSED = -2  # token_from: the row's input id is the first of its drafts, and not sampled yet


class LogitChanges(msgspec.Struct, frozen=True, array_like=True):
    """A request's changes to its logits before a token is chosen; `sample.logit_changes` has the formula."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: dict[int, float] = {}  # by id
    allowed_ids: list[int] | None = None  # None: all
    bad_words: list[list[int]] = []  # the last id of each does not follow the others, among generated ones


class RowSampling(msgspec.Struct, frozen=True, array_like=True):
    """The way in which the last stage samples a row. Numbers are validated; `seed` is always set."""

    temperature: float
    top_k: int  # 0 = all
    top_p: float
    min_p: float
    seed: int
    min_tokens: int
    suppressed_ids: list[int]  # not sampled before min_tokens: end-of-sequence and stop ids
    num_logprobs: int  # -1 = none
    changes: LogitChanges | None = None  # None: the logits stay as they are
    num_prompt_logprobs: int = -1  # likeliest ids told of each scored prompt token; -1 = none is scored
    structured: StructuredOutputs | None = None  # which texts may be sampled; has been found to be usable


GREEDY = RowSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_tokens=0, suppressed_ids=[], num_logprobs=-1
)


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A request enters the row table of every rank (first start, or resumption after preemption)."""

    row: int
    generation: int
    request_id: str
    prompt_len: int  # of the original prompt: sampling positions count from here
    token_ids: list[int]  # all known tokens: prompt, then what was generated before a preemption
    sampling: RowSampling
    pooling: Pooling | None = None  # its prompt is pooled so on the last stage, and no token is sampled
    # Number of what `sampling.structured` says: the last stage builds it if it has not, and tells when it has
    # (`GrammarsBuilt`). No plan samples the row before the core knows.
    grammar: int = NO_GRAMMAR
    # Of a row none of whose tokens are in the plan: its blocks, and the position that it will begin at.
    blocks: list[int] = []
    start: int = 0


class ScoredTokens(msgspec.Struct, frozen=True, array_like=True):
    """The prompt tokens of a row whose log-probabilities are wanted: each under the tokens before it.

    They are among those that the plan's tokens of the row stand before: the first may be the second token of
    its chunk, the last the one behind the chunk, which is in the row table already.
    """

    place: int  # of the row in the plan
    first: int  # position of the first of them, >= 1
    count: int  # >= 1


class RewoundRow(msgspec.Struct, frozen=True, array_like=True):
    """A row whose guess was wrong, with windows ahead of it in the stages: the row goes on from here.

    Samples of earlier steps that a rank has not consumed are void for this row, whatever they say.
    """

    row: int
    step: int  # that has sampled its newest token
    num_tokens: int  # known tokens; all but the newest have their keys and values
    newest_ids: list[TokenId]  # the last of them, with all that the first stage may not have yet


class TierOrder(msgspec.Struct, frozen=True, array_like=True):
    """An order to copy a block between the KV cache and the store, every rank its own layers and heads.

    It is carried out beside the steps that follow and answered by `OrdersDone`; until all ranks have answered
    the core does not give the block to another request.
    """

    order: int  # its number
    is_load: bool  # from the store; else to it
    block: int
    name: bytes  # of what the block holds, or is to hold


class LinkOrder(msgspec.Struct, frozen=True, array_like=True):
    """An order to exchange the link between two ranks: another one takes the frames from a step on.

    The two ranks have been handed their ends of it (`process.control.AttachLink`); others have no part in it.
    """

    number: int  # of the new link, within the epoch
    first_step: int  # whose frame crosses it
    stage: int  # of the sender; the receiver is in the next one
    sender: int  # rank in its stage
    receiver: int  # rank in its stage


class PlanMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The notes of a plan on itself: they change no step, only what is measured of it.

    Attributes:
        starved, held: why the plan was not issued right after the one before: no request could run; or the
            pipe was full, and a result had to come first. Neither: the core was not earlier.
        wants_times: ranks send `StageTimes` and `StageSpans` after it, due or not.
    """

    starved: bool = False
    held: bool = False
    wants_times: bool = False


NO_META = PlanMeta()


class ScheduledBatch(msgspec.Struct, frozen=True, tag="plan", kw_only=True, omit_defaults=True):
    """One plan. An empty plan (no rows) is legal: it is the health probe and crosses every stage.

    Order of application on a rank: `freed_rows`, then `new_rows` with their blocks, then `rewound`, then
    append `new_blocks`, then consume the token returns of all steps up to `consume_through`, then run.
    """

    step_id: int  # 0, 1, 2, ... without gaps; goes on in a new epoch
    epoch: int = 0
    rows: list[int] = []  # [num_rows]
    num_tokens: list[int] = []  # [num_rows] tokens of the row in this step, >= 1
    start_positions: list[int] = []  # [num_rows] position of the first of them, all drafts taken as accepted
    new_blocks: list[list[int]] = []  # [num_rows] block ids to append to the row's block table
    need_sampled: list[bool] = []  # [num_rows] True where this step's last token yields a sampled id
    # [num_rows] step whose sampled id this row consumes as input, or KNOWN, or GUESSED
    token_from: list[int] = []
    # Row index -> ids that may follow the token which the row consumes; where that is a guess too, it is the
    # first of them. They are the row's last tokens of the step, and all of its tokens are sampled: such a row
    # is a window (`sample.windows`).
    drafts: dict[int, list[TokenId]] = {}
    # Row index -> tokens that the MTP layer guesses behind what is sampled of the row; it reads the row's
    # tokens. Of rows that are not here it reads none.
    mtp: dict[int, int] = {}
    pooled: list[int] = []  # rows whose vector is whole with this step, in plan order
    consume_through: int = -1  # earlier stages consume token returns of steps <= this before building
    freed_rows: list[int] = []
    new_rows: list[NewRow] = []
    rewound: list[RewoundRow] = []
    dropped_grammars: list[int] = []  # numbers that no row will have any more; before the new rows
    given_up: list[bytes] = []  # names of blocks that no rank keeps in host memory; before the orders
    orders: list[TierOrder] = []  # carried out once this rank has run all steps before this one
    # Numbers of orders to load blocks that this step reads: a rank runs a layer when that layer is there, or
    # will not come. The core holds its result until all ranks have answered, and drops it if one has failed.
    awaited: list[int] = []
    scored: list[ScoredTokens] = []  # what the last stage tells besides; of a row at most once
    links: list[LinkOrder] = []  # exchanged at a step that is this one or comes later
    meta: PlanMeta = NO_META
    residency: int = 0  # digest of the core's residency table after it (`penstock.residency`); 0: not told
    digest: int = 0  # of all plans of the epoch up to this one; whatever belongs to the step carries it

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens, whole prompts or chunks: rows that only go on count none."""
        if len(self.rows) == self.total_tokens:
            return 0
        counts = enumerate(self.num_tokens)
        return sum(count for index, count in counts if count > 1 and index not in self.drafts)

    @property
    def num_samples(self) -> int:
        """The number of positions that are sampled: one of each sampled row, and one behind each draft."""
        return sum(self.window_sizes)

    @property
    def window_sizes(self) -> list[int]:
        """The number of positions that are sampled of each sampled row, in plan order."""
        return window_sizes(self.need_sampled, self.num_tokens, self.drafts)

    def compared_drafts(self, index: int) -> list[int]:
        """Return the drafts of a row on which its own samples decide: all but one that is its input."""
        draft_ids = self.drafts.get(index, [])
        return draft_ids[1:] if self.token_from[index] == GUESSED else draft_ids

    @property
    def sampled_rows(self) -> list[int]:
        """The rows (not plan indices) that yield a sampled id, in plan order."""
        return [row for row, sampled in zip(self.rows, self.need_sampled, strict=True) if sampled]


def window_sizes(
    need_sampled: Sequence[bool], num_tokens: Sequence[int], drafts: Container[int]
) -> list[int]:
    """Return `ScheduledBatch.window_sizes` of a plan with these fields."""
    sampled = (index for index, is_sampled in enumerate(need_sampled) if is_sampled)
    return [num_tokens[index] if index in drafts else 1 for index in sampled]


class SampledTokens(msgspec.Struct, frozen=True, array_like=True):
    """The token return of one step to a stage that embeds.

    It has one entry per row of the plan's need-sampled mask, in plan order.
    """

    step_id: int
    epoch: int
    digest: int
    # Accepted and sampled ids of the row; one without speculation; -1: sampling failed; none: the plan was a
    # window that is void.
    token_ids: list[list[TokenId]]
    num_rejected: list[int]  # drafts of the row that were rejected; 0 without speculation


class SampledCounts(msgspec.Struct, frozen=True, array_like=True):
    """The token return of one step to a stage that does not embed: as `SampledTokens`, without the ids."""

    step_id: int
    epoch: int
    digest: int
    num_ids: list[int]  # accepted and sampled ids of the row; 0 = failed row, or void window
    num_rejected: list[int]  # as in `SampledTokens`: the stage computes positions with it


class StepResult(msgspec.Struct, frozen=True, tag="result", kw_only=True, omit_defaults=True):
    """The samples of the last stage, for the core.

    Lists run over the plan's sampled rows, in plan order; those of scores over its `scored`, `pooled` over
    its pooled rows.
    """

    step_id: int
    epoch: int = 0
    digest: int = 0  # of the plan, and so of all that the last stage has applied
    token_ids: list[list[TokenId]] = []
    num_rejected: list[int] = []
    logprobs: list[list[TokenLogprobs] | None] = []
    failed: list[int] = []  # indices into the lists above where nothing could be sampled
    unmet: dict[int, str] = {}  # of these: why no id was allowed; of the others the logits were not finite
    guesses: dict[int, list[TokenId]] = {}  # index into `token_ids` -> what the MTP layer guesses behind it
    scores: list[list[TokenLogprobs]] = []  # of each token; of none where a logit was NaN or infinite
    pooled: list[bytes] = []  # float32 [hidden_size] each; empty: not finite
    # Why a stage has not computed the step. All of its requests end with it; the lists above have no samples.
    error: ErrorInfo | None = None


class RankLoaded(msgspec.Struct, frozen=True, tag="loaded", kw_only=True):
    """A rank has its weights. `max_blocks`: the KV blocks that its memory can hold."""

    stage: Small
    tp_rank: Small = 0
    max_blocks: Count
    block_bytes: Count  # of one block over this rank's layers
    tensor_bytes: Count  # of its own weights as held
    bytes_read: Count  # from checkpoint files, tensor data only
    load_seconds: Seconds
    is_invariant: bool  # a number is the same bits, whatever is computed together with it
    kernels: Sentence = ""  # which kernels run, or why none do
    numeric_class: Sentence = ""  # ranks of one class compute the same bits (`rank.compute_choice`)
    end_layer: LayerNumber = 0  # the one behind its own
    store_host: Word = ""  # as in `process.config.StoreConfig`
    peak_bytes: Count = 0  # that its largest plan was measured to take beside weights and KV cache
    margin_bytes: Count = 0  # that it leaves free besides


class AllocateKV(msgspec.Struct, frozen=True, tag="allocate", kw_only=True):
    """The core's answer once all ranks have loaded: the minimum over the stages [D9].

    Plans then begin at `first_step` of `epoch`. A rank that has its KV cache from an epoch before keeps it.
    """

    num_blocks: int
    epoch: int = 0
    first_step: int = 0


class RankReady(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The rank has allocated its KV cache and warmed up, and waits for plans."""

    stage: int
    tp_rank: int = 0


class StageTimes(msgspec.Struct, frozen=True, tag="times", kw_only=True):
    """The use of a rank's time since its start.

    It is sent with the first step that ends a second or more after the report before.
    """

    stage: int
    num_steps: Count  # those with tokens
    wall_ns: Nanoseconds
    busy_ns: Nanoseconds  # of forward and sampling: CPU time of the thread, or time of the GPU
    phase_ns: list[Nanoseconds]  # by `trace.phases.Phase`; their sum is `wall_ns`
    busy_ratio: float  # of the time since the report before
    exchange_ns: int = 0  # of what is counted above: in sums and gathers of the ranks that share the stage
    exchange_wait_ns: int = 0  # of those: waiting for the other ranks
    replica: int = 0
    free_bytes: Count | None = None  # of the memory of its host; None: it computes on a GPU


SpansKey = tuple[int, int, int]


class StageSpans(msgspec.Struct, frozen=True, tag="spans", kw_only=True):
    """The spans of a rank's time since its report before, without gaps."""

    stage: int
    began_ns: Nanoseconds  # of the host's monotonic clock
    shift_ns: int = 0  # to add to it to have it in the head's time; the core says so
    phases: bytes  # [num_spans] `trace.phases.Phase`
    durations_ns: list[Nanoseconds]  # [num_spans]
    steps: list[tuple[int, Count, Count]]  # index of the step's first span, step id, tokens
    prompt_tokens: dict[int, Count] = {}  # by step id: tokens of prompts, of steps that have some
    tp_rank: int = 0
    replica: int = 0

    @property
    def key(self) -> SpansKey:
        """The key that tells it from all other reports of its core: stage, rank, and when it begins."""
        return self.stage, self.tp_rank, self.began_ns

    @property
    def start_ns(self) -> int:
        """The time at which the first span has begun, in the head's time as far as the core knows it."""
        return self.began_ns + self.shift_ns


class StoreUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The use of the store of KV blocks; a rank tells what it has done since it told last."""

    bytes_read: int = 0  # of payloads that were what they should be
    bytes_written: int = 0
    records_read: int = 0  # parts of blocks that were there and what they should be
    verify_failures: int = 0  # records that were not what their keys say
    call_failures: int = 0  # of the store, or half answers
    host_bytes_read: int = 0  # of payloads that were in the host tier, and the store was not asked for
    host_records_read: int = 0  # of them, how many
    host_bytes_written: int = 0  # of payloads put into it: computed, or got from the store
    host_bytes_used: int = 0  # of its memory: how many more, or fewer
    switched_off: int = 0  # 1: it is left alone from now on because it failed too often; -1: no longer so
    failure: str = ""  # why a call has failed, the last one; empty: none has

    def plus(self, other: StoreUse) -> StoreUse:
        """Return the sum of this and another, which was told after it."""
        if other is NO_STORE_USE:
            return self
        return self._combined(other, operator.add, other.failure or self.failure)

    def since(self, earlier: StoreUse) -> StoreUse:
        """Return the use that has come to it since an earlier state."""
        is_new = self.call_failures > earlier.call_failures
        return self._combined(earlier, operator.sub, self.failure if is_new else "")

    def _combined(self, other: StoreUse, combine: Callable[[int, int], int], failure: str) -> StoreUse:
        names = (name for name in self.__struct_fields__ if name != "failure")
        numbers: dict[str, Any] = {name: combine(getattr(self, name), getattr(other, name)) for name in names}
        return StoreUse(**numbers, failure=failure)


NO_STORE_USE = StoreUse()


OrderStatus = Literal[
    "done",  # by all ranks that were asked
    "late",  # a step could not wait for it; what the store has may be good
    "failed",  # not in the store, not what it should be, or the store does not work
]


class OrderResult(NamedTuple):
    """The result of a `TierOrder`, on one rank or on all of them."""

    order: int  # its number
    status: OrderStatus


class OrdersDone(msgspec.Struct, frozen=True, tag="orders_done", kw_only=True):
    """The results of some `TierOrder`s on one rank, and its other news of the store."""

    done: list[int]
    failed: list[int]  # not in the store, not what it should be, or the store does not work
    late: list[int] = []  # a step could not wait for them; what the store has may be good
    use: StoreUse = NO_STORE_USE


class EntryCall(msgspec.Struct, frozen=True, tag="entry_call", kw_only=True, omit_defaults=True):
    """A call of the core to the catalogue in the store that a host has to itself (`kvstore.catalogue`).

    It is not a plan, and changes no step. One rank of that host carries it out; `count` and `empty` are
    answered by `EntryAnswers`.

    Attributes:
        what: `count` how many of the first of these blocks are there, `enter` or `strike` them, or `empty`
            the store of all blocks of the model.
        share: layers that the ranks of that host have, as `kvstore.layer_share` encodes them.
    """

    number: int  # that the answer bears
    what: Literal["count", "enter", "strike", "empty"]
    names: list[bytes] = []
    share: bytes = b""


class EntryAnswers(msgspec.Struct, frozen=True, tag="entry_answers", kw_only=True, omit_defaults=True):
    """The answers to some `EntryCall`s, by their numbers."""

    counts: dict[int, int] = {}
    emptied: dict[int, ErrorInfo | None] = {}  # with the reason why something may be left


class GrammarsBuilt(msgspec.Struct, frozen=True, tag="grammars", kw_only=True):
    """The outcome of building grammars of new rows on one rank of the last stage.

    Each is told once, though it was dropped meanwhile.
    """

    built: list[int]
    failed: dict[int, str]  # by number: why
    unable: dict[int, str] = {}  # the same, where the rank is the reason and the grammar may be good


class BuiltGrammar(msgspec.Struct, frozen=True):
    """The outcome of building a grammar on all ranks of the last stage.

    Attributes:
        why: one of them cannot build it; empty: all have.
        may_be_good: the reason is the state of the ranks, so that a later request for it may succeed.
    """

    number: int
    why: str = ""
    may_be_good: bool = False


class RankFailed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """The rank is about to exit; `error` is the first cause that it knows of."""

    stage: int
    error: ErrorInfo


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the stage loop after the plans that came before."""


CoreToRank = ScheduledBatch | EntryCall | AllocateKV | Shutdown
RankToCore = (
    StepResult
    | StageTimes
    | StageSpans
    | OrdersDone
    | EntryAnswers
    | GrammarsBuilt
    | RankLoaded
    | RankReady
    | RankFailed
)

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[CoreToRank] = msgspec.msgpack.Decoder(CoreToRank)
_to_core: msgspec.msgpack.Decoder[RankToCore] = msgspec.msgpack.Decoder(RankToCore)
_tokens = msgspec.msgpack.Decoder(SampledTokens)
_counts = msgspec.msgpack.Decoder(SampledCounts)


def encode(message: CoreToRank | RankToCore | SampledTokens | SampledCounts) -> bytes:
    return _encoder.encode(message)


def decode_to_rank(frame: bytes) -> CoreToRank:
    """Return a message; `ProtocolError` for other bytes, as from all `decode_...`."""
    return _decode(_to_rank, frame, "from the core")


def decode_to_core(frame: bytes) -> RankToCore:
    return _decode(_to_core, frame, "from a stage")


def decode_sampled_tokens(frame: bytes) -> SampledTokens:
    return _decode(_tokens, frame, "with samples")


def decode_sampled_counts(frame: bytes) -> SampledCounts:
    return _decode(_counts, frame, "with counts of samples")


def _decode(decoder: msgspec.msgpack.Decoder[Message], frame: bytes, which: str) -> Message:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a message {which} cannot be read: {error}.") from error


def seal(plan: ScheduledBatch, before: int = 0) -> ScheduledBatch:
    """Return the plan with its digest filled in (`pipeline.decision_log`)."""
    return msgspec.structs.replace(plan, digest=plan_digest(plan, before))


def plan_digest(plan: ScheduledBatch, before: int = 0) -> int:
    """Return the crc32 of the plan's encoding with digest 0, carried on from the digest `before`."""
    bare = plan if plan.digest == 0 else msgspec.structs.replace(plan, digest=0)
    return zlib.crc32(_encoder.encode(bare), before)
