"""Attempts to join beside the agent: they are seen when they have ended, and are ended wherever they wait."""

from __future__ import annotations

import os
import select
import socket
import threading
from pathlib import Path

import pytest

from clusters import WAIT_S
from penstock.errors import JoinError, LinkClosedError
from penstock.hosts.join_attempts import JoinAttempts
from penstock.hosts.local_process import Descriptor
from penstock.hosts.station import WorkerSettings
from penstock.hosts.worker import Worker
from penstock.process.link_ports import PortRange
from penstock.trust.cancellation import Cancellation
from penstock.trust.credentials import Credentials
from penstock.trust.join_token import JoinToken
from penstock.trust.joining import JoinedHead, join_with_token
from penstock.trust.peer_names import HEAD_ROLE, PeerName
from penstock.trust.token_prompt import GivenTokens

TOKEN = JoinToken(bytes(16), bytes(16))
SECRET = Credentials(key_pem=b"key", certificate_pem=b"certificate", authority_pem=b"authority")


def head_at(connection: socket.socket) -> JoinedHead:
    name = PeerName(cluster="a" * 32, host="tower", role=HEAD_ROLE)
    return JoinedHead(connection, name, SECRET, ("127.0.0.1", 1))  # type: ignore[arg-type]  # no TLS


def await_end(attempts: JoinAttempts) -> None:
    assert select.select([attempts], [], [], WAIT_S)[0]


def test_r15_an_attempt_ends_with_the_head_or_with_its_error_and_another_one_may_begin() -> None:
    ours, theirs = socket.socketpair()
    results: list[JoinedHead | LinkClosedError] = [head_at(ours), LinkClosedError("away")]

    def join(cancellation: Cancellation) -> JoinedHead:
        cancellation.add(ours)
        result = results.pop()
        if isinstance(result, LinkClosedError):
            raise result
        return result

    attempts = JoinAttempts(join)
    attempts.begin()
    await_end(attempts)
    with pytest.raises(LinkClosedError, match="away"):
        attempts.take()
    assert not select.select([attempts], [], [], 0.0)[0]
    attempts.begin()
    await_end(attempts)
    assert attempts.take().connection is ours
    attempts.close()
    ours.sendall(b"still open: it belongs to whoever has taken it")
    ours.close()
    theirs.close()


def test_r16_an_attempt_for_which_no_thread_can_be_started_fails_and_the_next_one_may_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    attempts = JoinAttempts(lambda _: head_at(ours))

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_thread)
        attempts.begin()
    await_end(attempts)
    with pytest.raises(JoinError, match="can't start new thread"):
        attempts.take()
    attempts.begin()
    await_end(attempts)
    attempts.take().connection.close()
    attempts.close()
    theirs.close()


def test_r15_a_head_that_nobody_takes_any_more_is_hung_up_on() -> None:
    ours, theirs = socket.socketpair()
    attempts = JoinAttempts(lambda _: head_at(ours))
    attempts.begin()
    await_end(attempts)
    attempts.close()
    assert theirs.recv(1) == b""
    theirs.close()


@pytest.mark.parametrize("waits", ["for the handshake", "to connect"])
def test_r15_an_attempt_is_ended_at_once_where_the_head_says_nothing(tmp_path: Path, waits: str) -> None:
    waiting = threading.Event()
    with socket.socket() as listener, socket.socket() as filling:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        if waits == "to connect":
            filling.connect(address)  # which takes the only place: nobody accepts

        def join(cancellation: Cancellation) -> JoinedHead:
            def hold(each: socket.socket) -> None:
                cancellation.add(each)
                waiting.set()

            path = tmp_path / "credentials"
            join_with_token(address, TOKEN, host="desk", version="1", path=path, timeout_s=WAIT_S, hold=hold)
            raise AssertionError("nobody was there")

        attempts = JoinAttempts(join)
        attempts.begin()
        assert waiting.wait(WAIT_S)
        attempts.close()
        assert not attempts._thread.is_alive()


def test_r15_a_worker_ends_when_it_is_to_while_it_joins(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN.text())
    token.chmod(0o600)
    stop, ending = os.pipe()
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = WorkerSettings(
            head=listener.getsockname(), name="desk", state=tmp_path / "state", ports=PortRange(0, 0)
        )
        worker = Worker(settings, GivenTokens(token), said.append, Descriptor(stop))
        thread = threading.Thread(target=worker.run)
        thread.start()
        with listener.accept()[0]:  # and says nothing
            os.write(ending, b"!")
            thread.join(WAIT_S)
            assert not thread.is_alive()
    assert said == ["desk was asked to end."]
    os.close(stop)
    os.close(ending)
