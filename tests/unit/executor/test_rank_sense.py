"""What a rank says is used only if it makes sense: a rank may run on a host that is broken (row R15)."""

from __future__ import annotations

import msgspec
import pytest

from penstock.batch import (
    GrammarsBuilt,
    OrdersDone,
    RankFailed,
    RankLoaded,
    RankReady,
    RankToCore,
    StageSpans,
    StageTimes,
    StoreUse,
    decode_to_core,
    encode,
)
from penstock.errors import ProtocolError, StageLostError
from penstock.executor.rank_sense import sensible
from penstock.told_text import MAX_TEXT_CHARS
from penstock.trace.phases import Phase

SPANS = StageSpans(
    stage=1, began_ns=5, phases=bytes([1, 6]), durations_ns=[7, 8], steps=[(0, 3, 1), (2, 4, 1)],
    prompt_tokens={4: 1},
)  # fmt: skip
TIMES = StageTimes(
    stage=1, num_steps=1, wall_ns=9, busy_ns=3, phase_ns=[0] * len(Phase), busy_ratio=0.5
)  # fmt: skip
LOADED = RankLoaded(
    stage=1,
    max_blocks=1,
    block_bytes=1,
    tensor_bytes=1,
    bytes_read=1,
    load_seconds=1.0,
    is_invariant=True,
    end_layer=6,
)


@pytest.mark.parametrize(
    "message", [SPANS, TIMES, LOADED, RankReady(stage=1)], ids=lambda each: type(each).__name__
)
def test_what_makes_sense_is_passed_on_as_it_is(message: RankToCore) -> None:
    assert sensible(decode_to_core(encode(message)), 1) == message
    with pytest.raises(ProtocolError, match="a rank of stage 2 reports as stage 1") as caught:
        sensible(message, 2)
    assert caught.value.stage == 2, "it is that rank that is lost"


@pytest.mark.parametrize(
    "changed",
    [
        {"phases": bytes([1, len(Phase)])},
        {"phases": b"\1"},
        {"durations_ns": [7]},
        {"steps": [(3, 3, 1)]},
        {"steps": [(-1, 3, 1)]},
        {"steps": [(1, 3, 1), (0, 4, 1)]},
        {"prompt_tokens": {5: 1}},
    ],
)
def test_r15_spans_that_do_not_fit_together_lose_the_rank(changed: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="inconsistent spans") as caught:
        sensible(msgspec.structs.replace(SPANS, **changed), 1)
    assert caught.value.stage == 1


def test_r15_times_of_other_phases_lose_the_rank() -> None:
    with pytest.raises(ProtocolError, match="reports 2 phases"):
        sensible(msgspec.structs.replace(TIMES, phase_ns=[1, 2]), 1)


@pytest.mark.parametrize(
    "message",
    [
        msgspec.structs.replace(LOADED, end_layer=1 << 20),
        msgspec.structs.replace(LOADED, kernels="k" * 5000),
        msgspec.structs.replace(LOADED, store_host="h" * 5000),
        msgspec.structs.replace(TIMES, busy_ns=-1),
        msgspec.structs.replace(TIMES, wall_ns=1 << 63),
        msgspec.structs.replace(SPANS, durations_ns=[-7, 8]),
    ],
)
def test_r15_numbers_and_names_beyond_all_bounds_are_not_decoded(message: RankToCore) -> None:
    with pytest.raises(ProtocolError):
        decode_to_core(encode(message))


def test_r15_text_cannot_steer_the_terminal_and_is_not_long() -> None:
    error = StageLostError("\x1b[2J" + "x" * 100_000, remedy="\x07", stage=1).info()
    failed = sensible(RankFailed(stage=1, error=error), 1)
    assert isinstance(failed, RankFailed)
    assert failed.error.message.startswith("\\x1b[2J")
    assert len(failed.error.message) < MAX_TEXT_CHARS + 50
    assert failed.error.remedy == "\\x07"
    built = sensible(GrammarsBuilt(built=[], failed={3: "\x1b["}), 1)
    assert isinstance(built, GrammarsBuilt)
    assert built.failed == {3: "\\x1b["}
    done = sensible(OrdersDone(done=[1], failed=[], use=StoreUse(failure="\x1b[")), 1)
    assert isinstance(done, OrdersDone)
    assert (done.done, done.use.failure) == ([1], "\\x1b[")
