"""Sends back what the last stage sampled: token ids to the first stage, and counts to those between.

The first stage embeds the sampled ids, so it gets them (`SampledTokens`). A middle stage needs samples only
to compute positions. It gets two counts for each row, of sampled ids and of rejected drafts
(`SampledCounts`). A stage waits for samples only when it prepares a plan that consumes them. In a full pipe
of P stages, plan n + P consumes the samples of step n:

    stage 0   | 0 | 1 | 2 | 3 |          plan 2 consumes the samples of step 0 (P = 2)
    stage 1       | 0 | 1 | 2 |
    samples           ^0  ^1  ^2

The last stage's sink has a `TokenSender`, and the sink of every earlier stage a `SampleReceiver`
(`pipeline.ports`). Both know from the plan's need-sampled mask whether there is a message at all [E4]. A row
has a generation number, which grows when it is given out again: a token for a row that was freed, or freed
and given to another request, is dropped [E2] [E7].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.batch import (
    GUESSED,
    SampledCounts,
    SampledTokens,
    ScheduledBatch,
    StepResult,
    decode_sampled_counts,
    decode_sampled_tokens,
    encode,
)
from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError, concerned
from penstock.pipeline.links.channel import MessageChannel, send_of_step
from penstock.runner.request_rows import RequestRows, RowSnapshot

MOST_IDS = 1 << 31


class TokenSender:
    """Sends the samples of each step from the last stage to all earlier stages.

    The core gets its result over another channel (`pipeline.ports.SampleSink`).

    Args:
        embedding: channels to the ranks of the first stage, which get the ids.
        others: channels to the ranks of the stages between. They get two counts for each row: of sampled ids,
            and of rejected drafts.
    """

    def __init__(self, embedding: Sequence[MessageChannel], others: Sequence[MessageChannel] = ()) -> None:
        self._embedding = list(embedding)
        self._others = list(others)

    def send_samples(self, plan: ScheduledBatch, result: StepResult) -> None:
        """Send the samples of a step to all earlier stages, unless the plan samples no row."""
        if not any(plan.need_sampled):
            return
        frame = encode(_tokens(plan, result))
        for channel in self._embedding:
            send_of_step(channel, frame, "the samples", plan.step_id)
        if self._others:
            frame = encode(_counts(plan, result))
        for channel in self._others:
            send_of_step(channel, frame, "the samples", plan.step_id)


def _tokens(plan: ScheduledBatch, result: StepResult) -> SampledTokens:
    return SampledTokens(
        step_id=plan.step_id,
        epoch=plan.epoch,
        digest=plan.digest,
        token_ids=result.token_ids,
        num_rejected=result.num_rejected,
    )


def _counts(plan: ScheduledBatch, result: StepResult) -> SampledCounts:
    return SampledCounts(
        step_id=plan.step_id,
        epoch=plan.epoch,
        digest=plan.digest,
        num_ids=[len(ids) - ids.count(-1) for ids in result.token_ids],  # -1: nothing could be sampled
        num_rejected=result.num_rejected,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReturn:
    """A step whose samples this stage has yet to consume, with its rows as they were in the step [E2]."""

    step_id: int
    epoch: int
    digest: int
    rows: RowSnapshot
    may_be_void: bool  # the step may rest on a wrong guess; if it does, it comes without ids


class SampleReceiver(ABC):
    """An earlier stage's end of the token return: a queue of the steps whose samples it has not consumed yet.

    Args:
        channel: channel from the last stage.
        rows: the row table that the samples go to.
        name: name of this path, for error messages, such as "stage 1 -> stage 0".
        timeout_s: the longest wait for the samples of a step.
    """

    def __init__(self, channel: MessageChannel, rows: RequestRows, *, name: str, timeout_s: float) -> None:
        self._channel = channel
        self._rows = rows
        self._name = name
        self._timeout_s = timeout_s
        self._pending: deque[PendingReturn] = deque()

    def expect_samples(self, plan: ScheduledBatch, sampled: RowSnapshot) -> None:
        """Remember that samples of these rows will come, unless the plan samples none.

        Args:
            sampled: the rows that the plan samples, with the requests that hold them now.
        """
        if any(plan.need_sampled):
            self._pending.append(
                PendingReturn(
                    step_id=plan.step_id,
                    epoch=plan.epoch,
                    digest=plan.digest,
                    rows=sampled,
                    may_be_void=GUESSED in plan.token_from,
                )
            )

    def consume_samples(self, through_step: int) -> None:
        """Write the samples of all pending steps up to `through_step` to the rows; wait until they have come.

        Raises:
            WaitTimeoutError: they did not come in time.
            ProtocolError: the message is of another step, or its content is invalid.
            LinkClosedError: the last stage has gone.
        """
        while self._pending and self._pending[0].step_id <= through_step:
            # Samples come in the order of the steps: the next message belongs to the oldest pending step.
            pending = self._pending.popleft()
            try:
                self._write(pending, self._receive(pending))
            except ProtocolError as error:
                raise ProtocolError(
                    f"token return {self._name}, due to deliver {_samples_of(pending)}: "
                    f"{error.message}{concerned(pending.rows.request_ids)}"
                ) from error

    @abstractmethod
    def _write(self, pending: PendingReturn, frame: bytes) -> None:
        """Write the samples of a message to the rows; raise `ProtocolError` if they are not those due."""

    def _receive(self, pending: PendingReturn) -> bytes:
        what = _samples_of(pending)
        try:
            if (frame := self._channel.recv(self._timeout_s)) is not None:
                return frame
        except LinkClosedError as error:
            raise LinkClosedError(f"token return {self._name} was closed before {what}.") from error
        raise WaitTimeoutError(f"token return {self._name}: waited {self._timeout_s:g} s for {what} in vain.")


class TokenReceiver(SampleReceiver):
    """The first stage's end of the token return: it receives sampled ids, to embed them in later steps.

    Args:
        vocab_size: size of the embedding's vocabulary; an id that is not below it is refused.
    """

    def __init__(
        self,
        channel: MessageChannel,
        rows: RequestRows,
        *,
        name: str,
        timeout_s: float,
        vocab_size: int = MOST_IDS,
    ) -> None:
        super().__init__(channel, rows, name=name, timeout_s=timeout_s)
        self._vocab_size = vocab_size

    def _write(self, pending: PendingReturn, frame: bytes) -> None:
        tokens = decode_sampled_tokens(frame)
        _check(pending, tokens, len(tokens.token_ids))
        is_whole = all(tokens.token_ids) or pending.may_be_void
        if not is_whole or any(max(ids) >= self._vocab_size for ids in tokens.token_ids if ids):
            raise ProtocolError(f"an id is missing or outside the vocabulary of {self._vocab_size}.")
        self._rows.post_update(pending.step_id, pending.rows, tokens.token_ids, tokens.num_rejected)


class CountReceiver(SampleReceiver):
    """A middle stage's end of the token return: it gets how many ids were sampled, and not the ids."""

    def _write(self, pending: PendingReturn, frame: bytes) -> None:
        counts = decode_sampled_counts(frame)
        _check(pending, counts, len(counts.num_ids))
        self._rows.post_counts(pending.step_id, pending.rows, counts.num_ids, counts.num_rejected)


def _check(pending: PendingReturn, samples: SampledTokens | SampledCounts, num_rows: int) -> None:
    """Raise `ProtocolError` unless the samples are those that are due."""
    expected = (pending.epoch, pending.step_id, pending.digest, len(pending.rows))
    actual = (samples.epoch, samples.step_id, samples.digest, num_rows)
    if actual != expected:
        raise ProtocolError(f"expected (epoch, step, digest, rows) {expected}, found {actual}.")
    if len(samples.num_rejected) != num_rows:
        raise ProtocolError(
            f"expected rejected drafts of {num_rows} rows, received {len(samples.num_rejected)}."
        )


def _samples_of(pending: PendingReturn) -> str:
    return f"the samples of step {pending.step_id}"
