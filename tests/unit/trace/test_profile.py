"""A profile: what lies between two steps, on every stage the same ones."""

from __future__ import annotations

import json
import math

import msgspec

from penstock.batch import StageSpans
from penstock.trace.profile import Profile, encoded_trace


def report(stage: int, began_ns: int, *steps: int, replica: int = 0) -> StageSpans:
    """Two spans for each step."""
    return StageSpans(
        stage=stage,
        began_ns=began_ns,
        phases=bytes([2, 6] * len(steps)),
        durations_ns=[10, 20] * len(steps),
        steps=[(2 * index, step, 1) for index, step in enumerate(steps)],
        replica=replica,
    )


def steps_of(profile: Profile) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for span in profile:
        steps = found.setdefault((span.stage.replica, span.stage.number), [])
        if steps[-1:] != [span.step]:
            steps.append(span.step)
    return found


def test_it_begins_and_ends_at_the_same_step_on_every_stage() -> None:
    profile = Profile({0: 3, 1: 70})
    profile.add([report(1, 50, 2, 3, 4, 5), report(0, 0, 1, 2, 3), report(0, 100, 4, 5, 6)])
    profile.add([report(0, 0, 69, 70, 71, replica=1), report(1, 0, 70, 71, 72, replica=1)])
    profile.end({0: 5, 1: 72})
    assert steps_of(profile) == {(0, 0): [3, 4], (0, 1): [3, 4], (1, 0): [70, 71], (1, 1): [70, 71]}


def test_what_is_fetched_twice_counts_once() -> None:
    profile = Profile({0: 0})
    for reports in ([report(0, 0, 1)], [report(0, 0, 1), report(0, 100, 2)], [report(0, 100, 2)]):
        profile.add(reports)
    assert profile.num_spans == 4
    assert steps_of(profile) == {(0, 0): [1, 2]}


def test_it_is_covered_when_every_stage_has_told_of_the_end() -> None:
    profile = Profile({0: 1})
    profile.add([report(0, 0, 1, 2, 3, 4)])
    profile.end({0: 4})
    assert not profile.is_covered(2)
    profile.add([report(1, 0, 1, 2, 3)])
    assert not profile.is_covered(2)
    profile.add([report(1, 90, 4)])
    assert profile.is_covered(2)
    assert not profile.is_covered(3)


def test_the_file_is_whole_json_and_no_longer_than_it_may_be() -> None:
    profile = Profile({0: 0})
    profile.add([report(0, 100 * n, n) for n in range(300)])
    whole = b"".join(encoded_trace(profile, {"complete": True}, 10**9))
    trace = json.loads(whole)
    assert trace["otherData"] == {"complete": True}
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 600
    for limit in (len(whole), len(whole) - 1, 2000):
        cut = b"".join(encoded_trace(profile, {"complete": True}, limit))
        assert len(cut) <= limit
        events = json.loads(cut)["traceEvents"]
        assert events == trace["traceEvents"][: len(events)]
        assert (len(events) == len(trace["traceEvents"])) == (limit == len(whole))
    assert math.isclose(trace["traceEvents"][-1]["dur"], 0.02)


def test_spans_come_in_pieces() -> None:
    profile = Profile({0: 0})
    profile.add([report(0, 100 * n, n) for n in range(2000)])
    sizes = [len(piece) for piece in encoded_trace(profile, {}, 10**9)]
    assert len(sizes) > 3
    assert max(sizes) < 70_000


def test_a_report_counts_once_though_its_clock_is_better_known_the_second_time() -> None:
    profile = Profile({0: 0})
    early = report(1, 9_000_000, 1)  # of a host whose clock shows more
    late = report(1, 500, 2)  # the stage has gone to another host
    profile.add([msgspec.structs.replace(early, shift_ns=-8_999_900), late])
    profile.add([msgspec.structs.replace(early, shift_ns=-8_999_950), late])
    assert profile.num_spans == 4
    assert [span.step for span in profile] == [1, 1, 2, 2]
