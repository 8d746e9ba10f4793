"""Memory that a process has freed goes back to the system."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from penstock.process.host_memory import give_back_freed_pages


def test_freed_memory_is_returned_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=asked.append))
    give_back_freed_pages()
    assert asked == [0]
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    give_back_freed_pages()  # musl has no such function
