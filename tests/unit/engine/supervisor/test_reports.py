"""What a supervisor prints."""

from __future__ import annotations

import io
import logging

import msgspec
import pytest

from fakes import FakeClock
from penstock.engine.supervisor.reports import (
    Caution,
    Draining,
    EngineFailed,
    EngineReady,
    Event,
    FrontLost,
    HostSaid,
    LoadProgress,
    LogReporter,
    ModelFound,
    PlainReporter,
    StageLoaded,
    StageLost,
    StageReady,
    rank_parts,
)
from penstock.errors import ErrorInfo
from penstock.families.registry import resolve_model_directory
from rank_configs import make_rank_configs

READY = StageReady(
    stage=0,
    process="pid 4711",
    parts="embed, layers 0-3",
    tensor_bytes=2_600_000,
    num_blocks=512,
    stranded_bytes=0,
)
EVENTS: list[Event] = [
    ModelFound(directory="/models/small"),
    LoadProgress(stage=1, done_bytes=1, total_bytes=4),
    StageLoaded(stage=0, process="pid 1", bytes_read=2, seconds=0.5),
    READY,
    Caution(text="tools will not work."),
    HostSaid(host="desk", process="stage 1", text="a warning"),
    HostSaid(host="desk", process="", text="its own"),
    EngineReady(address="http://127.0.0.1:8000", seconds=2.06, prompt_form="text"),
    Draining(seconds=30.0),
    EngineFailed(error=ErrorInfo(kind="PortInUseError", message="port 1 is used.", remedy="Use --port.")),
]


def printed(*events: Event) -> list[str]:
    stream = io.StringIO()
    reporter = PlainReporter(stream, FakeClock())
    for event in events:
        reporter.report(event)
    return stream.getvalue().splitlines()


def test_one_line_per_stage_and_one_when_ready() -> None:
    assert printed(*EVENTS) == [
        "stage 0  pid 4711  embed, layers 0-3  2.6 MB  512 KV blocks",
        "warning: tools will not work.",
        "desk stage 1: a warning",
        "desk: its own",
        "ready in 2.1 s   http://127.0.0.1:8000",
        "draining: running requests have 30 s; a second signal ends at once",
        "error: port 1 is used. Use --port.",
    ]


def test_stranded_memory_is_reported() -> None:
    event = msgspec.structs.replace(READY, stranded_bytes=1_500_000)
    assert printed(event)[0].endswith("512 KV blocks  (1.5 MB of KV memory stranded)")


def test_progress_is_printed_now_and_then_and_by_stage() -> None:
    stream, clock = io.StringIO(), FakeClock()
    reporter = PlainReporter(stream, clock)
    for seconds in (0, 4, 2, 1, 5):
        clock.advance(seconds)
        reporter.report(LoadProgress(stage=1, done_bytes=1, total_bytes=4_000_000))
    assert stream.getvalue().splitlines() == ["stage 1  loading 0 % of 4.0 MB"] * 2


def test_a_library_logs_what_a_program_prints_but_for_progress(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="penstock"):
        for event in EVENTS:
            LogReporter().report(event)
    assert [record.getMessage() for record in caplog.records] == printed(*EVENTS)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["warning: tools will not work."]
    assert {record.levelno for record in caplog.records} == {logging.INFO, logging.WARNING}
    assert capsys.readouterr() == ("", ""), "nobody asked for it"


def test_a_library_warns_of_losses(caplog: pytest.LogCaptureFixture) -> None:
    error = ErrorInfo(kind="StageLostError", message="the process was killed.")
    for event in (StageLost(error=error, epoch=3, restarts=["stage 1"]), FrontLost(error=error)):
        LogReporter().report(event)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "lost: the process was killed. Epoch 3 is over, stage 1 starts again"),
        (logging.WARNING, "lost: the process was killed. It starts again"),
    ]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive_the_status_pipe(event: Event) -> None:
    assert msgspec.json.decode(msgspec.json.encode(event), type=Event) == event


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ((0, 1, 0, 5, 1), "embed, layers 0-4, norm, head"),
        ((0, 3, 0, 2, 1), "embed, layers 0-1"),
        ((1, 3, 2, 3, 1), "layer 2"),
        ((2, 3, 3, 5, 1), "layers 3-4, norm, head"),
        ((2, 3, 3, 5, 2), "1/2 of layers 3-4, norm, head"),
    ],
)
def test_parts_of_a_rank_in_words(place: tuple[int, int, int, int, int], words: str) -> None:
    names = ("stage", "num_stages", "start_layer", "end_layer", "tp_size")
    rank = msgspec.structs.replace(
        make_rank_configs(resolve_model_directory("demo"), 1)[0], **dict(zip(names, place, strict=True))
    )
    assert rank_parts(rank) == words
