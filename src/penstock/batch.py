"""The plan, its parts, and all other messages between the engine core and the ranks or from rank to rank.

A `ScheduledBatch` is one micro-batch for one trip through the pipe. The core encodes it once and sends the
same bytes to every rank; a rank decides nothing, and asks no other rank for shapes. The last stage answers
with a `StepResult`. It also sends `SampledTokens` to the first stage, and `SampledCounts` to the stages
between (`pipeline.token_return`).

Rows: a *row* is the index of a request in every rank's row table, the same on all ranks. A freed row may be
used again; its *generation* then grows by one, so that late tokens of the former request are recognised.
Lists marked `[num_rows]` have the order of `ScheduledBatch.rows`. No torch here.
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

MADE_UP = "calibration-"  # ids of the core's own requests, which measure the stages, begin with this
NO_GRAMMAR = -1
KNOWN = -1  # token_from: the row's input ids are in the row table already (prompt, or a resumed request)
ALL_BLOCKS = b""  # given_up, in place of a name: all blocks in host memory, and none of them is stored
GUESSED = -2  # token_from: the row's input id is the first of its drafts, and not sampled yet


class LogitChanges(msgspec.Struct, frozen=True, array_like=True):
    """A request's changes to its logits before a token is chosen; `sample.logit_changes` has the formula."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: dict[int, float] = {}  # token id -> what is added to its logit
    allowed_ids: list[int] | None = None  # None: all
    # Sequences of ids: the last id of one is forbidden while the newest generated ids are its other ids.
    bad_words: list[list[int]] = []


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
    num_prompt_logprobs: int = -1  # likeliest ids to report for each scored prompt token; -1: none is scored
    structured: StructuredOutputs | None = None  # the texts that may be sampled; they were checked before


GREEDY = RowSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_tokens=0, suppressed_ids=[], num_logprobs=-1
)


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A request that gets a row in the table of every rank: at its start, or again after a preemption."""

    row: int
    generation: int
    request_id: str
    prompt_len: int  # of the original prompt: sampling positions count from here
    token_ids: list[int]  # all known tokens: prompt, then what was generated before a preemption
    sampling: RowSampling
    pooling: Pooling | None = None  # how the last stage pools its prompt; None: the row is sampled instead
    # The number of the grammar that `sampling.structured` describes. The last stage compiles it, unless it
    # has it already, and reports the outcome (`GrammarsBuilt`). No plan samples the row before that report.
    grammar: int = NO_GRAMMAR
    # Set if the plan computes no token of the row: its blocks, and the position at which a later plan begins.
    blocks: list[int] = []
    start: int = 0


class ScoredTokens(msgspec.Struct, frozen=True, array_like=True):
    """The prompt tokens of a row whose log-probabilities are wanted: each given the tokens before it.

    Each of them follows a token that the plan computes. So the first may be the second token of the row's
    chunk, and the last may be the token behind the chunk, which is in the row table already.
    """

    place: int  # index of the row in `ScheduledBatch.rows`
    first: int  # position of the first scored token, >= 1: a prompt's first token has no score
    count: int  # of scored tokens, >= 1


class RewoundRow(msgspec.Struct, frozen=True, array_like=True):
    """A row that goes back to its newest sampled token, because a guess about what follows was wrong.

    Windows that rest on the guess are still in the stages. If a rank has not consumed the samples of an
    earlier step, it drops what they say of this row.
    """

    row: int
    step: int  # the step that has sampled its newest token
    num_tokens: int  # known tokens; all but the newest have their keys and values
    newest_ids: list[TokenId]  # the last known tokens, at least all that the first stage may not have yet


class TierOrder(msgspec.Struct, frozen=True, array_like=True):
    """An order to copy a block between the KV cache and the store; each rank copies its own layers and heads.

    Ranks carry it out beside the steps that follow, and answer with `OrdersDone`. Until all ranks have
    answered, the core does not give the block to another request.
    """

    order: int  # its number
    is_load: bool  # True: from the store to the cache; False: from the cache to the store
    block: int
    name: bytes  # the hash of the content that the block has, or is to get


class LinkOrder(msgspec.Struct, frozen=True, array_like=True):
    """An order to replace the link between two ranks: from a given step on, frames cross a new link.

    The two ranks are handed their ends of the new link beside the plans (`process.control.AttachLink`). Other
    ranks ignore the order.
    """

    number: int  # of the new link, within the epoch
    first_step: int  # the first step whose frame crosses the new link
    stage: int  # of the sender; the receiver is in the next stage
    sender: int  # number of the sending rank in its stage
    receiver: int  # number of the receiving rank in the next stage


class PlanMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The notes on a plan for measurements: they change nothing of what its step computes.

    Attributes:
        starved: the plan comes late because no request could run.
        held: it comes late because the pipe was full, and a result had to come first. If neither is set,
            ranks waited for the core itself, or the least time between two plans was not over.
        wants_times: ranks send `StageTimes` and `StageSpans` after this step, even if none is due.
    """

    starved: bool = False
    held: bool = False
    wants_times: bool = False


NO_META = PlanMeta()


class ScheduledBatch(msgspec.Struct, frozen=True, tag="plan", kw_only=True, omit_defaults=True):
    """One plan. An empty plan (no rows) is legal: it is the health probe and crosses every stage.

    A rank applies its fields in this order:

    1. hand `orders` to the thread that copies blocks, and `given_up` before them
    2. `freed_rows`, then `new_rows` with their blocks, then `rewound`
    3. append `new_blocks`
    4. consume the token returns of all steps up to `consume_through`
    5. compute the step
    """

    step_id: int  # 0, 1, 2, ... without gaps; a new epoch counts on
    epoch: int = 0
    rows: list[int] = []  # [num_rows]
    num_tokens: list[int] = []  # [num_rows] tokens of the row in this step, >= 1
    # [num_rows] position of the row's first token in this step, if all drafts before it are accepted
    start_positions: list[int] = []
    new_blocks: list[list[int]] = []  # [num_rows] block ids to append to the row's block table
    need_sampled: list[bool] = []  # [num_rows] True where this step's last token yields a sampled id
    # [num_rows] step whose sampled id this row consumes as input, or KNOWN, or GUESSED
    token_from: list[int] = []
    # Index in `rows` -> drafts: guessed ids behind the token that the row consumes. If that token is a guess
    # too (`GUESSED`), it is the first of these ids. Drafts are the row's last tokens in the step, and the
    # last stage samples behind each of the row's tokens: such a row is a window (`sample.windows`).
    drafts: dict[int, list[TokenId]] = {}
    # Index in `rows` -> how many tokens the MTP layer guesses behind the row's newest sample. The layer reads
    # the tokens of these rows alone.
    mtp: dict[int, int] = {}
    pooled: list[int] = []  # rows whose prompt ends with this step: their vector is due; in plan order
    consume_through: int = -1  # stages before the last wait for the token returns of all steps up to this one
    freed_rows: list[int] = []
    new_rows: list[NewRow] = []
    rewound: list[RewoundRow] = []
    dropped_grammars: list[int] = []  # numbers that no row will have any more; dropped before rows enter
    # Names of blocks that every rank removes from host memory, before the orders; `ALL_BLOCKS` is no name.
    given_up: list[bytes] = []
    orders: list[TierOrder] = []  # a rank begins them once it has run all steps before this one
    # Numbers of load orders for blocks that this step reads. A rank waits with each layer until these orders
    # have loaded it or have failed. The core keeps the result back until all ranks have answered the orders,
    # and drops it if one of them has failed.
    awaited: list[int] = []
    scored: list[ScoredTokens] = []  # prompt tokens that the last stage scores; at most one entry for a row
    links: list[LinkOrder] = []  # each takes effect at its own `first_step`, this step or a later one
    meta: PlanMeta = NO_META
    # The digest of the core's residency table after this plan (`penstock.residency`); 0: it has none.
    residency: int = 0
    digest: int = 0  # of all plans of the epoch up to this one; all messages of the step carry it

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens: those of rows that have several tokens, and no drafts.

        A chunk of a single token is not counted, since it looks like a decode.
        """
        if len(self.rows) == self.total_tokens:
            return 0
        counts = enumerate(self.num_tokens)
        return sum(count for index, count in counts if count > 1 and index not in self.drafts)

    @property
    def num_samples(self) -> int:
        """The number of positions that are sampled: one for each sampled row, or as many as a window has."""
        return sum(self.window_sizes)

    @property
    def window_sizes(self) -> list[int]:
        """The number of positions that are sampled in each sampled row, in plan order."""
        return window_sizes(self.need_sampled, self.num_tokens, self.drafts)

    def compared_drafts(self, index: int) -> list[int]:
        """Return the drafts of a row that are compared with its samples: all but one that is its input.

        Args:
            index: of the row in `rows`.
        """
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
    # The accepted drafts and the id sampled behind them; without speculation one id. [-1]: sampling failed;
    # []: the row is a window that rests on a wrong guess, and is void.
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

    The lists `token_ids`, `num_rejected` and `logprobs` run over the plan's sampled rows, in plan order.
    `scores` runs over the plan's `scored`, and `pooled` over the plan's `pooled`.
    """

    step_id: int
    epoch: int = 0
    digest: int = 0  # of the plan, and so of all plans that the last stage has applied
    token_ids: list[list[TokenId]] = []  # as in `SampledTokens`
    num_rejected: list[int] = []  # as in `SampledTokens`
    logprobs: list[list[TokenLogprobs] | None] = []  # of each id; None: not asked for, or there is no id
    failed: list[int] = []  # indices into the lists above where nothing could be sampled
    # For those of `failed` whose constraints allowed no id: why. The logits of all others were not finite.
    unmet: dict[int, str] = {}
    guesses: dict[int, list[TokenId]] = {}  # index into `token_ids` -> what the MTP layer guesses behind it
    scores: list[list[TokenLogprobs]] = []  # one for each scored token; empty if a logit was NaN or infinite
    pooled: list[bytes] = []  # each vector, float32 [hidden_size]; empty if a number in it was not finite
    # Why a stage has not computed the step, or not its scores or guesses. All requests of the step end with
    # this error, whatever the lists above have.
    error: ErrorInfo | None = None


class RankLoaded(msgspec.Struct, frozen=True, tag="loaded", kw_only=True):
    """The report of a rank that has loaded its weights: what it can hold, and what it computes with."""

    stage: Small
    tp_rank: Small = 0
    max_blocks: Count  # KV blocks that its memory can hold
    block_bytes: Count  # of one block over this rank's layers
    tensor_bytes: Count  # of its own weights, as it holds them in memory
    bytes_read: Count  # from checkpoint files, tensor data only
    load_seconds: Seconds
    is_invariant: bool  # a result has the same bits, whatever is computed together with it
    kernels: Sentence = ""  # which kernels run, or why none do
    numeric_class: Sentence = ""  # ranks of one class compute the same bits (`rank.compute_choice`)
    end_layer: LayerNumber = 0  # the layer behind the rank's last one
    store_host: Word = ""  # as in `process.config.StoreConfig`
    peak_bytes: Count = 0  # measured for its largest plan, beside weights and KV cache; 0: not measured
    margin_bytes: Count = 0  # left free beside weights, KV cache and `peak_bytes`


class AllocateKV(msgspec.Struct, frozen=True, tag="allocate", kw_only=True):
    """The core's answer once all ranks have loaded: how many KV blocks every rank allocates [D9].

    That is the minimum over all ranks. Plans then begin at `first_step` of `epoch`. A rank that has a KV
    cache of an earlier epoch keeps the memory, and refuses another number of blocks.
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

    A rank sends it after the first step that ends a second or more after its last report, or sooner if a plan
    asks for it (`PlanMeta.wants_times`).
    """

    stage: int
    num_steps: Count  # steps with tokens; a probe has none
    wall_ns: Nanoseconds
    busy_ns: Nanoseconds  # in forward and sampling: CPU time of the thread, or time of the GPU
    phase_ns: list[Nanoseconds]  # by `trace.phases.Phase`; their sum is `wall_ns`
    busy_ratio: float  # the busy share of the time since its last report
    exchange_ns: int = 0  # time since its start in sums and gathers with the other ranks of the stage
    exchange_wait_ns: int = 0  # the part of `exchange_ns` spent waiting for those ranks
    replica: int = 0
    free_bytes: Count | None = None  # of its host's memory; None: on a GPU, or where the host does not say


SpansKey = tuple[int, int, int]


class StageSpans(msgspec.Struct, frozen=True, tag="spans", kw_only=True):
    """The timed spans of a rank's work since its last report, without gaps; each has one phase."""

    stage: int
    began_ns: Nanoseconds  # by the monotonic clock of the rank's host
    shift_ns: int = 0  # what must be added to `began_ns` for the head's clock; the core fills it in
    phases: bytes  # [num_spans] `trace.phases.Phase`
    durations_ns: list[Nanoseconds]  # [num_spans]
    steps: list[tuple[int, Count, Count]]  # index of the step's first span, step id, tokens
    prompt_tokens: dict[int, Count] = {}  # by step id: tokens of prompts, of steps that have some
    tp_rank: int = 0
    replica: int = 0

    @property
    def key(self) -> SpansKey:
        """The key by which a core tells this report from all others: stage, rank, and when it begins."""
        return self.stage, self.tp_rank, self.began_ns

    @property
    def start_ns(self) -> int:
        """The time at which the first span began, by the head's clock as well as the core knows it."""
        return self.began_ns + self.shift_ns


class StoreUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The use of the store of KV blocks: what a rank has done there since its last report.

    A store may have a host tier in front of it: the newest payloads, kept in the memory of the host.
    """

    bytes_read: int = 0  # of payloads that passed the check
    bytes_written: int = 0
    records_read: int = 0  # parts of blocks that were there and passed the check
    verify_failures: int = 0  # records that were not what their keys say
    call_failures: int = 0  # calls of the store that failed, or that it answered in part
    host_bytes_read: int = 0  # of payloads that the host tier had, so that the store was not asked for them
    host_records_read: int = 0  # how many payloads these were
    host_bytes_written: int = 0  # of payloads put into the host tier: computed here, or got from the store
    host_bytes_used: int = 0  # by how much the memory in use by the host tier has grown, or shrunk if below 0
    switched_off: int = 0  # 1: the store failed too often, and is not used from now on; -1: it is used again
    failure: str = ""  # why the last call that failed has failed; empty: none has

    def plus(self, other: StoreUse) -> StoreUse:
        """Return the sum of this and another use, which was reported after this one."""
        if other is NO_STORE_USE:
            return self
        return self._combined(other, operator.add, other.failure or self.failure)

    def since(self, earlier: StoreUse) -> StoreUse:
        """Return the use between `earlier`, a former state of the same counters, and this state."""
        is_new = self.call_failures > earlier.call_failures
        return self._combined(earlier, operator.sub, self.failure if is_new else "")

    def _combined(self, other: StoreUse, combine: Callable[[int, int], int], failure: str) -> StoreUse:
        names = (name for name in self.__struct_fields__ if name != "failure")
        numbers: dict[str, Any] = {name: combine(getattr(self, name), getattr(other, name)) for name in names}
        return StoreUse(**numbers, failure=failure)


NO_STORE_USE = StoreUse()


OrderStatus = Literal[
    "done",
    "late",  # a step could not wait for the block any longer; the record in the store may be good
    "failed",  # the record is missing or damaged, or the store does not work
]


class OrderResult(NamedTuple):
    """The result of a `TierOrder`, on one rank or on all of them."""

    order: int  # its number
    status: OrderStatus


class OrdersDone(msgspec.Struct, frozen=True, tag="orders_done", kw_only=True):
    """The results of some `TierOrder`s on one rank, by their numbers, and its use of the store meanwhile."""

    # What each list means is said at `OrderStatus`.
    done: list[int]
    failed: list[int]
    late: list[int] = []
    use: StoreUse = NO_STORE_USE


class EntryCall(msgspec.Struct, frozen=True, tag="entry_call", kw_only=True, omit_defaults=True):
    """A call of the core to the catalogue in the store that a host has to itself (`kvstore.catalogue`).

    It is not a plan, and changes no step. One rank of that host carries it out. Calls to `count` and `empty`
    are answered by `EntryAnswers`; the others have no answer.

    Attributes:
        what: `count`: how many blocks, from the first of `names` on without a gap, are in the catalogue;
            `enter`: add these blocks to it; `strike`: remove them from it; `empty`: delete all blocks of the
            model from the store.
        share: layers that the ranks of that host have, as `kvstore.layer_share` encodes them.
    """

    number: int  # the answer has the same number
    what: Literal["count", "enter", "strike", "empty"]
    names: list[bytes] = []
    share: bytes = b""


class EntryAnswers(msgspec.Struct, frozen=True, tag="entry_answers", kw_only=True, omit_defaults=True):
    """The answers to some `EntryCall`s, by the numbers of the calls."""

    counts: dict[int, int] = {}
    emptied: dict[int, ErrorInfo | None] = {}  # the error if something may be left; None: all is deleted


class GrammarsBuilt(msgspec.Struct, frozen=True, tag="grammars", kw_only=True):
    """The outcome of compiling grammars of new rows on one rank of the last stage.

    Each grammar is reported once, even if a plan has dropped it meanwhile.
    """

    built: list[int]  # numbers of grammars
    failed: dict[int, str]  # number -> why the grammar cannot be compiled
    unable: dict[int, str] = {}  # number -> why this rank has not compiled it, though the grammar may be good


class BuiltGrammar(msgspec.Struct, frozen=True):
    """The outcome of compiling a grammar on one rank of the last stage, or on all of them.

    Attributes:
        why: why a rank cannot compile it; empty: it is compiled.
        may_be_good: the reason is the state of a rank, so that a later request with this grammar may succeed.
    """

    number: int
    why: str = ""
    may_be_good: bool = False


class RankFailed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """The report of a rank that leaves the epoch, or ends; `error` is the first cause that the rank knows."""

    stage: int
    error: ErrorInfo


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """The core's order to leave the stage loop after the plans that came before it."""


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
    """Return the message to a rank that these bytes encode. Raises `ProtocolError` for any other bytes."""
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
