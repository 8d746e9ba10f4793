"""The token return: E1, E2, E4, E5, E7."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from hand_core import Part, make_plan, new_row
from penstock.batch import GUESSED, KNOWN, ScheduledBatch, StepResult
from penstock.errors import LinkClosedError, ProtocolError, WaitTimeoutError
from penstock.pipeline.links.channel import SEND_TIMEOUT_S, MessageChannel
from penstock.pipeline.links.plan_channel import QueueChannel
from penstock.pipeline.token_return import CountReceiver, SampleReceiver, TokenReceiver, TokenSender
from penstock.runner.request_rows import KeptIds, NoIds, RequestRows


class CountingChannel:
    """Counts what passes through a channel's two directions."""

    def __init__(self, inner: MessageChannel) -> None:
        self.inner = inner
        self.num_sent = 0
        self.num_received = 0

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        self.num_sent += 1
        self.inner.send(frame, timeout_s)

    def recv(self, timeout_s: float | None) -> bytes | None:
        frame = self.inner.recv(timeout_s)
        self.num_received += frame is not None
        return frame

    def close(self) -> None:
        self.inner.close()


class Ends:
    """Both ends of a token return and the earlier stage's row table."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        last, early = QueueChannel.pair()
        self.last, self.early = CountingChannel(last), CountingChannel(early)
        self.rows = RequestRows(8, 64, 4, 3)
        self.sender = TokenSender([self.last])
        self.receiver = TokenReceiver(
            self.early, self.rows, name="stage 3 -> stage 0", timeout_s=timeout_s, vocab_size=1000
        )

    @property
    def num_pending(self) -> int:
        """How many steps the receiver has yet to consume the samples of."""
        return len(self.receiver._pending)

    def expect(self, plan: ScheduledBatch) -> None:
        self.rows.apply(plan)
        self.receiver.expect_samples(plan, self.rows.snapshot(plan.sampled_rows))

    def send(self, plan: ScheduledBatch, ids: Sequence[Sequence[int]], rejected: Sequence[int] = ()) -> None:
        result = StepResult(
            step_id=plan.step_id,
            token_ids=[list(i) for i in ids],
            num_rejected=list(rejected) or [0] * len(ids),
        )
        self.sender.send_samples(plan, result)


def entering(step_id: int, row: int, *, generation: int = 0) -> ScheduledBatch:
    return make_plan(
        step_id, [Part(row=row, start=0, blocks=[row])], new_rows=[new_row(row, [1], generation=generation)]
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_e1_in_a_full_pipe_step_t_is_consumed_at_t_plus_p(num_stages: int) -> None:
    ends = Ends()
    consumed_at: dict[int, int] = {}
    for step in range(4 * num_stages):
        row, token_from = step % num_stages, step - num_stages
        if token_from < 0:
            plan = entering(step, row)
        else:
            plan = make_plan(step, [Part(row=row, start=1 + token_from // num_stages, token_from=token_from)])
        before = ends.early.num_received
        ends.receiver.consume_samples(plan.consume_through)
        num_consumed = ends.early.num_received - before
        assert num_consumed == (0 if token_from < 0 else 1)  # the first P consume nothing
        if num_consumed:
            consumed_at[token_from] = step
            assert ends.rows.token_ids[row, ends.rows.total_len[row] - 1] == 10 + token_from
        ends.expect(plan)
        ends.send(plan, [[10 + step]])
        assert ends.num_pending <= num_stages
    assert all(consumer - producer == num_stages for producer, consumer in consumed_at.items())
    assert len(consumed_at) == 3 * num_stages


def test_e2_e7_a_late_token_does_not_reach_the_next_holder_of_a_row() -> None:
    ends = Ends()
    plan = make_plan(
        0,
        [
            Part(row=0, start=0, blocks=[0]),
            Part(row=1, start=0, blocks=[1]),
            Part(row=2, start=0, blocks=[2]),
        ],
        new_rows=[new_row(r, [1]) for r in range(3)],
    )
    ends.expect(plan)
    ends.send(plan, [[50], [51], [52]])
    following = make_plan(
        1,
        [Part(row=1, start=0, num_tokens=2, blocks=[3])],
        freed_rows=[0, 1],
        new_rows=[new_row(1, [8, 9], generation=1)],
        consume_through=0,
    )
    ends.rows.apply(following)
    ends.receiver.consume_samples(following.consume_through)
    assert ends.rows.total_len[:3].tolist() == [1, 2, 2]
    assert ends.rows.token_ids[1, :3].tolist() == [8, 9, 0]
    assert ends.rows.token_ids[2, :2].tolist() == [1, 52]


def test_what_follows_a_wrong_guess_returns_without_ids() -> None:
    ends = Ends()
    enter = make_plan(0, [Part(row=0, start=0, blocks=[0])], new_rows=[new_row(0, [1])])
    ahead = make_plan(1, [Part(row=0, num_tokens=2, start=1, token_from=GUESSED, drafts=[7, 8])])
    for plan, ids, rejected in ((enter, [[9]], [0]), (ahead, [[]], [2])):
        ends.expect(plan)
        ends.rows.num_computed[0] = plan.start_positions[0] + plan.num_tokens[0]
        ends.send(plan, ids, rejected)
    ends.receiver.consume_samples(1)
    assert (ends.rows.total_len[0], ends.rows.num_computed[0], ends.rows.num_rejected[0]) == (2, 1, 2)


def test_no_ids_where_there_was_no_guess_are_refused() -> None:
    ends = Ends()
    plan = make_plan(0, [Part(row=0, start=0, blocks=[0])], new_rows=[new_row(0, [1])])
    ends.expect(plan)
    ends.send(plan, [[]])
    with pytest.raises(ProtocolError, match="is missing"):
        ends.receiver.consume_samples(0)


@pytest.mark.parametrize("seed", range(8))
def test_e4_both_ends_count_the_same_messages(seed: int) -> None:
    rng = random.Random(seed)
    ends = Ends()
    lengths = [0] * 4
    num_sampling = 0
    for step in range(60):
        rows = rng.sample(range(4), rng.randint(0, 4))
        parts = [Part(row=r, start=lengths[r], sampled=rng.random() < 0.4) for r in rows]
        enter = [new_row(r, [1] * 60) for r in range(4)] if step == 0 else []
        plan = make_plan(step, parts, new_rows=enter, consume_through=step - rng.randint(1, 3))
        ends.receiver.consume_samples(plan.consume_through)
        ends.expect(plan)
        ends.send(plan, [[-1]] * len(plan.sampled_rows))
        num_sampling += any(plan.need_sampled)
        for r in rows:
            lengths[r] += 1
    ends.receiver.consume_samples(60)
    assert ends.last.num_sent == ends.early.num_received == num_sampling
    assert 0 < num_sampling < 60
    assert ends.num_pending == 0
    assert ends.early.inner.recv(0) is None


def test_a_prefill_only_batch_and_an_empty_one_send_nothing() -> None:
    ends = Ends()
    plans = [
        make_plan(
            0, [Part(row=0, num_tokens=2, start=0, blocks=[0], sampled=False)], new_rows=[new_row(0, [1] * 5)]
        ),
        make_plan(1),
    ]
    for plan in plans:
        ends.expect(plan)
        ends.send(plan, [])
    assert ends.last.num_sent == 0
    assert ends.num_pending == 0
    ends.receiver.consume_samples(1)


def test_ids_go_to_stages_that_embed_and_counts_to_the_others() -> None:
    """Issue 25, point 5: rows stay in step everywhere, and between the ends of the pipe nobody has an id."""
    pairs = [QueueChannel.pair() for _ in range(4)]
    plan = make_plan(
        0,
        [Part(row=row, start=0, blocks=[row]) for row in range(4)],
        new_rows=[new_row(row, [1]) for row in range(4)],
    )
    ends = [last for last, _ in pairs]
    sampled = StepResult(step_id=0, token_ids=[[7], [8, 9, 6], [-1], [5]], num_rejected=[0, 1, 0, 2])
    TokenSender(ends[:2], ends[2:]).send_samples(plan, sampled)
    tables = []
    for index, (_, early) in enumerate(pairs):
        embeds = index < 2
        rows = RequestRows(4, 16, 4, 3, ids=KeptIds if embeds else NoIds)
        rows.apply(plan)
        receiver = (TokenReceiver if embeds else CountReceiver)(early, rows, name="x", timeout_s=30.0)
        receiver.expect_samples(plan, rows.snapshot(range(4)))
        rows.num_computed = array("q", [9] * 4)
        rows.free(3)  # and its sample is dropped
        receiver.consume_samples(0)
        assert early.recv(0) is None
        tables.append(rows)
    for rows in tables:
        assert rows.total_len.tolist() == [2, 4, 1, 1]
        assert rows.num_computed.tolist() == [9, 8, 9, 9]
        assert rows.num_rejected.tolist() == [0, 1, 0, 0]
        assert rows.sampled_step.tolist() == [0, 0, 0, KNOWN]
    assert [rows.token_ids[1, :4].tolist() for rows in tables[:2]] == [[1, 8, 9, 6]] * 2
    assert [rows.token_ids.nbytes for rows in tables[2:]] == [0, 0]


def test_no_id_crosses_to_a_stage_that_does_not_embed() -> None:
    """Issue 25, point 5: one message is as long as another, whatever was sampled."""
    (first, _), (between, early) = QueueChannel.pair(), QueueChannel.pair()
    frames = []
    for token_id in (3, 2**40):
        TokenSender([first], [between]).send_samples(
            entering(0, 0), StepResult(step_id=0, token_ids=[[token_id]], num_rejected=[0])
        )
        frames.append(early.recv(0))
    assert frames[0] == frames[1]


@pytest.mark.parametrize(
    ("receiver", "channels"), [(TokenReceiver, "others"), (CountReceiver, "embedding")], ids=["ids", "counts"]
)
def test_dr1_a_return_for_another_kind_of_stage_is_refused(
    receiver: type[SampleReceiver], channels: str
) -> None:
    last, early = QueueChannel.pair()
    plan, rows = entering(0, 0), RequestRows(2, 16, 4)
    rows.apply(plan)
    TokenSender(**{"embedding": [], channels: [last]}).send_samples(
        plan, StepResult(step_id=0, token_ids=[[7]], num_rejected=[0])
    )
    waiting = receiver(early, rows, name="stage 3 -> stage 0", timeout_s=30.0)
    waiting.expect_samples(plan, rows.snapshot([0]))
    with pytest.raises(ProtocolError, match=r"stage 3 -> stage 0.*samples of step 0.*request-0-0"):
        waiting.consume_samples(0)


def test_a_missing_return_is_a_typed_error_with_path_and_step() -> None:
    ends = Ends(timeout_s=0.001)
    ends.expect(entering(4, 0))
    with pytest.raises(WaitTimeoutError, match=r"stage 3 -> stage 0.*samples of step 4"):
        ends.receiver.consume_samples(4)


def test_a_dead_last_stage_is_a_typed_error() -> None:
    ends = Ends()
    ends.expect(entering(4, 0))
    ends.last.close()
    with pytest.raises(LinkClosedError, match=r"stage 3 -> stage 0 was closed before the samples of step 4"):
        ends.receiver.consume_samples(4)


def test_dr1_bytes_that_are_no_samples_are_refused_with_path_step_and_requests() -> None:
    ends = Ends()
    ends.expect(entering(4, 0))
    ends.last.send(b"\xc1")
    with pytest.raises(ProtocolError, match=r"stage 3 -> stage 0.*samples of step 4.*request-0-0"):
        ends.receiver.consume_samples(4)


def test_samples_that_cannot_be_sent_say_whither_and_of_which_step() -> None:
    last, early = QueueChannel.pair("samples, stage 1 -> stage 0")
    early.close()
    with pytest.raises(LinkClosedError, match=r"stage 1 -> stage 0.*the samples of step 4"):
        TokenSender([last]).send_samples(
            entering(4, 0), StepResult(step_id=4, token_ids=[[1]], num_rejected=[0])
        )


@pytest.mark.parametrize(
    ("sent", "ids"),
    [
        (entering(5, 0), [[7]]),
        (entering(4, 1), [[7]]),
        (make_plan(4, [Part(row=0, start=0, blocks=[0])], epoch=1), [[7]]),
        (entering(4, 0), [[7], [8]]),
    ],
    ids=["another step", "another plan", "another epoch", "another number of rows"],
)
def test_dr1_another_return_is_refused(sent: ScheduledBatch, ids: list[list[int]]) -> None:
    ends = Ends()
    ends.expect(entering(4, 0))
    ends.send(sent, ids)
    with pytest.raises(ProtocolError, match=r"stage 3 -> stage 0.*request-0-0"):
        ends.receiver.consume_samples(4)


def test_known_means_nothing_to_wait_for() -> None:
    ends = Ends()
    ends.expect(entering(4, 0))
    ends.receiver.consume_samples(KNOWN)
    assert ends.num_pending == 1
