"""Directories of running processes: kept while somebody holds them, deleted once nobody does."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.trust import held_directories
from penstock.trust.held_directories import HeldDirectory, delete_unheld

HOLDER = """
import sys, time
from pathlib import Path
from penstock.trust.held_directories import HeldDirectory
held = HeldDirectory(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_r16_what_a_killed_process_has_left_is_deleted_and_what_a_living_one_holds_is_kept(
    tmp_path: Path,
) -> None:
    other, own = tmp_path / "other", HeldDirectory(tmp_path / "own")
    command = [sys.executable, "-c", HOLDER, str(other)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        delete_unheld(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"own", "other"}
        process.send_signal(signal.SIGKILL)
    delete_unheld(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
    own.release()


def test_several_hold_one_directory_and_find_what_the_first_has_left(tmp_path: Path) -> None:
    first = HeldDirectory(tmp_path / "shared")
    (first.path / "name").write_text("left", encoding="utf-8")
    second = HeldDirectory(tmp_path / "shared")
    first.release()
    first.release()
    delete_unheld(tmp_path)
    assert (second.path / "name").read_text(encoding="utf-8") == "left"
    second.delete()
    second.delete()
    assert not list(tmp_path.iterdir())


def test_a_directory_that_another_deletes_before_it_is_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = held_directories.make_private_directory
    deletions: list[Callable[[], None]] = [lambda: delete_unheld(tmp_path)]

    def made_and_deleted(path: Path) -> None:
        make(path)
        if deletions:
            deletions.pop()()

    monkeypatch.setattr(held_directories, "make_private_directory", made_and_deleted)
    held = HeldDirectory(tmp_path / "name")
    delete_unheld(tmp_path)
    assert held.path.is_dir()
    held.delete()


def test_a_directory_that_others_may_enter_and_a_link_are_not_held(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="other users have access"):
        HeldDirectory(tmp_path / "open")
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(UsageError, match="cannot be used"):
        HeldDirectory(tmp_path / "link")
    delete_unheld(tmp_path)
    assert (tmp_path / "link").is_symlink(), "only directories are deleted"
