"""The head in the local network: what is announced, who believes it, and how a worker looks for it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.hosts.bell import Bell
from penstock.hosts.launchers.announced import Announced
from penstock.hosts.launchers.starter import WantedWorkers
from penstock.hosts.network import discovery, head_search
from penstock.hosts.network.discovery import SERVICE, Address, HeadSearch, head_address
from penstock.hosts.network.head_search import found_head, head_elsewhere
from penstock.hosts.network.interfaces import HostAddress, Medium
from penstock.trust.cancellation import Cancellation, CancelledError
from penstock.trust.join_token import JoinToken

OURS, OTHER = "ab" * 16, "cd" * 16


class Service:
    """What the library makes of an announcement."""

    def __init__(self, cluster: str | None, port: int | None, *addresses: str) -> None:
        self.properties = {b"cluster": None if cluster is None else cluster.encode(), b"host": b"tower"}
        self.port = port
        self._addresses = addresses

    def parsed_addresses(self) -> list[str]:
        return list(self._addresses)


@pytest.mark.parametrize(
    ("service", "cluster", "found"),
    [
        (Service(OURS, 7700, "10.0.0.1", "fd00::1"), OURS, ("10.0.0.1", 7700)),
        (Service(OURS, 7700, "fe80::1", "0.0.0.0", "224.0.0.1", "fd00::1"), OURS, ("fd00::1", 7700)),
        (Service(OTHER, 7700, "10.0.0.1"), OURS, None),
        (Service(OTHER, 7700, "10.0.0.1"), "", ("10.0.0.1", 7700)),
        (Service(None, 7700, "10.0.0.1"), OURS, None),
        (Service(OURS, 0, "10.0.0.1"), OURS, None),
        (Service(OURS, None, "10.0.0.1"), OURS, None),
        (Service(OURS, 70_000, "10.0.0.1"), OURS, None),
        (Service(OURS, 7700), OURS, None),
    ],
)
def test_i2_the_head_of_the_tokens_cluster_is_taken_and_no_other(
    service: Service, cluster: str, found: tuple[str, int] | None
) -> None:
    assert head_address(service, cluster, []) == found


def own_address(address: str, prefix: int, medium: Medium = Medium.WIRED) -> HostAddress:
    return HostAddress(address=address, prefix=prefix, interface="eth0", medium=medium, mtu=1500)


@pytest.mark.parametrize(
    ("announced", "found"),
    [
        (["172.17.0.1", "203.0.113.5", "192.168.1.5"], "192.168.1.5"),
        (["172.17.0.1", "203.0.113.5"], "203.0.113.5"),
        (["172.17.0.2", "fd00::5"], "fd00::5"),
        (["172.17.0.1", "192.168.1.7"], "172.17.0.1"),
    ],
    ids=["one network", "by a router", "the better network", "the head is on this host"],
)
def test_i2_a_head_of_several_addresses_is_joined_where_this_host_reaches_it(
    announced: list[str], found: str
) -> None:
    """The library keeps no order, and a bridge of containers has the same address on many hosts."""
    own = [
        own_address("192.168.1.7", 24),
        own_address("fd00::7", 64),
        own_address("172.17.0.1", 16, Medium.INTERNAL),
    ]
    assert head_address(Service(OURS, 7700, *announced), OURS, own) == (found, 7700)


class Library:
    """Stands for zeroconf: a browser hands announcements to the search when a test says so."""

    def __init__(self, service: Service) -> None:
        self.IPVersion = self.state_change = self
        self.All, self.name = None, "Added"
        self._service = service
        self.see: Callable[..., None]

    def Zeroconf(self, **_: object) -> Library:
        return self

    def ServiceBrowser(
        self, _: object, service_type: str, handlers: Sequence[Callable[..., None]]
    ) -> Library:
        (self.see,) = handlers
        return self

    def get_service_info(self, *_: object, timeout: int) -> Service:
        return self._service

    def cancel(self) -> None: ...

    def close(self) -> None: ...


def found_at(*addresses: str) -> Address | None:
    """Return the head that a search finds when one with these addresses is announced."""
    library = Library(Service(OURS, 7700, *addresses))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "zeroconf", library)  # type: ignore[arg-type]
        with closing(HeadSearch(OURS)) as search:
            library.see(library, SERVICE, "tower", library.state_change)
            return search.take()


def test_i2_a_search_prefers_the_addresses_in_networks_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "usable_addresses", lambda: [own_address("192.168.1.7", 24)])
    assert found_at("203.0.113.5", "192.168.1.5") == ("192.168.1.5", 7700)


def test_i2_a_search_goes_on_where_the_addresses_of_this_host_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library's thread would end with the error, and the search would find nothing any more."""

    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(discovery, "usable_addresses", fail)
    assert found_at("192.168.1.5") == ("192.168.1.5", 7700)


class Announcements:
    """Stands for the network."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.num_withdrawn = 0

    def announce(self, *what: Any) -> Any:
        self.made.append(what)
        return self

    def close(self) -> None:
        self.num_withdrawn += 1


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0"])
def test_i2_a_head_is_announced_by_its_cluster_and_withdrawn_at_the_end(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, told = Announcements(), list[str]()
    starter = Announced(told.append, network.announce)
    starter.start(WantedWorkers(1, "tower", OURS, host, 7700, "the token", "7701-7732"))
    ((name, cluster, port, addresses),) = network.made
    assert (name, cluster, port) == ("tower", OURS, 7700)
    assert "0.0.0.0" not in addresses
    assert host == "0.0.0.0" or addresses == [host]
    assert "penstock worker --discover --join-token-file 'the token'" in told[0]
    starter.close()
    starter.close()
    assert network.num_withdrawn == 1


class Search:
    """A search that finds this."""

    def __init__(self, found: list[tuple[str, int]]) -> None:
        self.bell, self.found, self.clusters = Bell(), found, list[str]()
        if found:
            self.bell.ring()

    def begin(self, cluster: str) -> Any:
        self.clusters.append(cluster)
        return self

    def fileno(self) -> int:
        return self.bell.fileno()

    def take(self) -> tuple[str, int] | None:
        return self.found.pop() if self.found else None

    def close(self) -> None:
        self.bell.close()


class Tokens:
    def __init__(self, token: JoinToken | None) -> None:
        self.token = token

    def at_hand(self) -> JoinToken | None:
        return self.token

    def ask(self, cancellation: Any) -> JoinToken:
        raise AssertionError("nobody is asked before a head is found")


@contextmanager
def stop(is_told: bool) -> Iterator[Any]:
    bell = Bell()
    if is_told:
        bell.ring()
    yield bell
    bell.close()


def test_i2_a_worker_looks_for_the_head_of_its_token() -> None:
    token, told = JoinToken.new(b"key"), list[str]()
    search = Search([("fd00::1", 7700)])
    with stop(is_told=False) as untold:
        assert found_head(Tokens(token), told.append, untold, search.begin) == ("fd00::1", 7700)
    assert search.clusters == [token.cluster]
    assert told == [
        "searching for this token's head in the local network",
        "found a head at [fd00::1]:7700",
    ]


def test_i2_a_search_ends_when_the_worker_is_to_end() -> None:
    search = Search([])
    with stop(is_told=True) as told:
        assert found_head(Tokens(None), print, told, search.begin) is None
    assert search.clusters == [""], "without a token any head will do: it must prove itself later"


BEFORE, NOW = ("10.0.0.1", 7700), ("10.0.0.2", 7700)


@pytest.mark.parametrize(
    ("announced", "found"), [([NOW], NOW), ([NOW, BEFORE], NOW), ([BEFORE], None), ([], None)]
)
def test_g1_a_lost_head_is_found_at_another_address_and_not_at_the_one_where_it_is_not(
    announced: list[Address], found: Address | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search rings once for two announcements; the last one of the list is taken first."""
    monkeypatch.setattr(head_search, "_LOOK_S", head_search.SEARCH_S / 2)
    monkeypatch.setattr(head_search, "await_readable", lambda sources, timeout_s: [])
    search = Search(announced)
    assert head_elsewhere(OURS, BEFORE, Cancellation(), search.begin) == found
    assert search.clusters == [OURS]


def test_g1_a_search_that_cannot_be_made_finds_no_head() -> None:
    def fail(cluster: str) -> Any:
        raise UsageError("--discover cannot use the network: network is unreachable.")

    assert head_elsewhere(OURS, BEFORE, Cancellation(), fail) is None


def test_g1_a_search_that_is_not_wanted_any_more_ends() -> None:
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(CancelledError):
        head_elsewhere(OURS, BEFORE, cancellation, Search([]).begin)


def test_g1_a_search_without_a_thread_leaves_no_socket_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose head is lost searches again and again."""
    library, num_closed = Library(Service(OURS, 7700)), list[bool]()

    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(library, "ServiceBrowser", fail)
    monkeypatch.setattr(library, "close", lambda: num_closed.append(True))
    monkeypatch.setitem(sys.modules, "zeroconf", library)
    with pytest.raises(RuntimeError):
        HeadSearch(OURS)
    assert num_closed == [True]


def test_i2_without_the_library_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zeroconf", None)
    with pytest.raises(UsageError, match="needs the library zeroconf") as caught:
        HeadSearch(OURS)
    assert "penstock[discovery]" in caught.value.remedy
    with pytest.raises(UsageError, match="needs the library zeroconf"):
        discovery.Announcement("tower", OURS, 7700, ["10.0.0.1"])
