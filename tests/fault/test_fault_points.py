"""Stages break at exact places: in a step, before and after it is sent on, at start, in their numbers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from disturbed import REQUESTS, Stream, StreamFailedError
from served import Served

TOKENS = 80
FAULTS = (
    "stage.forward@0:1=kill",  # the first prompt
    "stage.put@0:9=kill",  # computed, not sent on
    "stage.forward@1:33=raise",
    "stage.put@1:40=kill",  # computed, not sampled
    "stage.put@1:21=stop",
    "stage.forward@0:12=hang",
)


@pytest.fixture(scope="module")
def golden() -> list[list[int]]:
    with Served("demo", "--pp", "2", "--threads-per-rank", "1", "--dtype", "float32") as served:
        return [ids(served, request) for request in REQUESTS]


def ids(served: Served, request: dict[str, object]) -> list[int]:
    return [*Stream(served, request | {"max_tokens": TOKENS})]


@pytest.mark.parametrize("fault", FAULTS)
def test_r4_i14_a_stage_that_breaks_at_an_exact_place_costs_no_token(
    golden: list[list[int]], fault: str
) -> None:
    flags = ("--threads-per-rank", "1", "--dtype", "float32", "--heartbeat-limit", "2", "--step-timeout", "2")
    with Served("demo", "--pp", "2", *flags, env={"PENSTOCK_FAULTS": fault}) as served:
        streams = [Stream(served, request | {"max_tokens": TOKENS}) for request in REQUESTS]
        assert [[*stream] for stream in streams] == golden
        assert "recovered in" in served.output
        if fault.endswith("=raise"):
            assert "InjectedError: a fault at stage.forward" in served.output
        if fault.endswith("=hang"):
            assert "faults.py" in served.output, "where the stage was"


def test_r16_nan_in_one_row_ends_that_request_only(golden: list[list[int]]) -> None:
    flags = ("--threads-per-rank", "1", "--dtype", "float32")
    with Served("demo", "--pp", "2", *flags, env={"PENSTOCK_FAULTS": "stage.forward@1:30=nan"}) as served:
        streams = [Stream(served, request | {"max_tokens": TOKENS}) for request in REQUESTS[:2]]
        outcomes = [outcome(stream) for stream in streams]
        (hit,) = [index for index, found in enumerate(outcomes) if found != golden[index]]
        assert "NaN" in str(outcomes[hit])
        assert ids(served, REQUESTS[2]) == golden[2]
        assert served.metric("penstock_epoch") == 0


def test_r3_a_stage_that_loads_for_ever_is_not_waited_for() -> None:
    command = [sys.executable, "-m", "penstock", "serve", "demo", "--pp", "2", "--port", "0"]
    ended = subprocess.run(
        [*command, "--threads-per-rank", "1", "--load-timeout", "6"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PENSTOCK_FAULTS": "rank.load@1:1=hang"},
    )
    assert ended.returncode == 5
    assert "had not loaded after 6 s, and was killed" in ended.stderr
    assert "faults.py" in ended.stderr, "where the stage was"


def outcome(stream: Stream) -> list[int] | str:
    """All ids, or the error."""
    try:
        return [*stream]
    except StreamFailedError as error:
        return str(error)


@pytest.mark.parametrize("point", ["rank.load", "rank.allocate"])
def test_g2_a_stage_that_breaks_at_start_ends_the_start_with_the_place(point: str) -> None:
    command = [sys.executable, "-m", "penstock", "serve", "demo", "--pp", "2", "--port", "0"]
    ended = subprocess.run(
        [*command, "--threads-per-rank", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PENSTOCK_FAULTS": f"{point}@1:1=raise"},
    )
    assert ended.returncode == 5
    assert f"stage 1 failed while starting: InjectedError: a fault at {point}" in ended.stderr
