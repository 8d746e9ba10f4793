"""Stages break at exact places: in a step, before and after it is sent on, at start, in their numbers."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from depth import sampled
from disturbed import REQUESTS, Stream, StreamFailedError, undisturbed
from served import Served, wait_until

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
    return [ids[:TOKENS] for ids in undisturbed()]


def ids(served: Served, request: dict[str, object]) -> list[int]:
    return [*Stream(served, request | {"max_tokens": TOKENS})]


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_r4_i14_a_stage_that_breaks_at_an_exact_place_costs_no_token(
    golden: list[list[int]], fault: str
) -> None:
    flags = ("--threads-per-rank", "1", "--dtype", "float32", "--heartbeat-limit", "2", "--step-timeout", "2")
    with Served("demo", "--pp", "2", *flags, env={"PENSTOCK_FAULTS": fault}) as served:
        streams = [Stream(served, request | {"max_tokens": TOKENS}) for request in REQUESTS]
        assert [[*stream] for stream in streams] == golden
        wait_until(lambda: "recovered in" in served.output, 30)
        if fault.endswith("=raise"):
            assert "InjectedError: a fault at stage.forward" in served.output
        if fault.endswith("=hang"):
            assert "faults.py" in served.output, "where the stage was"


@pytest.mark.soak
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("fault", ["stage.forward@1:33=hang", "stage.put@0:12=hang"])
def test_r2_a_stage_that_hangs_is_noticed_in_seconds_with_the_settings_as_shipped(
    golden: list[list[int]], fault: str, num_stages: int
) -> None:
    words = ("--pp", str(num_stages), "--threads-per-rank", "1", "--dtype", "float32")
    with Served("demo", *words, env={"PENSTOCK_FAULTS": fault}) as served:
        streams = [Stream(served, request | {"max_tokens": TOKENS}) for request in REQUESTS]
        assert [[*stream] for stream in streams] == golden
        told = re.findall(r"has been in the stages for (\d+) s", served.output)
        assert len(told) == 1, served.output
        assert int(told[0]) <= 6
        assert "has not left epoch 0" in served.output
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


# The program, with a clock of its own where it looks how long stages have loaded: ten minutes pass there when
# a file appears.
WITH_A_CLOCK = """
import os, time, types
from penstock.engine.supervisor import pipeline_processes
from penstock.cli.program import main

def monotonic():
    return time.monotonic() + 600 * os.path.exists(os.environ["TEN_MINUTES_LATER"])

pipeline_processes.time = types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
raise SystemExit(main())
"""


@pytest.mark.soak
def test_r3_a_stage_that_loads_for_ever_is_not_waited_for(tmp_path: Path) -> None:
    later = tmp_path / "later"
    flags = ("--threads-per-rank", "1", "--load-timeout", "500")
    env = {"PENSTOCK_FAULTS": "rank.load@1:1=hang", "TEN_MINUTES_LATER": str(later)}
    served = Served("demo", "--pp", "2", *flags, env=env, program=("-c", WITH_A_CLOCK))
    with contextlib.ExitStack() as stack:
        stack.push(served)  # it will not be ready
        wait_until(lambda: "a fault at rank.load: hang" in served.output, 120)
        assert served.process.poll() is None
        later.touch()
        assert served.process.wait(120) == 5
    assert "had not loaded after 500 s, and was killed" in served.output
    assert "faults.py" in served.output, "where the stage was"


def outcome(stream: Stream) -> list[int] | str:
    """All ids, or the error."""
    try:
        return [*stream]
    except StreamFailedError as error:
        return str(error)


@pytest.mark.parametrize("point", sampled(["rank.load", "rank.allocate"], 1))
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
