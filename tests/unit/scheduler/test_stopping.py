"""When a token ends its request (row D11)."""

from __future__ import annotations

import pytest

from penstock.batch import RowSampling
from penstock.scheduler.queues import RequestState
from penstock.scheduler.result_settlement import finish_reason


def state(*outputs: int, min_tokens: int = 0) -> RequestState:
    return RequestState(
        request_id="r",
        arrival=0,
        arrival_time=0.0,
        prompt_len=2,
        max_len=6,
        stop_ids=frozenset({1}),
        sampling=RowSampling(0.0, 0, 1.0, 0.0, 1, min_tokens, [1], -1),
        token_ids=[1, 1, *outputs],
    )


@pytest.mark.parametrize(
    ("outputs", "min_tokens", "expected"),
    [
        ((5,), 0, None),
        ((1,), 0, "stop"),
        ((5, 6, 7), 0, None),
        ((5, 6, 7, 8), 0, "length"),
        ((5, 6, 7, 1), 0, "stop"),
        ((5, 1), 2, None),
        ((5, 6, 1), 2, "stop"),
    ],
)
def test_d11_stop_ids_and_lengths(outputs: tuple[int, ...], min_tokens: int, expected: str | None) -> None:
    assert finish_reason(state(*outputs, min_tokens=min_tokens)) == expected
