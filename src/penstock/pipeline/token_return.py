"""Token return: what the last stage sampled goes back to every earlier stage, on a path of its own.

An earlier stage needs the ids (the first stage embeds them), how many there were and how many drafts were
rejected (every stage computes positions). It does not wait for them when the step leaves, but when a plan
says that it consumes them. In a full pipe of P stages that is P steps later:

    stage 0   | 0 | 1 | 2 | 3 |          plan 2 consumes the samples of step 0 (P = 2)
    stage 1       | 0 | 1 | 2 |
    samples           ^0  ^1  ^2

`TokenSender` is used by the last stage's sink, `TokenReceiver` by every other stage's (`pipeline.ports`).
Both know from the plan's need-sampled mask whether there is a message at all (row E4). Rows carry a
generation: a token for a row that was freed, or freed and given to another request, is dropped (rows E2, E7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.batch import SampledTokens, ScheduledBatch, StepResult, decode_sampled_tokens, encode
from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError, concerned
from penstock.pipeline.links.channel import MessageChannel, send_of_step
from penstock.runner.request_rows import RequestRows, RowSnapshot


class TokenSender:
    """The last stage's end: the same message to every earlier stage."""

    def __init__(self, channels: Sequence[MessageChannel]) -> None:
        self._channels = list(channels)

    def send_samples(self, plan: ScheduledBatch, result: StepResult) -> None:
        """Send the samples of a step; nothing at all if the plan samples no row."""
        if not any(plan.need_sampled):
            return
        frame = encode(
            SampledTokens(
                step_id=plan.step_id,
                epoch=plan.epoch,
                digest=plan.digest,
                token_ids=result.token_ids,
                num_rejected=result.num_rejected,
            )
        )
        for channel in self._channels:
            send_of_step(channel, frame, "the samples", plan.step_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReturn:
    """Samples that will come: of which step, for which rows as they were then (row E2)."""

    step_id: int
    epoch: int
    digest: int
    rows: RowSnapshot


class TokenReceiver:
    """An earlier stage's end: a queue of the steps whose samples have not been consumed yet.

    Args:
        channel: from the last stage.
        rows: the row table that the samples go to.
        name: of this path, for messages, such as "stage 1 -> stage 0".
        timeout_s: deadline of every wait.
    """

    def __init__(self, channel: MessageChannel, rows: RequestRows, *, name: str, timeout_s: float) -> None:
        self._channel = channel
        self._rows = rows
        self._name = name
        self._timeout_s = timeout_s
        self._pending: deque[PendingReturn] = deque()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def expect_samples(self, plan: ScheduledBatch, sampled: RowSnapshot) -> None:
        """Remember that samples of these rows will come, unless the plan samples none."""
        if any(plan.need_sampled):
            self._pending.append(
                PendingReturn(step_id=plan.step_id, epoch=plan.epoch, digest=plan.digest, rows=sampled)
            )

    def consume_samples(self, through_step: int) -> None:
        """Write the samples of all pending steps up to `through_step` to the rows, in order of the steps.

        Raises:
            WaitTimeoutError: they did not come in time.
            ProtocolError: another message came.
            LinkClosedError: the last stage has gone.
        """
        while self._pending and self._pending[0].step_id <= through_step:
            pending = self._pending.popleft()
            tokens = self._receive(pending)
            self._rows.post_update(pending.step_id, pending.rows, tokens.token_ids, tokens.num_rejected)

    def _receive(self, pending: PendingReturn) -> SampledTokens:
        tokens = self._read(pending)
        expected = (pending.epoch, pending.step_id, pending.digest, len(pending.rows))
        actual = (tokens.epoch, tokens.step_id, tokens.digest, len(tokens.token_ids))
        if actual != expected:
            raise ProtocolError(
                f"token return {self._name}: expected (epoch, step, digest, rows) {expected}, found {actual}."
                f"{concerned(pending.rows.request_ids)}"
            )
        return tokens

    def _read(self, pending: PendingReturn) -> SampledTokens:
        what = f"the samples of step {pending.step_id}"
        try:
            if (frame := self._channel.recv(self._timeout_s)) is not None:
                return decode_sampled_tokens(frame)
        except LinkClosedError as error:
            raise LinkClosedError(f"token return {self._name} was closed before {what}.") from error
        except ProtocolError as error:
            names = concerned(pending.rows.request_ids)
            raise ProtocolError(
                f"token return {self._name}, where {what} were due: {error.message}{names}"
            ) from error
        raise WaitTimeoutError(
            f"token return {self._name}: waited {self._timeout_s:g} s for {what}, and they did not come."
        )
