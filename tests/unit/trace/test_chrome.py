"""D6: a trace that Perfetto opens, and the report of bubbles."""

from __future__ import annotations

import json

import msgspec
import pytest

from penstock.batch import StageSpans
from penstock.trace.chrome import bubble_report, chrome_trace, spans_of
from penstock.trace.phases import Phase


def report(
    stage: int, began_ns: int, spans: list[tuple[Phase, int]], *steps: tuple[int, int, int]
) -> StageSpans:
    return StageSpans(
        stage=stage,
        began_ns=began_ns,
        phases=bytes(phase for phase, _ in spans),
        durations_ns=[duration for _, duration in spans],
        steps=list(steps),
    )


EARLY = report(
    0,
    1_000_000,
    [
        (Phase.WAIT_PLAN, 1000),
        (Phase.TAKE, 2000),
        (Phase.FORWARD, 5000),
        (Phase.WAIT_NEXT, 100),
        (Phase.COMM, 400),
        (Phase.WAIT_PLAN, 1500),
    ],
    (1, 7, 32),
)
LAST = report(
    1,
    1_000_000,
    [
        (Phase.TAKE, 500),
        (Phase.WAIT_PREV, 8000),
        (Phase.COMM, 300),
        (Phase.FORWARD, 900),
        (Phase.SAMPLE, 300),
    ],
    (0, 7, 32),
)


def test_spans_have_no_gaps_and_know_their_step() -> None:
    later = report(0, 1_010_000, [(Phase.WAIT_PLAN, 50), (Phase.TAKE, 60)], (1, 8, 1))
    spans = list(spans_of([EARLY, later]))
    assert [span.start_ns for span in spans[1:]] == [span.end_ns for span in spans[:-1]]
    assert [span.step for span in spans] == [-1, 7, 7, 7, 7, 7, 7, 8]
    assert [span.num_tokens for span in spans] == [0, 32, 32, 32, 32, 32, 32, 1]


def test_the_report_counts_the_steps_that_a_wrong_guess_has_made_void() -> None:
    """Of the first and the last step there may be more than what is told."""
    computed = [(Phase.TAKE, 10), (Phase.FORWARD, 50), (Phase.PUT, 10)]
    void = [(Phase.TAKE, 10), (Phase.PUT, 10)]
    spans = [*void, *computed, *void, *void, *computed, *void]
    steps = [(0, 7, 1), (2, 8, 1), (5, 9, 2), (7, 10, 2), (9, 11, 1), (12, 12, 1)]
    (line,) = bubble_report([report(0, 0, spans, *steps)])
    assert line.endswith(", 2 of 4 steps void")
    (line,) = bubble_report(
        [report(0, 0, [*computed, *computed, *computed], (0, 7, 1), (3, 8, 1), (6, 9, 1))]
    )
    assert "void" not in line
    probes = [(0, 7, 1), (3, 8, 0), (5, 9, 1), (8, 10, 1)]  # plans without tokens are no windows
    (line,) = bubble_report([report(0, 0, [*computed, *void, *computed, *computed], *probes)])
    assert "void" not in line


def test_d6_the_trace_has_a_process_a_stage_and_arrows_between_them() -> None:
    trace = json.loads(json.dumps(chrome_trace([EARLY, LAST])))
    events = trace["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "stage 0"), (1, "stage 1")}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 11
    on = {(e["pid"], e["name"]): tracks[e["pid"], e["tid"]] for e in slices}
    assert on[0, "forward 7"] == on[1, "sample 7"] == "compute"
    assert on[0, "comm 7"] == on[1, "comm 7"] == "transfer"
    assert on[0, "wait_plan"] == on[0, "wait_next 7"] == on[1, "wait_prev 7"] == "waiting"
    forward = next(e for e in slices if e["name"] == "forward 7")
    assert (forward["ts"], forward["dur"], forward["args"]["tokens"]) == (1003.0, 5.0, 32)
    (start,), (end,) = ([e for e in events if e["ph"] == kind] for kind in "sf")
    assert (start["pid"], end["pid"], start["id"]) == (0, 1, end["id"])
    for arrow in (start, end):  # each end lies in the slice that it belongs to
        track = [e for e in slices if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])]
        holding = [e["name"] for e in track if e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]]
        assert holding == ["comm 7"]


def test_d6_the_report_says_how_much_was_computed_and_where_the_rest_went() -> None:
    assert bubble_report([EARLY, LAST]) == [
        "stage 0: 0.0 s, computing 50.0%, bubble 30.0% (wait_plan 25.0%, comm 4.0%, wait_next 1.0%), "
        "overhead 20.0%",
        "stage 1: 0.0 s, computing 12.0%, bubble 83.0% (wait_prev 80.0%, comm 3.0%), overhead 5.0%",
    ]


@pytest.mark.parametrize("reports", [[], [report(0, 5, [])]])
def test_nothing_gives_an_empty_trace(reports: list[StageSpans]) -> None:
    assert chrome_trace(reports)["traceEvents"] == []
    assert bubble_report(reports) == []


def test_stages_of_several_hosts_are_on_one_clock() -> None:
    """Stage 1 is on a host whose clock shows 5 s more: what it received it received after it was sent."""
    away_ns = 5_000_000_000
    far = msgspec.structs.replace(LAST, began_ns=LAST.began_ns + away_ns, shift_ns=-away_ns)
    assert list(spans_of([EARLY, far])) == list(spans_of([EARLY, LAST]))
    sent, received = (
        next(event for event in chrome_trace([EARLY, far])["traceEvents"] if event["ph"] == end)
        for end in "sf"
    )
    assert sent["ts"] <= received["ts"]


def test_a_clock_that_becomes_more_exact_makes_no_overlap() -> None:
    first = report(1, 1000, [(Phase.FORWARD, 500), (Phase.PUT, 100)], (0, 7, 1))
    second = report(1, 1600, [(Phase.WAIT_PLAN, 30), (Phase.FORWARD, 500)], (1, 8, 1))
    second = msgspec.structs.replace(second, shift_ns=-50)
    spans = list(spans_of([first, second]))
    assert [(span.start_ns, span.end_ns) for span in spans] == [
        (1000, 1500),
        (1500, 1600),
        (1600, 1600),
        (1600, 2080),
    ]
