"""Certificates that are revoked while a worker is connected: who is shut out, when, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusters import SetClock
from penstock.errors import PeerError
from penstock.hosts.revocations import Revocations
from penstock.trust.admission import AdmissionBook
from penstock.trust.join_token import JoinToken


class StandInWorker:
    def __init__(self) -> None:
        self.errors: list[PeerError] = []

    def shut_out(self, error: PeerError) -> None:
        self.errors.append(error)


class StandInWeights:
    """Connections of these hosts."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.dropped: list[str] = []

    def hosts(self) -> set[str]:
        return set(self.open)

    def drop(self, host: str) -> None:
        self.dropped.append(host)
        self.open.discard(host)


class Head:
    """A head with the workers `desk` and `shelf`, whose certificates have the numbers 1 and 2."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.book = AdmissionBook(directory, SetClock(1e9))
        self.token = JoinToken.new(b"a public key")
        self.book.allow(self.token, max_joins=9)
        self.weights = StandInWeights()
        self.told: list[str] = []
        self.revocations = Revocations(self.book, self.weights, self.told.append)
        self.workers = {"desk": StandInWorker(), "shelf": StandInWorker()}
        for serial, host in enumerate(self.workers, start=1):
            self.join(host, serial)
            self.revocations.note(host, serial)

    def join(self, host: str, serial: int) -> None:
        self.book.commit(self.book.reserve(lambda key: key == self.token.proof_key()), host, serial)

    def shut_out_at(self, now: float) -> list[str]:
        """The hosts that a look at this time shuts out."""
        before = {host: len(worker.errors) for host, worker in self.workers.items()}
        self.revocations.apply(now, self.workers)
        return [host for host, worker in self.workers.items() if len(worker.errors) > before[host]]


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return Head(tmp_path / "head")


def test_r15_a_revoked_host_is_shut_out_within_a_second_and_the_others_stay(head: Head) -> None:
    head.weights.open = {"desk", "shelf"}
    assert head.shut_out_at(10.0) == []
    head.book.revoke_host("desk")
    assert head.shut_out_at(10.9) == []
    assert head.shut_out_at(11.0) == ["desk"]
    assert head.workers["desk"].errors[0].message.startswith("its certificate is revoked")
    assert head.weights.dropped == ["desk"]


def test_r15_a_host_whose_name_another_worker_has_taken_is_shut_out(head: Head) -> None:
    head.join("desk", 3)
    assert head.shut_out_at(10.0) == ["desk"]
    head.revocations.note("desk", 3)
    assert head.shut_out_at(11.0) == []


def test_a_host_stays_while_its_certificate_is_renewed(head: Head) -> None:
    head.book.offer("desk", present=1, renewed=3)
    assert head.shut_out_at(10.0) == []
    head.book.renew("desk", present=1, serial=3)
    head.revocations.note("desk", 3)
    assert head.shut_out_at(11.0) == []


def test_r15_connections_for_weights_of_a_host_that_has_not_come_yet_end_too(head: Head) -> None:
    head.join("late", 3)
    head.weights.open = {"late"}
    assert head.shut_out_at(10.0) == []
    assert head.weights.dropped == []
    head.book.revoke_host("late")
    assert head.shut_out_at(11.0) == []
    assert head.weights.dropped == ["late"]


def test_a_damaged_book_is_said_once_and_shuts_nobody_out(head: Head) -> None:
    path = head.directory / "admission.json"
    whole = path.read_bytes()
    path.write_bytes(b"{")
    assert head.shut_out_at(10.0) == head.shut_out_at(11.0) == []
    (line,) = head.told
    assert "is damaged" in line
    assert "Restore it from a copy" in line
    path.write_bytes(whole)
    head.book.revoke_host("shelf")
    assert head.shut_out_at(12.0) == ["shelf"]
    path.write_bytes(b"{")
    head.shut_out_at(13.0)
    assert len(head.told) == 2
