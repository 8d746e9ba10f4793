"""What is shown of many prompts, and where."""

from __future__ import annotations

import io
import sys

import pytest

from penstock.llm.progress import progress_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, total: int, wanted: bool | None) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_of(total, wanted) as progress:
        for _ in range(total):
            progress.advance()
    return stream.getvalue()


def test_without_a_terminal_a_line_for_each_tenth_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO(), 25, True).splitlines() == [
        f"{count} of 25 prompts" for count in (3, 5, 8, 10, 13, 15, 18, 20, 23, 25)
    ]
    assert shown(monkeypatch, io.StringIO(), 2, True) == "1 of 2 prompts\n2 of 2 prompts\n"


@pytest.mark.parametrize("wanted", [None, False])
def test_nothing_without_a_terminal_unless_asked(
    monkeypatch: pytest.MonkeyPatch, wanted: bool | None
) -> None:
    assert shown(monkeypatch, io.StringIO(), 25, wanted) == ""


@pytest.mark.parametrize("wanted", [None, True])
def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, wanted: bool | None) -> None:
    bar = shown(monkeypatch, Terminal(), 25, wanted)
    assert "prompts" in bar
    assert "100%" in bar


def test_silence_on_a_terminal_where_asked_and_for_no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, Terminal(), 25, False) == ""
    assert shown(monkeypatch, Terminal(), 0, True) == ""
    assert shown(monkeypatch, Terminal(), 1, None) == "", "there is nothing to watch"
