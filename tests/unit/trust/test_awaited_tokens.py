"""The token of hosts that are started all at once: the first of them writes it, the others wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.trust.cancellation import Cancellation, CancelledError
from penstock.trust.join_token import JoinToken
from penstock.trust.private_files import create_private
from penstock.trust.token_prompt import LOOK_S, AwaitedTokens

TOKEN = JoinToken(bytes(16), bytes(16))


class Patience(Cancellation):
    """Does not wait; the file is there after some looks."""

    def __init__(self, path: Path, looks: int) -> None:
        super().__init__()
        self._path = path
        self._looks = looks
        self.waited_s = 0.0

    def pause(self, seconds: float) -> None:
        self.waited_s += seconds
        self._looks -= 1
        if self._looks == 0:
            create_private(self._path, TOKEN.text().encode())
        self.check()


def test_i2_a_token_that_the_head_still_writes_is_waited_for(tmp_path: Path) -> None:
    patience = Patience(tmp_path / "token", looks=3)
    tokens = AwaitedTokens(tmp_path / "token", 600.0)
    assert tokens.at_hand() is None
    assert tokens.ask(patience).text() == TOKEN.text()
    assert patience.waited_s == pytest.approx(3 * LOOK_S)
    assert tokens.at_hand() is not None


def test_i2_one_that_never_comes_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    patience = Patience(tmp_path / "token", looks=-1)
    with pytest.raises(UsageError, match="does not exist"):
        AwaitedTokens(tmp_path / "token", 2.0).ask(patience)
    assert patience.waited_s == pytest.approx(2.0)


def test_i2_a_worker_that_is_to_end_waits_no_longer(tmp_path: Path) -> None:
    patience = Patience(tmp_path / "token", looks=-1)
    patience.cancel()
    with pytest.raises(CancelledError):
        AwaitedTokens(tmp_path / "token", 600.0).ask(patience)
