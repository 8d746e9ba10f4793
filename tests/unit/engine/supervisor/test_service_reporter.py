"""What a service manager is told of the events of a supervisor."""

from __future__ import annotations

import pytest

from penstock.engine.supervisor.reports import Draining, EngineReady, Event, LoadProgress, Notice, StageLost
from penstock.engine.supervisor.service_reporter import ServiceReporter
from penstock.errors import ErrorInfo

READY = EngineReady(address="http://127.0.0.1:8000", seconds=1.5)
LOST = StageLost(
    error=ErrorInfo(kind="PeerError", message="stage 1 has ended."),
    epoch=3,
    restarts=["stage 1"],
    trace="a\nb",
)


class Recorder:
    """A service manager and what people see, in the order in which they hear of it."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def ready(self) -> None:
        self.heard.append("ready")

    def stopping(self) -> None:
        self.heard.append("stopping")

    def status(self, text: str) -> None:
        self.heard.append(text.partition("\n")[0])

    def report(self, event: Event) -> None:
        self.heard.append(event)


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (Notice(text="something"), []),
        (LoadProgress(stage=0, done_bytes=1, total_bytes=2), []),
        (READY, ["ready", "ready in 1.5 s   http://127.0.0.1:8000"]),
        (LOST, ["lost: stage 1 has ended. Epoch 3 is over, stage 1 starts again"]),
        (
            Draining(seconds=30.0),
            ["stopping", "draining: running requests have 30 s; a second signal ends at once"],
        ),
    ],
)
def test_the_manager_hears_what_concerns_it_and_people_hear_all(event: Event, told: list[str]) -> None:
    recorder = Recorder()
    ServiceReporter(recorder, recorder).report(event)
    assert recorder.heard == [*told, event]


class FullDisk:
    """What people see stands on a full disk."""

    def report(self, event: Event) -> None:
        raise OSError


def test_r16_the_manager_hears_it_though_people_do_not() -> None:
    recorder = Recorder()
    with pytest.raises(OSError):  # noqa: PT011
        ServiceReporter(FullDisk(), recorder).report(READY)
    assert recorder.heard[0] == "ready"
