"""Output that is held up or fails never holds up whoever speaks [R16]."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest

from penstock.cli.serve import _dropped_as_json
from penstock.cli.terminal import Invocation
from penstock.cli.worker import worker
from penstock.process.output_thread import OutputThread
from penstock.server.api_process import _dropped_line

LONG_S = 30.0  # a deadline against hanging


class Terminal(io.StringIO):
    """A stream without a descriptor, which a test stops and breaks.

    Attributes:
        may_go_on: set unless it is stopped, as by Ctrl-S.
        is_reached: set once something is to be written.
        error: raised instead of writing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on, self.is_reached = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        self.is_reached.set()
        assert self.may_go_on.wait(LONG_S)
        if self.error is not None:
            raise self.error
        return super().write(text)


def invocation(stdout: TextIO, stderr: TextIO | None = None) -> Invocation:
    return Invocation(stdout=stdout, stderr=stderr or stdout, stdin=io.StringIO(), environ={})


def beside(output: OutputThread) -> Invocation:
    return invocation(output.stdout, output.stderr)


@dataclass
class Rig:
    """Output to a terminal that a test plays, of which three texts may wait."""

    terminal: Terminal
    output: OutputThread

    def say(self, *lines: str) -> None:
        beside(self.output).say(*lines)


@pytest.fixture
def rig() -> Iterator[Rig]:
    terminal = Terminal()
    with closing(OutputThread(terminal, terminal, max_waiting=3)) as output:
        yield Rig(terminal, output)
        terminal.may_go_on.set()


def test_r16_lines_come_in_their_order_those_of_both_streams(rig: Rig) -> None:
    for number in range(3):
        rig.say(f"line {number}")
        beside(rig.output).warn(f"of {number}")
        assert rig.output.settle(LONG_S)
    expected = "".join(f"line {number}\nwarning: of {number}\n" for number in range(3))
    assert rig.terminal.getvalue() == expected


def test_r16_a_stopped_terminal_holds_up_nobody_and_learns_how_much_it_has_missed(rig: Rig) -> None:
    rig.terminal.may_go_on.clear()
    rig.say("0")
    assert rig.terminal.is_reached.wait(LONG_S)
    rig.say("1", "2", "3", "4", "5")
    assert not rig.output.settle(0.0)
    rig.terminal.may_go_on.set()
    assert rig.output.settle(LONG_S)
    rig.say("6")
    assert rig.output.settle(LONG_S)
    written = "0\n1\n2\n3\nlines lost because the output was blocked: 2\n6\n"
    assert rig.terminal.getvalue() == written


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError()])
def test_r16_output_that_fails_is_no_error_of_who_speaks(rig: Rig, error: OSError) -> None:
    rig.terminal.error = error
    rig.say("0")
    assert rig.output.settle(LONG_S)
    rig.say("1")
    assert rig.output.settle(LONG_S)
    rig.terminal.error = None
    rig.say("2")
    assert rig.output.settle(LONG_S)
    assert rig.terminal.getvalue() == "lines lost because the output was blocked: 2\n2\n"


@pytest.mark.parametrize(
    ("dropped_line", "said"),
    [
        (_dropped_as_json, '"text":"Lines lost because the output was blocked: 2."'),
        (partial(_dropped_line, "json"), '"text":"lines lost because the output was blocked","lines":2'),
        (partial(_dropped_line, "text"), "lines lost because the output was blocked"),
    ],
)
def test_r16_each_form_of_the_log_says_how_much_was_lost(
    dropped_line: Callable[[int], str], said: str
) -> None:
    terminal = Terminal()
    with closing(OutputThread(terminal, terminal, dropped_line)) as output:
        terminal.error = OSError(28, "No space left on device")
        for text in "01":
            beside(output).say(text)
            assert output.settle(LONG_S)
        terminal.error = None
        beside(output).say("2")
        assert output.settle(LONG_S)
    lost, line = terminal.getvalue().splitlines()
    assert said in lost
    assert line == "2"


def test_r16_what_waits_is_written_at_the_end_for_a_bounded_time() -> None:
    terminal = Terminal()
    output = OutputThread(terminal, terminal)
    beside(output).say("the last word")
    output.close(LONG_S)
    assert terminal.getvalue() == "the last word\n"
    terminal = Terminal()
    terminal.may_go_on.clear()
    output = OutputThread(terminal, terminal)
    beside(output).say("the last word")
    output.close(0.0)
    assert terminal.getvalue() == ""
    terminal.may_go_on.set()
    assert output.settle(LONG_S)


def test_r16_a_word_that_comes_with_the_end_holds_nobody_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of a thread that looks up the head's name, when its worker is told to end."""
    settle = rig.output.settle

    def settle_and_speak(timeout_s: float) -> bool:
        is_settled = settle(LONG_S)
        rig.terminal.may_go_on.clear()
        rig.say("too late")
        return is_settled

    with monkeypatch.context() as patched:
        patched.setattr(rig.output, "settle", settle_and_speak)
        rig.output.close(0.01)
    assert rig.terminal.is_reached.wait(LONG_S)
    assert rig.output._thread.is_alive(), "it is held up still"


def test_r16_a_full_pipe_is_written_to_at_once_and_past_pythons_buffers() -> None:
    """A thread that is held up within such a buffer would hold up the end of the program."""
    reader, writer = os.pipe()
    with (
        os.fdopen(reader) as out,
        os.fdopen(writer, "w") as stream,
        closing(OutputThread(stream, stream)) as output,
    ):
        beside(output).say("é" * 3, "ready")
        assert (out.readline(), out.readline()) == ("ééé\n", "ready\n")
        assert not output.stdout.isatty()


def test_r16_a_worker_with_a_full_disk_under_its_output_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TalkingWorker:
        def __init__(self, settings: object, token: object, tell: Any, stop: object, **_: object) -> None:
            self._tell = tell

        def run(self) -> None:
            self._tell("desk has joined tower")
            has_run.append(True)

    has_run: list[bool] = []
    monkeypatch.setattr("penstock.hosts.worker.Worker", TalkingWorker)
    monkeypatch.setattr("penstock.process.child.show_threads_on_request", lambda: None)
    terminal = Terminal()
    terminal.error = OSError(28, "No space left on device")
    given = invocation(terminal)
    assert worker(join="127.0.0.2:7700", name="desk", state_dir=tmp_path, invocation=given) == 0
    assert has_run == [True]
