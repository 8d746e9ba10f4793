"""The plan on the wire: round trips, the digest, hostile frames (row DR1)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batch import (
    AllocateKV,
    GrammarsBuilt,
    LinkOrder,
    NewRow,
    OrdersDone,
    PlanMeta,
    RankFailed,
    RankLoaded,
    RankReady,
    RewoundRow,
    RowSampling,
    SampledTokens,
    ScheduledBatch,
    ScoredTokens,
    Shutdown,
    StepResult,
    TierOrder,
    decode_sampled_tokens,
    decode_to_core,
    decode_to_rank,
    encode,
    plan_digest,
    seal,
)
from penstock.errors import ErrorInfo, ProtocolError
from penstock.request import TokenLogprobs

PLAN = ScheduledBatch(
    step_id=9,
    rows=[4, 0, 2],
    num_tokens=[1, 1, 16],
    start_positions=[30, 12, 0],
    new_blocks=[[], [7], [8, 9]],
    need_sampled=[True, True, False],
    token_from=[7, 8, -1],
    consume_through=8,
    freed_rows=[2],
    new_rows=[NewRow(2, 1, "r", 20, list(range(20)), RowSampling(0.5, 0, 1.0, 0.0, 42, 0, [], -1))],
)


def test_a_plan_counts_tokens_and_names_sampled_rows() -> None:
    assert PLAN.total_tokens == 18
    assert PLAN.sampled_rows == [4, 0]
    empty = ScheduledBatch(step_id=0)
    assert (empty.total_tokens, empty.sampled_rows) == (0, [])


@pytest.mark.parametrize(
    ("num_tokens", "drafts", "expected"),
    [([1, 1, 1], {}, 0), ([1, 9, 1], {}, 9), ([4, 9, 1], {0: [5, 6, 7]}, 9), ([], {}, 0)],
    ids=["decode", "prompt", "beside a window", "probe"],
)
def test_a_plan_counts_the_tokens_of_prompts(
    num_tokens: list[int], drafts: dict[int, list[int]], expected: int
) -> None:
    rows = list(range(len(num_tokens)))
    plan = ScheduledBatch(step_id=1, rows=rows, num_tokens=num_tokens, drafts=drafts)
    assert plan.prompt_tokens == expected


@pytest.mark.parametrize(
    "message", [seal(PLAN), seal(ScheduledBatch(step_id=3)), AllocateKV(num_blocks=5), Shutdown()]
)
def test_messages_to_a_rank_survive_the_wire(message: ScheduledBatch | AllocateKV | Shutdown) -> None:
    assert decode_to_rank(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        StepResult(
            step_id=9,
            token_ids=[[5], [-1]],
            num_rejected=[0, 0],
            logprobs=[[TokenLogprobs(-0.1, 1, [5], [-0.1])], None],
            failed=[1],
            scores=[[TokenLogprobs(-2.5, 3, [], [])], []],
        ),
        RankLoaded(
            stage=1,
            max_blocks=4,
            block_bytes=64,
            tensor_bytes=9,
            bytes_read=9,
            load_seconds=0.5,
            is_invariant=False,
        ),
        RankReady(stage=0),
        OrdersDone(done=[1], failed=[2, 3]),
        GrammarsBuilt(built=[4], failed={5: "too large"}, unable={6: "too late"}),
        RankFailed(stage=1, error=ErrorInfo(kind="CheckpointError", message="bad.")),
    ],
)
def test_messages_to_the_core_survive_the_wire(
    message: StepResult | RankLoaded | RankReady | RankFailed,
) -> None:
    assert decode_to_core(encode(message)) == message


def test_sampled_tokens_survive_the_wire() -> None:
    tokens = SampledTokens(step_id=9, epoch=1, digest=77, token_ids=[[3], [-1]], num_rejected=[0, 0])
    assert decode_sampled_tokens(encode(tokens)) == tokens


def test_dr1_the_digest_covers_every_field() -> None:
    sealed = seal(PLAN)
    assert sealed.digest == plan_digest(PLAN) == plan_digest(sealed) != 0
    assert seal(sealed) == sealed
    other = {
        "step_id": 10,
        "epoch": 1,
        "rows": [4, 1, 2],
        "num_tokens": [1, 1, 15],
        "start_positions": [30, 13, 0],
        "new_blocks": [[], [7], [8, 10]],
        "need_sampled": [True, False, False],
        "token_from": [7, 7, -1],
        "drafts": {0: [5, 6]},
        "mtp": {0: 2},
        "pooled": [2],
        "consume_through": 7,
        "freed_rows": [],
        "new_rows": [],
        "rewound": [RewoundRow(4, 7, 31, [9])],
        "dropped_grammars": [3],
        "given_up": [b"name"],
        "orders": [TierOrder(0, True, 1, b"name")],
        "awaited": [0],
        "scored": [ScoredTokens(2, 1, 16)],
        "residency": 5,
        "links": [LinkOrder(number=1, first_step=12, stage=0, sender=0, receiver=0)],
        "meta": PlanMeta(wants_times=True),
    }
    assert set(other) == set(ScheduledBatch.__struct_fields__) - {"digest"}
    for field, value in other.items():
        changed = msgspec.structs.replace(PLAN, **{field: value})
        assert plan_digest(changed) != sealed.digest, field


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        encode(StepResult(step_id=0)),
        encode(PLAN)[:-3],
        encode(PLAN) + b"\x00",
        msgspec.msgpack.encode({"type": "plan", "step_id": "nine"}),
        msgspec.msgpack.encode({"type": "plan"}),
        msgspec.msgpack.encode({"type": "unheard of"}),
    ],
)
def test_dr1_a_frame_that_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="from the core cannot be read"):
        decode_to_rank(frame)


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=64))
def test_dr1_random_bytes_never_pass_for_a_result(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="from a stage cannot be read"):
        decode_to_core(frame)
