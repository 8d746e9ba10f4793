"""What a supervisor reports of a start, over a host without processes. With processes: tests/fault."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from penstock.config.engine import EngineConfig, ModelConfig
from penstock.engine.supervisor import supervisor
from penstock.engine.supervisor.launch import LaunchPlan, resolve
from penstock.engine.supervisor.pipe_layout import PipeLayout
from penstock.engine.supervisor.reports import Caution, EngineFailed, EngineReady, Event, ModelFound, Notice
from penstock.engine.supervisor.supervisor import StatusReporter, Supervisor
from penstock.hosts.launchers.engine_hosts import OneHost
from penstock.hosts.local_socket import LocalSocket
from penstock.hosts.member_watch import MemberWatch
from penstock.hosts.rank_host import Hosts
from penstock.process.child import Ready, TextSideLoaded
from penstock.process.readiness import Waitable
from stand_in_hosts import LOADED, StandInHost, StandInMember

DEMO = EngineConfig(model=ModelConfig(model="demo"))
PIPE_BYTES = os.sysconf("SC_PAGE_SIZE")  # the least that a pipe holds


class Events:
    """A reporter that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Event] = []

    def report(self, event: Event) -> None:
        self.given.append(event)


class StandInFront:
    """Stands for the API process."""

    lifelines: Sequence[Waitable] = ()
    drain_s = 0.0

    def __init__(self, host: StandInHost | None = None) -> None:
        self.host = host

    def open(self) -> None:
        pass

    def start(self, watch: MemberWatch, plan: LaunchPlan, clients: Sequence[LocalSocket]) -> None:
        assert self.host is not None
        self.member = StandInMember(self.host, "API process", None, 9)
        watch.add(self.member)

    def address(self, client: LocalSocket) -> str:
        return "http://127.0.0.1:8000"

    def close(self) -> None:
        pass


class NoEngine:
    """Stands for `_RunningEngine`."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def run(self) -> int:
        return 0

    def close(self) -> None:
        pass


def test_a_model_that_is_found_is_reported_and_one_that_is_not_is_the_only_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Issue 25, point 11."""
    monkeypatch.setattr(supervisor, "_RunningEngine", NoEngine)
    events = Events()
    assert Supervisor(DEMO, StandInFront(), events).run() == 0
    (found,) = events.given
    assert isinstance(found, ModelFound)
    assert found.directory.endswith("demo")
    events = Events()
    missing = EngineConfig(model=ModelConfig(model="/no/such/model"))
    assert Supervisor(missing, StandInFront(), events).run() == 3
    assert [type(event) for event in events.given] == [EngineFailed]


@pytest.fixture
def host() -> Iterator[StandInHost]:
    made = StandInHost("attic", "tcp")
    yield made
    made.close()


@contextmanager
def running(host: StandInHost, front: StandInFront, events: Events) -> Iterator[supervisor._RunningEngine]:
    """An engine of the demo model over one host, whose caller starts and closes it."""
    hosts = Hosts(host)
    signals, other_end = socket.socketpair()
    stopped: Any = signals
    with signals, other_end:
        yield supervisor._RunningEngine(
            [PipeLayout(resolve(DEMO, hosts.resources()), hosts, DEMO)],
            OneHost(hosts),
            front,
            events,
            stopped,
            started=0.0,
        )


def test_what_the_text_side_lacks_is_reported_when_all_is_ready(host: StandInHost) -> None:
    """Issue 25, point 13."""
    front, events = StandInFront(host), Events()
    with running(host, front, events) as engine:
        engine._start()
        front.member.say(TextSideLoaded(prompt_form="text", cautions=["tools will not work."]))
        host.members[0].say(Ready(rank=msgspec.structs.replace(LOADED, stage=0)))
        engine._hear(timeout_s=10.0)
        assert events.given == [], "the stages come first"
        engine._announce()
        engine.close()
    *_, caution, ready = events.given
    assert caution == Caution(text="tools will not work.")
    assert isinstance(ready, EngineReady)
    assert (ready.address, ready.prompt_form) == ("http://127.0.0.1:8000", "text")


def test_g1_no_process_is_killed_for_silence_while_its_host_is_away(host: StandInHost) -> None:
    with running(host, StandInFront(host), Events()) as engine:
        engine._start()
        stage = host.members[0]
        stage.is_ready, stage.heard_at = True, -1e6
        host.is_there = False
        engine._end_the_lifeless()
        assert stage.done == []
        host.is_there = True
        engine._end_the_lifeless()
        assert stage.done == [], "it has had no time to say anything"
        engine.close()


def test_the_program_that_called_reads_whole_lines_though_its_pipe_takes_a_long_event_in_part() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    reporter = StatusReporter(writing)
    long, dropped, short = (Notice(text=text) for text in ("x" * PIPE_BYTES, "no room", "short"))
    reporter.report(long)
    reporter.report(dropped)
    received = os.read(reading, PIPE_BYTES)
    assert len(received) == PIPE_BYTES, "all that the pipe holds"
    reporter.report(short)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        received += pipe.read()
    events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
    assert [events.decode(line) for line in received.splitlines()] == [long, short]


def test_a_program_that_reads_nothing_and_leaves_never_stops_the_reports() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    reporter = StatusReporter(writing)
    for _ in range(3):
        reporter.report(Notice(text="x" * PIPE_BYTES))
    os.close(reading)
    reporter.report(Notice(text="nobody reads this"))
    os.close(writing)
