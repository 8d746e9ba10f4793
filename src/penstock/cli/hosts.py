"""The commands `penstock hosts ls`, `revoke`, `revoke-tokens` and `new-token`, about admission to a head.

Called by `cli.program`, on the machine of the head. The first three read or change the book in the head's
state directory (`trust.admission`); a running head looks into it each second. `new-token` makes the cluster's
identity and a join token, as a head does at its first start, for heads that are given both. No command shows
a token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.flags import flag
from penstock.cli.sources import nearest
from penstock.cli.terminal import Invocation, one_line
from penstock.config.hosts import head_directory
from penstock.errors import UsageError
from penstock.trust.admission import AdmissionBook
from penstock.trust.identity import IDENTITY_FILE, ClusterIdentity
from penstock.trust.join_token import JoinToken
from penstock.trust.private_files import create_private

StateDirectory = Annotated[
    Path | None, flag("state directory of the head, as for penstock serve", "--state-dir", group="hosts")
]
_SHOWN_DIGITS = 12


def hosts_ls(
    *, state_dir: StateDirectory = None, invocation: Annotated[Invocation, Parameter(parse=False)]
) -> int:
    """List the hosts that have a certificate, and say how many tokens can still be used. Returns 0."""
    book = _book(state_dir)
    certificates = book.certificates()
    rows = [("host", "certificate")] if certificates else []
    for host, serials in sorted(certificates.items()):
        rows.append((one_line(host), ", ".join(f"{serial:x}"[:_SHOWN_DIGITS] for serial in sorted(serials))))
    width = max((len(name) for name, _ in rows), default=0)
    invocation.say(*(f"{name:<{width}}  {text}" for name, text in rows))
    if not rows:
        invocation.say("no host has a certificate")
    invocation.say(f"usable join tokens: {book.num_usable_tokens()}")
    return 0


def hosts_revoke(
    *names: str, state_dir: StateDirectory = None, invocation: Annotated[Invocation, Parameter(parse=False)]
) -> int:
    """Revoke the certificates of some hosts. Returns 0."""
    book = _book(state_dir)
    _require_certificates(names, book.hosts())
    for name in names:
        book.revoke_host(name)
        invocation.say(
            f"the certificate of {one_line(name)} is revoked; a running head closes its connections now"
        )
    if book.num_usable_tokens():
        invocation.warn(
            "a revoked host could join again with a join token that is still usable; `penstock hosts "
            "revoke-tokens` revokes all."
        )
    return 0


def hosts_revoke_tokens(
    *, state_dir: StateDirectory = None, invocation: Annotated[Invocation, Parameter(parse=False)]
) -> int:
    """Revoke all join tokens. Returns 0."""
    _book(state_dir).revoke_all_tokens()
    invocation.say(
        "all join tokens are revoked; hosts that have joined stay. For a new token, delete the token file of "
        "the head and start it again."
    )
    return 0


def hosts_new_token(
    *,
    state_dir: StateDirectory = None,
    join_token_file: Annotated[
        Path | None, flag("file for the new token", "--join-token-file", group="hosts")
    ] = None,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """Write a new token for the cluster of a state directory, and make that cluster if there is none.

    A head that starts with both takes the token, for as many joins and as long as its flags say. Returns 0.
    """
    if join_token_file is None:
        raise UsageError(
            "no file for the token is given.",
            remedy="Name a new file with --join-token-file.",
            param="join_token_file",
        )
    directory = head_directory(state_dir)
    identity = ClusterIdentity.open(directory, time.time)
    token = JoinToken.new(identity.public_key)
    if not create_private(join_token_file, f"{token.text()}\n".encode()):
        raise UsageError(
            f"the file {str(join_token_file)!r} exists already.",
            remedy="Delete it if its token is no longer needed, or name another file.",
            param="join_token_file",
        )
    invocation.say(
        f"the key of the cluster is in {directory / IDENTITY_FILE}: keep it on heads only",
        f"a token for it is in {join_token_file}: a head started with this --join-token-file accepts it",
    )
    return 0


def _require_certificates(names: Sequence[str], known: Sequence[str]) -> None:
    there = f"Hosts that have a certificate: {', '.join(known)}." if known else "No host has one."
    for name in names or [""]:
        if name not in known:
            raise UsageError(
                f"no host called {name!r} has a certificate." if names else "no host is given.",
                remedy=f"{nearest(name, known)} {there}".strip(),
                param="name",
            )


def _book(state_dir: Path | None) -> AdmissionBook:
    directory = head_directory(state_dir)
    if not AdmissionBook.is_in(directory):
        raise UsageError(
            f"there is no state of a head in {directory}.",
            remedy="Run this on the head as the head's user, with the --state-dir of `penstock serve`.",
            param="state_dir",
        )
    return AdmissionBook(directory, time.time)
