"""The hosts of an engine: who is waited for, who is let back in, and what an engine over hosts refuses."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from descriptors import no_descriptor_left
from penstock.config.engine import EngineConfig, ModelConfig, ParallelConfig
from penstock.config.hosts import HostsConfig
from penstock.errors import PortInUseError, UnavailableError, UsageError
from penstock.hosts import gathering, revocations, worker
from penstock.hosts.gathering import GatheredHosts
from penstock.hosts.launchers.backends import open_hosts
from penstock.hosts.launchers.engine_hosts import OneHost, Voices
from penstock.hosts.network import link_measuring, path_finding
from penstock.hosts.network.joining_address import listen_for_workers
from penstock.hosts.network.scout import Scout
from penstock.hosts.remote_host import RemoteHost, RemoteMember
from penstock.hosts.station import WorkerSettings
from penstock.hosts.worker import Worker
from penstock.process.link_ports import PortRange
from penstock.trust.admission import AdmissionBook
from penstock.trust.token_prompt import GivenTokens
from real_servers import free_ports

WAIT_S = 30.0


def engine_of(directory: Path, port: int = 0, **changed: Any) -> EngineConfig:
    port = port or free_ports(1)[0]
    cluster = HostsConfig(
        hosts=2,
        listen_workers=f"127.0.0.1:{port}",
        join_token_file=str(directory / "token"),
        host_name="tower",
        state_dir=str(directory / "tower"),
    )
    given: dict[str, Any] = {
        "parallel": ParallelConfig(pipeline_parallel_size=2),
        "cluster": cluster,
        **changed,
    }
    return EngineConfig(model=ModelConfig(model="demo"), **given)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"parallel": ParallelConfig()}, "--hosts is 2, but the pipeline has 1 stage"),
    ],
)
def test_g1_an_engine_over_hosts_refuses_what_it_cannot_do_there(
    tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        open_hosts(engine_of(tmp_path, **changed), Voices(print, print))
    assert caught.value.remedy
    assert not (tmp_path / "token").exists()


def test_one_host_is_there_at_once(tmp_path: Path) -> None:
    alone = open_hosts(engine_of(tmp_path, cluster=HostsConfig()), Voices(print, print))
    assert isinstance(alone, OneHost)
    alone.gather([])
    alone.admit()
    alone.tend(0.0)
    assert len(alone.hosts) == 1
    alone.close()


def test_an_address_that_is_taken_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(PortInUseError, match=r"cannot listen for workers at 127\.0\.0\.1:") as caught,
    ):
        open_hosts(engine_of(tmp_path, other.getsockname()[1]), Voices(print, print))
    assert "--listen-workers" in caught.value.remedy


def no_room(*arguments: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("part", ["OwnScout", "listen_for_workers", "WorkerGate", "loopback_warning"])
def test_a_head_that_cannot_begin_leaves_no_socket_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    listeners: list[socket.socket] = []

    def listen(host: str, port: int) -> socket.socket:
        listeners.append(listen_for_workers(host, port))
        return listeners[-1]

    monkeypatch.setattr(gathering, "listen_for_workers", listen)
    monkeypatch.setattr(gathering, part, no_room)
    threads = set(threading.enumerate())
    with pytest.raises(OSError, match="Too many open files"):
        open_hosts(engine_of(tmp_path), Voices(print, print))
    assert [listener.fileno() for listener in listeners] == [-1] * len(listeners)
    assert set(threading.enumerate()) <= threads


class Joining:
    """A head, and a worker in a thread that serves no rank."""

    def __init__(self, directory: Path) -> None:
        self.told: list[str] = []
        self.shown: list[tuple[str, str, str]] = []
        self.said: list[str] = []
        self._engine = engine = engine_of(directory)
        self.gathered = self._open()
        host, _, port = str(engine.cluster.listen_workers).rpartition(":")
        self.settings = WorkerSettings(
            head=(host, int(port)), name="desk", state=directory / "desk", ports=PortRange(0, 0)
        )
        self._token = directory / "token"
        self._threads: list[threading.Thread] = []
        self._stops: list[tuple[int, int]] = []

    def _open(self) -> GatheredHosts:
        say = self.told.append
        gathered = open_hosts(self._engine, Voices(say, say, lambda *line: self.shown.append(line)))
        assert isinstance(gathered, GatheredHosts)
        return gathered

    def restart_head(self, num_workers: int = 1) -> None:
        """The head is gone, and another one is there in its place, for so many workers."""
        self.gathered.close()
        cluster = msgspec.structs.replace(self._engine.cluster, hosts=num_workers + 1)
        parallel = ParallelConfig(pipeline_parallel_size=num_workers + 1)
        self._engine = msgspec.structs.replace(self._engine, cluster=cluster, parallel=parallel)
        self.told.clear()
        self.gathered = self._open()

    def start_worker(self, name: str = "desk") -> Callable[[], None]:
        """Returns what ends it."""
        settings = msgspec.structs.replace(self.settings, name=name, state=self.settings.state / name)
        reading, writing = os.pipe()
        self._stops.append((reading, writing))

        class Stop:
            def fileno(self) -> int:
                return reading

        life = Worker(settings, GivenTokens(self._token), self.said.append, Stop())
        thread = threading.Thread(target=life.run)
        thread.start()
        self._threads.append(thread)

        def end() -> None:
            os.write(writing, b"!")
            thread.join(WAIT_S)
            assert not thread.is_alive()

        return end

    def await_told(self, words: str) -> None:
        for _ in range(round(WAIT_S / 0.05)):
            if any(words in line for line in self.told):
                return
            self.gathered.admit()
            for host in self.gathered.hosts.values():
                host.resources()  # hears what has come
            threading.Event().wait(0.05)
        raise AssertionError(self.told)

    def await_said(self, line: str) -> None:
        """Wait until a worker has said this line."""
        for _ in range(round(WAIT_S / 0.05)):
            if line in self.said:
                return
            threading.Event().wait(0.05)
        raise AssertionError(self.said)

    def book(self) -> AdmissionBook:
        """The book of the head, as another process opens it."""
        return AdmissionBook(Path(str(self._engine.cluster.state_dir)) / "head", time.time)

    def close(self) -> None:
        self.gathered.close()
        for thread, stop in zip(self._threads, self._stops, strict=True):
            os.write(stop[1], b"!")
            thread.join(WAIT_S)
            for end in stop:
                os.close(end)


@pytest.fixture
def joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Joining]:
    monkeypatch.setattr(path_finding, "MEASURING_S", 0.0)
    monkeypatch.setattr(link_measuring, "LIMIT_S", 60.0)  # that a slow thread may take
    monkeypatch.setattr(worker, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(worker, "MOST_PAUSE_S", 0.2)
    made = Joining(tmp_path)
    yield made
    made.close()


def test_g1_the_head_says_what_to_type_and_waits_until_all_are_there(joining: Joining) -> None:
    address = "{}:{}".format(*joining.settings.head)
    assert joining.told == [
        "waiting for 1 worker; on the other host type:\n"
        f"  penstock worker --join {address} --join-token-file {joining._token}",
        "links from other hosts use the ports 7701-7732 of this host (--link-ports)",
    ]
    joining.start_worker()
    joining.gathered.gather([])
    assert list(joining.gathered.hosts) == ["tower", "desk"]
    assert [host.name for host in joining.gathered.hosts.resources()] == ["tower", "desk"]
    assert "desk has joined from 127.0.0.1:" in joining.told[-2]
    assert "links between desk and tower use lo (127.0.0.1) to lo (127.0.0.1): " in joining.told[-1]
    (link,) = joining.gathered.hosts.routes.links()
    assert (link.hosts, link.interfaces) == (("desk", "tower"), ("lo", "lo"))


def test_g1_a_worker_that_leaves_is_told_and_comes_back_as_the_same_host(joining: Joining) -> None:
    end = joining.start_worker()
    joining.gathered.gather([])
    host = joining.gathered.hosts["desk"]
    end()
    joining.await_told("lost: the host desk: its worker has ended.")
    assert not host.is_there
    joining.told.clear()
    joining.start_worker()  # with its certificate: the token is used up
    joining.await_told("desk has joined")
    assert host.is_there


def test_r16_a_worker_for_which_the_head_has_no_descriptor_comes_back_and_the_engine_goes_on(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RemoteHost] = []

    def fail(*given: Any, **named: Any) -> RemoteHost:
        monkeypatch.setattr(gathering, "RemoteHost", make)
        raise OSError("an error without a number")

    def make(*given: Any, **named: Any) -> RemoteHost:
        monkeypatch.setattr(gathering, "RemoteHost", RemoteHost)
        with no_descriptor_left():
            made.append(RemoteHost(*given, **named))
        raise AssertionError("there was a descriptor")

    monkeypatch.setattr(gathering, "RemoteHost", fail)
    joining.start_worker()
    joining.gathered.gather([])
    assert joining.gathered.hosts.names_there == ["tower", "desk"]
    assert made == []
    for why in ("an error without a number", "Too many open files"):
        assert f"the worker desk cannot be let in at the moment: {why}" in joining.told


def test_r15_a_broken_connection_is_made_anew_and_the_host_is_not_lost(joining: Joining) -> None:
    joining.start_worker()
    joining.gathered.gather([])
    host = joining.gathered.hosts["desk"]
    assert isinstance(host, RemoteHost)
    member = host._made(RemoteMember, "stage 1", 1, 1)  # something that runs there, as far as the head knows
    host._wire.connection.give_up("a test has broken it.")
    joining.await_told("desk is back after a broken connection; its ranks kept running")
    assert host.is_there
    assert member.exit_code is None
    assert not any("lost" in line for line in joining.told)


def test_r15_a_worker_survives_the_restart_of_its_head_and_comes_back_with_its_certificate(
    joining: Joining,
) -> None:
    joining.start_worker()
    joining.gathered.gather([])
    joining.restart_head()
    joining.gathered.gather([])  # the token is used up
    assert list(joining.gathered.hosts) == ["tower", "desk"]
    assert any("the head is lost" in line for line in joining.said)


def test_r15_another_worker_may_have_the_place_of_a_lost_one_which_may_come_back(joining: Joining) -> None:
    """Both have certificates, of a head that has served with two workers."""
    joining.restart_head(num_workers=2)
    ends = {name: joining.start_worker(name) for name in ("desk", "shelf")}
    joining.gathered.gather([])
    joining.restart_head()
    joining.gathered.gather([])
    _, first = joining.gathered.hosts
    (standing_by,) = set(ends) - {first}
    joining.await_told(f"{standing_by} has joined")
    assert joining.gathered.hosts.names_there == ["tower", first, standing_by]
    ends[first]()
    joining.await_told(f"lost: the host {first}")
    assert joining.gathered.hosts.names_there == ["tower", standing_by]
    joining.told.clear()
    joining.start_worker(first)
    joining.await_told(f"{first} has joined")
    assert set(joining.gathered.hosts.names_there) == {"tower", "desk", "shelf"}


def at_first_search(joining: Joining, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Let something happen as soon as ways are looked for, once."""
    find, left = joining.gathered._search.find, [happens]

    def note(one: Scout, other: Scout) -> None:
        if left:
            left.pop()()
        find(one, other)

    monkeypatch.setattr(joining.gathered._search, "find", note)


def test_r15_ways_are_looked_for_again_after_a_connection_has_broken_meanwhile(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_connection() -> None:
        joining.gathered._workers["desk"]._wire.connection.give_up("a test has broken it.")

    at_first_search(joining, monkeypatch, break_connection)
    joining.start_worker()
    joining.gathered.gather([])
    assert any("desk is back after a broken connection" in line for line in joining.told)
    assert "the connection to the host desk is broken" in "".join(joining.told)
    assert joining.gathered.hosts.names_there == ["tower", "desk"]
    (link,) = joining.gathered.hosts.routes.links()
    assert link.hosts == ("desk", "tower")


def test_r15_a_worker_that_is_lost_while_ways_are_looked_for_is_replaced(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining.restart_head(num_workers=2)
    ends = {name: joining.start_worker(name) for name in ("desk", "shelf")}
    joining.gathered.gather([])
    joining.restart_head()
    at_first_search(joining, monkeypatch, lambda: ends[next(iter(joining.gathered._workers))]())
    joining.gathered.gather([])
    lost, other = joining.gathered._workers
    assert list(joining.gathered.hosts) == joining.gathered.hosts.names_there == ["tower", other]
    (link,) = joining.gathered.hosts.routes.links()
    assert set(link.hosts) == {"tower", other}
    joining.told.clear()
    joining.start_worker(lost)
    joining.await_told(f"{lost} has joined")
    assert joining.gathered.hosts.names_there == ["tower", other, lost], "it stands by"


def test_r15_a_connection_that_breaks_before_the_engine_begins_is_made_anew(joining: Joining) -> None:
    """So it is while ranks are measured. Nobody else is let in, as the engine is planned without."""
    joining.restart_head(num_workers=2)
    for name in ("desk", "shelf"):
        joining.start_worker(name)
    joining.gathered.gather([])
    joining.restart_head()
    joining.gathered.gather([])
    hosts = joining.gathered.hosts
    _, first = hosts
    host = hosts[first]
    assert isinstance(host, RemoteHost)
    joining.gathered._not_needed.clear()  # so that it is said again of who tries again
    joining.told.clear()
    host._wire.connection.give_up("a test has broken it.")
    for words in (f"{first} is back", "is not needed"):
        for _ in range(round(WAIT_S / 0.05)):
            if any(words in line for line in joining.told):
                break
            hosts.tend(time.monotonic())
            threading.Event().wait(0.05)
        assert words in "".join(joining.told)
    assert hosts.names_there == ["tower", first]
    other = {"desk": "shelf", "shelf": "desk"}[first]
    joining.await_said(f"{other} is not needed yet: all hosts have joined. This host tries again.")


def test_r15_what_a_worker_says_appears_at_the_head_with_its_name(joining: Joining) -> None:
    joining.start_worker()
    joining.gathered.gather([])
    for _ in range(round(WAIT_S / 0.05)):
        if joining.shown:
            break
        joining.gathered.hosts["desk"].resources()  # hears what has come
        threading.Event().wait(0.05)
    host, process, line = joining.shown[0]
    assert (host, process) == ("desk", "")
    assert line in joining.said
    assert "links from other hosts use" in line


def test_r15_a_host_that_is_revoked_while_it_is_connected_is_shut_out(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revocations, "LOOK_EVERY_S", 1e-6)
    joining.start_worker()
    joining.gathered.gather([])
    host = joining.gathered.hosts["desk"]
    joining.gathered.tend(time.monotonic())
    assert host.is_there
    assert joining.book().revoke_host("desk")  # as `penstock hosts revoke` does, in another process
    joining.gathered.tend(time.monotonic())
    assert not host.is_there
    assert (
        "lost: the host desk: its certificate is revoked, or another worker has joined under its name."
        in joining.told
    )
    joining.await_told("the certificate of the host desk is revoked")  # as it tries again
    joining.await_told("the join token is used up")
    assert any("desk is revoked" in line and "A token is needed" in line for line in joining.said)


def test_r15_a_host_that_is_revoked_while_stages_are_measured_is_shut_out(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revocations, "LOOK_EVERY_S", 1e-6)
    joining.start_worker()
    joining.gathered.gather([])
    host = joining.gathered.hosts["desk"]
    joining.gathered.hosts.tend(time.monotonic())
    assert host.is_there
    assert joining.book().revoke_host("desk")
    joining.gathered.hosts.tend(time.monotonic())
    assert not host.is_there


@pytest.mark.parametrize("why", ["used up", "revoked"])
def test_r15_a_head_whose_token_lets_nobody_join_says_so_at_its_start(joining: Joining, why: str) -> None:
    joining.start_worker()
    joining.gathered.gather([])
    joining.restart_head()
    assert not any("token is" in line for line in joining.told)  # the worker has a certificate
    joining.book().revoke_host("desk")
    if why == "revoked":
        joining.book().revoke_all_tokens()
    joining.restart_head()
    (warning,) = [
        line for line in joining.told if f"token {'was' * (why == 'revoked') or 'is'} {why}" in line
    ]
    assert "0 of 1 worker can return" in warning
    assert "Delete the token file" in warning


def test_g1_nobody_is_waited_for_when_whoever_wanted_the_engine_is_gone(joining: Joining) -> None:
    here, there = socket.socketpair()
    there.close()
    with here, pytest.raises(UnavailableError, match="has ended"):
        joining.gathered.gather([here])
