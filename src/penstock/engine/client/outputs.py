"""Turns token updates into text: one `OutputAssembler` per sequence, and the results that `LLM` returns.

The core ends a request at stop ids and lengths. Stop *strings* need text and are found here. The assembler
cuts the text at the stop string, and counts the tokens up to the one that completed the string. The caller
then aborts the request in the core. Tokens that were already under way are dropped.

Used by `engine.client.streams`, `engine.client.async_engine` and `llm`; the HTTP server uses its `TextDelta`.
Does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from penstock.request import FinishReason, RequestUpdate, SamplingParams, TokenLogprobs
from penstock.tokenizer.detokenizer import Detokenizer, NoText
from penstock.tokenizer.stop_strings import NoStops, stop_scanner
from penstock.tokenizer.tokenizer import Tokenizer

StopReason = int | str | None


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """The output of a request since the previous delta.

    Attributes:
        text: characters to append. It may be empty although tokens came: text is held back while it may
            become a stop string, or while a character is not finished.
        token_ids: tokens that came.
        logprobs: one entry per token id; None if the request does not ask for them.
        finish_reason: why the sequence has ended, on the last delta; None before.
        stop_reason: the stop string or stop id that ended the request; None for an end-of-sequence id.
        prompt_logprobs: entries of the next prompt tokens. The first prompt token has none. All of them come
            before the first output.
        vector: float32 bytes of the finished vector of a pooled request (`engine.client.vectors`); else
            empty.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    prompt_logprobs: list[TokenLogprobs] = []
    vector: bytes = b""


def merge_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """Return consecutive deltas of one request, merged into one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    has_logprobs = any(delta.logprobs is not None for delta in deltas)
    return TextDelta(
        "".join([delta.text for delta in deltas]),
        [token_id for delta in deltas for token_id in delta.token_ids],
        [entry for delta in deltas for entry in delta.logprobs or []] if has_logprobs else None,
        last.finish_reason,
        last.stop_reason,
        [entry for delta in deltas for entry in delta.prompt_logprobs],
        last.vector,
    )


MAX_NUMBERS_AT_ONCE = 4096  # ids and log-probabilities that a reader gets at once: about 6 ms to write


def num_at_once(deltas: Sequence[TextDelta]) -> int:
    """Return how many deltas, from the first on, a reader gets at once, so that writing them is soon done.

    Together they have at most `MAX_NUMBERS_AT_ONCE` token ids and log-probabilities; but there is always one.
    """
    if len(deltas) == 1:
        return 1
    num_numbers = 0
    for index, delta in enumerate(deltas):
        num_numbers += _num_numbers(delta)
        if num_numbers > MAX_NUMBERS_AT_ONCE:
            return max(index, 1)
    return len(deltas)


def small_deltas(delta: TextDelta) -> list[TextDelta]:
    """Return a delta, cut into several if it has more prompt log-probabilities than a reader gets at once."""
    scores = delta.prompt_logprobs
    if not scores or _num_numbers(delta) <= MAX_NUMBERS_AT_ONCE:
        return [delta]
    most = max(MAX_NUMBERS_AT_ONCE // (1 + len(scores[0].top_ids)), 1)
    parts = [scores[begin : begin + most] for begin in range(0, len(scores), most)]
    before = [TextDelta("", [], prompt_logprobs=part) for part in parts[:-1]]
    return [*before, msgspec.structs.replace(delta, prompt_logprobs=parts[-1])]


def _num_numbers(delta: TextDelta) -> int:
    """Return how many ids and log-probabilities a delta has."""
    lists = [delta.logprobs or [], delta.prompt_logprobs]
    return len(delta.token_ids) + sum(len(one) * (1 + len(one[0].top_ids)) for one in lists if one)


class Assembler(Protocol):
    """Turns the core's updates of one sequence into output for the client.

    The output is text (`OutputAssembler`) or a vector (`engine.client.vectors`).
    """

    @property
    def num_tokens(self) -> int:
        """The number of tokens generated so far; those after a stop string do not count."""
        ...

    def append(self, update: RequestUpdate) -> TextDelta:
        """Take an update of the core that is not an error, and return its output as a delta."""
        ...


class OutputAssembler:
    """Makes the text of one sequence from its tokens, and ends it at a stop string.

    Args:
        sampling: has the stop strings, `min_tokens`, and what to show. In the text of the first `min_tokens`
            tokens no stop string is looked for.
        detokenizer: turns this sequence's tokens into text, from the end of the prompt on.
    """

    def __init__(self, sampling: SamplingParams, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._include_stop = sampling.include_stop_str_in_output
        self._own_stop_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._scanner = stop_scanner(sampling.stop_strings, include_stop=self._include_stop)
        self._by_token = not isinstance(self._scanner, NoStops)
        self.num_tokens = 0  # generated so far, up to the stop string

    def append(self, update: RequestUpdate) -> TextDelta:
        """Take an update of the core that is not an error, and return its text and tokens as a delta.

        A delta that ends at a stop string is the last one; the caller then aborts the request in the core,
        which does not know of stop strings.
        """
        if update.prompt_logprobs:
            return TextDelta("", [], prompt_logprobs=update.prompt_logprobs)
        shown = self._shown_ids(update)
        if self._by_token:
            text, stop, used = self._scan(shown)
        else:
            text, stop, used = self._detokenizer.feed(shown), "", len(shown)
        if stop:
            return self._stopped(update, text, stop, used)
        if update.finish_reason is not None:
            return self._finished(update, text)
        self.num_tokens += len(update.token_ids)
        return TextDelta(text, update.token_ids, update.logprobs)

    def _shown_ids(self, update: RequestUpdate) -> list[int]:
        """Return the ids whose text is shown; a stop id that ended the request is shown only if requested."""
        if update.stop_token_id is None or self._include_stop:
            return update.token_ids
        return update.token_ids[:-1]

    def _scan(self, token_ids: list[int]) -> tuple[str, str, int]:
        """Feed ids one by one; return the text to show, the stop string or "", and how many ids were read."""
        shown = ""
        for index, token_id in enumerate(token_ids):
            text = self._detokenizer.feed((token_id,))
            if self.num_tokens + index < self._min_tokens:
                shown += text
                continue
            scan = self._scanner.feed(text)
            shown += scan.text
            if scan.stop:
                return shown, scan.stop, index + 1
        return shown, "", len(token_ids)

    def _stopped(self, update: RequestUpdate, text: str, stop: str, used: int) -> TextDelta:
        self.num_tokens += used
        logprobs = update.logprobs[:used] if update.logprobs is not None else None
        return TextDelta(text, update.token_ids[:used], logprobs, "stop", stop)

    def _finished(self, update: RequestUpdate, text: str) -> TextDelta:
        reason, stop_reason = update.finish_reason, self._stop_reason(update)
        self.num_tokens += len(update.token_ids)
        scan = self._scanner.feed(self._detokenizer.finish())
        text += scan.text
        if scan.stop:
            reason, stop_reason = "stop", scan.stop
        else:
            text += self._scanner.finish()
        return TextDelta(text, update.token_ids, update.logprobs, reason, stop_reason)

    def _stop_reason(self, update: RequestUpdate) -> StopReason:
        return update.stop_token_id if update.stop_token_id in self._own_stop_ids else None


def output_assembler(
    tokenizer: Tokenizer, prompt_token_ids: list[int], sampling: SamplingParams
) -> OutputAssembler:
    """Return the assembler for the text behind this prompt; it makes no text if `detokenize` is False."""
    detokenizer: Detokenizer = NoText()
    if sampling.detokenize:
        detokenizer = tokenizer.detokenizer(
            prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            shown=sampling.shown_special_tokens,
        )
    return OutputAssembler(sampling, detokenizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """The log-probability of one token at one position (fields as in vLLM).

    Attributes:
        rank: 1 for the likeliest token there.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """A generated sequence (fields as in vLLM).

    Attributes:
        index: number of this sequence among those of its prompt.
        token_ids: generated ids, with the id that ended the request.
        logprobs: for each token, log-probabilities by token id: of the chosen token and of the likeliest.
        cumulative_logprob: sum of the log-probabilities of the chosen tokens.
        finish_reason: "stop" or "length"; None if the sequence has not ended yet.
        stop_reason: the stop string or stop id that ended the sequence; None for an end-of-sequence id or a
            length.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class DraftCounts(NamedTuple):
    """The numbers of accepted and rejected tokens that were guessed ahead for a request (OpenAI's names)."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    def plus(self, accepted: int, rejected: int) -> DraftCounts:
        """Return new counts: these, with further accepted and rejected guesses added."""
        if not accepted and not rejected:
            return self
        return DraftCounts(
            self.accepted_prediction_tokens + accepted, self.rejected_prediction_tokens + rejected
        )


NO_DRAFTS = DraftCounts()


def total_drafts(counts: Iterable[DraftCounts]) -> DraftCounts:
    """Return the sums of the counts of several sequences."""
    total = NO_DRAFTS
    for count in counts:
        total = total.plus(*count)
    return total


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The result of one prompt (fields as in vLLM).

    Attributes:
        prompt: text of the prompt; None if the prompt was given as token ids.
        outputs: the sequences that were generated for it.
        num_cached_tokens: prompt tokens whose KV was found in the cache.
        metrics: how many guessed tokens (drafts) were accepted and rejected.
        prompt_logprobs: for each token of the prompt, log-probabilities by token id. The entry of the first
            token is None, since nothing precedes it. The whole list is None if it was not requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: DraftCounts = NO_DRAFTS
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def completion_output(deltas: Sequence[TextDelta], tokenizer: Tokenizer, index: int = 0) -> CompletionOutput:
    """Return the generated sequence that all deltas of one sequence make up.

    Args:
        index: number of the sequence among those of its prompt.
    """
    whole = merge_deltas(deltas)
    logprobs, cumulative = None, None
    if whole.logprobs is not None:
        pairs = zip(whole.token_ids, whole.logprobs, strict=True)
        logprobs = [position_logprobs(token_id, entry, tokenizer) for token_id, entry in pairs]
        cumulative = sum(entry.logprob for entry in whole.logprobs)
    return CompletionOutput(
        index=index,
        text=whole.text,
        token_ids=whole.token_ids,
        logprobs=logprobs,
        cumulative_logprob=cumulative,
        finish_reason=whole.finish_reason,
        stop_reason=whole.stop_reason,
    )


def request_output(
    request_id: str,
    prompt: str | None,
    prompt_token_ids: list[int],
    sequences: Sequence[TextDelta],
    tokenizer: Tokenizer,
    *,
    scored: bool,
    num_cached_tokens: int,
    drafts: DraftCounts,
) -> RequestOutput:
    """Return the result of a prompt, as far as it has come.

    Args:
        sequences: for each sequence of the prompt, its output so far as one delta.
        scored: whether log-probabilities of the prompt are wanted. They are None as long as some are missing.
    """
    scores = sequences[0].prompt_logprobs
    is_complete = len(scores) == len(prompt_token_ids) - 1
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[completion_output([sequence], tokenizer, index) for index, sequence in enumerate(sequences)],
        finished=all(sequence.finish_reason is not None for sequence in sequences),
        num_cached_tokens=num_cached_tokens,
        metrics=drafts,
        prompt_logprobs=prompt_logprobs(prompt_token_ids, scores, tokenizer)
        if scored and is_complete
        else None,
    )


def prompt_logprobs(
    prompt_token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[dict[int, Logprob] | None]:
    """Return the log-probabilities of each token of a prompt, by token id; None for the first token.

    Args:
        entries: one for each token from the second on.
    """
    pairs = zip(prompt_token_ids[1:], entries, strict=True)
    return [None, *(position_logprobs(token_id, entry, tokenizer) for token_id, entry in pairs)]


def position_logprobs(token_id: int, entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Return the log-probabilities at one position by token id: the chosen token, then the likeliest."""
    logprobs = {token_id: _logprob(token_id, entry.logprob, entry.rank, tokenizer)}
    for index, (top_id, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True)):
        if top_id != token_id:
            logprobs[top_id] = _logprob(top_id, value, index + 1, tokenizer)
    return logprobs


def _logprob(token_id: int, value: float, rank: int, tokenizer: Tokenizer) -> Logprob:
    text = tokenizer.token_bytes(token_id).decode(errors="replace")
    return Logprob(logprob=value, rank=rank, decoded_token=text)
