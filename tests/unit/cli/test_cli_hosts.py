"""`penstock hosts`: what is shown of the hosts of a head, and how one is revoked."""

from __future__ import annotations

import time
from io import StringIO
from pathlib import Path

import pytest

from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.errors import CertificateError, JoinTokenError
from penstock.trust.admission import AdmissionBook
from penstock.trust.identity import ClusterIdentity
from penstock.trust.join_token import JoinToken, head_token, worker_token

TOKEN = JoinToken.new(b"a public key")


def hosts(*words: str, **environ: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(), environ=environ)
    return run(["hosts", *words], invocation), out.getvalue(), err.getvalue()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """State of a head with the hosts `desk` and `shelf`, whose token is for one more."""
    book = AdmissionBook(tmp_path / "state" / "head", time.time)
    book.allow(TOKEN, max_joins=3)
    for serial, host in enumerate(("shelf", "desk"), start=0xAC0):
        book.commit(book.reserve(lambda key: key == TOKEN.proof_key()), host, serial)
    return tmp_path / "state"


def book_in(state: Path) -> AdmissionBook:
    return AdmissionBook(state / "head", time.time)


def test_ls_shows_the_hosts_and_no_token(state: Path) -> None:
    code, out, err = hosts("ls", "--state-dir", str(state))
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()[:3]] == [
        ["host", "certificate"],
        ["desk", "ac1"],
        ["shelf", "ac0"],
    ]
    assert out.splitlines()[3:] == ["usable join tokens: 1"]
    assert not any(part in out for part in TOKEN.text().split("-")[1:])


def test_r15_revoke_takes_the_certificate_out_of_the_book(state: Path) -> None:
    running = book_in(state)  # a head has it open
    running.require_known("desk", 0xAC1)
    code, out, err = hosts("revoke", "desk", "--state-dir", str(state))
    assert code == 0
    assert out.startswith("the certificate of desk is revoked")
    assert "penstock hosts revoke-tokens" in err  # a token is left, with which it could join again
    with pytest.raises(CertificateError):
        running.require_known("desk", 0xAC1)
    running.require_known("shelf", 0xAC0)


def test_r15_revoke_tokens_lets_nobody_join(state: Path) -> None:
    code, out, err = hosts("revoke-tokens", PENSTOCK_STATE_DIR=str(state))
    assert (code, err) == (0, "")
    assert out.startswith("all join tokens are revoked; hosts that have joined stay.")
    with pytest.raises(JoinTokenError, match="revoked"):
        book_in(state).require_usable(TOKEN)
    assert book_in(state).hosts() == ["desk", "shelf"]
    assert hosts("revoke", "desk", "--state-dir", str(state))[2] == ""
    assert hosts("ls", "--state-dir", str(state))[1].endswith("usable join tokens: 0\n")


@pytest.mark.parametrize(
    ("words", "told"), [((), "no host is given"), (("desk", "shlf"), "Did you mean shelf?")]
)
def test_revoke_changes_nothing_without_the_name_of_a_host(
    state: Path, words: tuple[str, ...], told: str
) -> None:
    given = {"PENSTOCK_NAME": "desk", "PENSTOCK_HOSTS": "2"}  # of `worker` and `serve`: not meant here
    code, _, err = hosts("revoke", *words, "--state-dir", str(state), **given)
    assert code == 2
    assert told in err
    assert "desk, shelf" in err
    assert book_in(state).hosts() == ["desk", "shelf"]


@pytest.mark.parametrize("words", [("ls",), ("revoke", "desk"), ("revoke-tokens",)])
def test_a_directory_without_a_head_is_refused_and_left_as_it_is(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    code, _, err = hosts(*words, "--state-dir", str(tmp_path / "none"))
    assert code == 2
    assert "there is no state of a head in" in err
    assert "--state-dir" in err
    assert not (tmp_path / "none").exists()


def test_a_head_without_hosts_says_so(tmp_path: Path) -> None:
    AdmissionBook(tmp_path / "head", time.time).allow(TOKEN, max_joins=1)
    assert hosts("ls", "--state-dir", str(tmp_path))[1].splitlines()[0] == "no host has a certificate"


def test_r15_a_token_that_was_made_before_any_head_is_taken_by_one(tmp_path: Path) -> None:
    state, path = tmp_path / "cluster", tmp_path / "cluster" / "token"
    code, out, err = hosts("new-token", "--state-dir", str(state), "--join-token-file", str(path))
    assert (code, err) == (0, "")
    assert str(state / "head" / "cluster.pem") in out
    token = worker_token(path)
    assert not any(part in out for part in token.text().split("-")[1:])
    identity = ClusterIdentity.open(state / "head", time.time)  # as the head opens it, or a copy of it
    assert head_token(path, identity.public_key).text() == token.text()


def test_a_further_token_is_for_the_same_cluster_and_replaces_no_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        assert hosts("new-token", "--state-dir", str(tmp_path), "--join-token-file", str(path))[0] == 0
    identity = ClusterIdentity.open(tmp_path / "head", time.time)
    assert worker_token(first).text() != head_token(second, identity.public_key).text()
    before = first.read_bytes()
    code, _, err = hosts("new-token", "--state-dir", str(tmp_path), "--join-token-file", str(first))
    assert (code, first.read_bytes()) == (2, before)
    assert f"the file '{first}' exists already" in err


def test_a_new_token_needs_a_file_to_go_to(tmp_path: Path) -> None:
    code, _, err = hosts("new-token", "--state-dir", str(tmp_path / "none"))
    assert code == 2
    assert "--join-token-file" in err
    assert not (tmp_path / "none").exists()
