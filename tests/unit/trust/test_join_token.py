"""The join token: what is typed, mistyped, kept in files and never shown."""

from __future__ import annotations

import os
import stat
import termios
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import JoinTokenError, UsageError, WrongClusterError
from penstock.trust import token_prompt
from penstock.trust.cancellation import Cancellation, CancelledError
from penstock.trust.join_token import PIN_BYTES, SECRET_BYTES, JoinToken, head_token, worker_token
from penstock.trust.token_prompt import ask_token

KEY, OTHER_KEY = b"a public key", b"another public key"
TOKEN = JoinToken(bytes(range(16)), bytes(range(16, 32)))


def test_a_token_has_one_text_for_ever() -> None:
    """Its form must not change: tokens of files outlive an update."""
    assert TOKEN.text() == "A-AAAQ-EAYE-AUDA-OCAJ-BIFQ-YDIO-B4IB-CEQT-CQKR-MFYY-DENB-WHA5-DYPS-VUBG"


@given(
    st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES), st.binary(min_size=PIN_BYTES, max_size=PIN_BYTES)
)
def test_a_token_is_read_as_it_is_written(secret: bytes, pin: bytes) -> None:
    token = JoinToken(secret, pin)
    assert JoinToken.parse(token.text()).text() == token.text()


def test_two_tokens_of_a_cluster_differ_and_have_its_pin() -> None:
    one, two = JoinToken.new(KEY), JoinToken.new(KEY)
    assert one.text() != two.text()
    assert one.proof_key() != two.proof_key()
    assert one.is_pin_of(KEY)
    assert not one.is_pin_of(OTHER_KEY)


@pytest.mark.parametrize(
    "typed",
    [
        TOKEN.text().lower(),
        TOKEN.text().replace("-", ""),
        TOKEN.text().replace("-", "  "),
        f"\t{TOKEN.text()}\r\n",
        TOKEN.text().replace("O", "0").replace("I", "1"),
        TOKEN.text().replace("-", "\n"),
    ],
)
def test_a_token_may_be_typed_as_people_type(typed: str) -> None:
    assert JoinToken.parse(typed).text() == TOKEN.text()


ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


@given(st.integers(min_value=1, max_value=56), st.sampled_from(ALPHABET))
def test_a_wrong_character_is_told_apart_from_a_wrong_token(place: int, letter: str) -> None:
    text = TOKEN.text().replace("-", "")
    typed = text[:place] + letter + text[place + 1 :]
    if typed == text:
        return
    with pytest.raises(JoinTokenError) as caught:
        JoinToken.parse(typed)
    assert caught.value.code == "mistyped_token"


@given(st.integers(min_value=1, max_value=55))
def test_two_exchanged_characters_are_found(place: int) -> None:
    text = TOKEN.text().replace("-", "")
    typed = text[:place] + text[place + 1] + text[place] + text[place + 2 :]
    if typed != text:
        with pytest.raises(JoinTokenError):
            JoinToken.parse(typed)


@given(st.text(max_size=120))
def test_any_other_text_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(JoinTokenError) as caught:
        JoinToken.parse("A" + text)
    assert len(text) < 8 or text not in str(caught.value)


@pytest.mark.parametrize("text", ["", "A", "B" + TOKEN.text()[1:], TOKEN.text() + "A", TOKEN.text()[:-1]])
def test_another_version_or_length_is_refused(text: str) -> None:
    with pytest.raises(JoinTokenError, match="mistyped or of another version") as caught:
        JoinToken.parse(text)
    assert "AUDA" not in str(caught.value)


def test_r15_a_token_shows_nothing_of_itself() -> None:
    assert f"{TOKEN!r} {TOKEN} {[TOKEN]}" == "JoinToken(…) JoinToken(…) [JoinToken(…)]"
    assert not hasattr(TOKEN, "__dict__")


# --- files ----------------------------------------------------------------------------------------


def test_r15_the_head_writes_its_token_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    made = head_token(path, KEY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == made.text() + "\n"
    assert head_token(path, KEY).text() == worker_token(path).text() == made.text()


def test_a_token_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    head_token(path, KEY)
    path.chmod(0o644)
    for read in (lambda: head_token(path, KEY), lambda: worker_token(path)):
        with pytest.raises(UsageError, match="other users have access"):
            read()


def test_a_token_file_of_another_cluster_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "token"
    made = head_token(path, KEY)
    with pytest.raises(WrongClusterError, match="another cluster") as caught:
        head_token(path, OTHER_KEY)
    assert made.text() not in str(caught.value)
    assert worker_token(path).text() == made.text()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"hello"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(JoinTokenError):
        worker_token(path)
    with pytest.raises(JoinTokenError):
        head_token(path, KEY)
    assert path.read_bytes() == content


def test_a_worker_without_a_file_is_asked_again_after_a_slip() -> None:
    typed, prompts = iter(["A-AAAQ", TOKEN.text()]), []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        return next(typed)

    assert ask_token(ask).text() == TOKEN.text()
    assert prompts[0] == "Join token: "
    assert "mistyped" in prompts[1]


def test_asking_ends_after_three_slips_or_without_a_terminal() -> None:
    count = iter(range(10))
    with pytest.raises(JoinTokenError, match="mistyped"):
        ask_token(lambda _: str(next(count)))
    assert next(count) == 3

    def nobody(prompt: str) -> str:
        raise EOFError

    with pytest.raises(JoinTokenError, match="no join token was given"):
        ask_token(nobody)


class Terminal:
    """A terminal at which a test types, with a thread that asks for a line there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys, self._screen = os.openpty()
        monkeypatch.setattr(token_prompt, "_TERMINAL", os.ttyname(self._screen))
        self.cancellation = Cancellation()
        self.lines: list[str | type[Exception]] = []
        self._thread = threading.Thread(target=self._ask)

    @property
    def shows_typing(self) -> bool:
        return bool(termios.tcgetattr(self._screen)[3] & termios.ECHO)

    def __enter__(self) -> Terminal:
        self._thread.start()
        assert os.read(self.keys, 100) == b"Join token: "
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(30.0)
        os.close(self.keys)
        os.close(self._screen)

    def _ask(self) -> None:
        try:
            self.lines.append(token_prompt.typed_line("Join token: ", self.cancellation))
        except CancelledError as error:
            self.lines.append(type(error))


def test_r15_what_is_typed_at_a_terminal_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal(monkeypatch) as terminal:
        assert not terminal.shows_typing
        os.write(terminal.keys, b"A-AAAQ\nnext")
        assert os.read(terminal.keys, 100) == b"\r\n"
        assert terminal.shows_typing
    assert terminal.lines == ["A-AAAQ"]


def test_r15_a_worker_that_is_to_end_does_not_wait_for_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with Terminal(monkeypatch) as terminal:
        terminal.cancellation.cancel()
        assert os.read(terminal.keys, 100) == b"\r\n"
        assert terminal.shows_typing, "as before"
    assert terminal.lines == [CancelledError]
