"""The name that a cluster's certificate gives to a process: cluster, host, role, run (of the head), epoch.

A name stands in the certificate as a URI, so that it cannot be taken for a DNS name or an address:

    penstock://3f9c…/host/desk/agent/0             the agent of the host `desk`; 0: it is of no epoch
    penstock://3f9c…/host/desk/rank-3/5b07…/17     rank 3 in epoch 17 of the head's run 5b07…
    penstock://3f9c…/host/tower/head/0             the head

The name of a cluster is the beginning of the fingerprint of the cluster's key. A run is the time between the
start and the end of a head. Epochs begin at 0 in each run, so the name of a process of an epoch has the run
too: otherwise a certificate of yesterday would be valid for the epoch of the same number today. The module
does not import `cryptography`, so that a rank does not need it.
"""

from __future__ import annotations

import re
import secrets

import msgspec

from penstock.errors import UsageError

HEAD_ROLE, AGENT_ROLE, VISITOR_ROLE = "head", "agent", "visitor"
HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", re.ASCII)
_ROLE = re.compile(r"[a-z0-9-]{1,32}", re.ASCII)
_URI = re.compile(
    rf"penstock://(?P<cluster>[0-9a-f]{{32}})/host/(?P<host>{HOST_NAME.pattern})"
    rf"/(?P<role>{_ROLE.pattern})(?:/(?P<run>[0-9a-f]{{16}}))?/(?P<epoch>0|[1-9][0-9]{{0,17}})",
    re.ASCII,
)


class PeerName(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a process, as its certificate or its challenge proves it.

    Attributes:
        cluster: the first 32 hexadecimal digits of the fingerprint of the cluster's key.
        host: name of the host, as in `HostResources.name`.
        role: `HEAD_ROLE`, `AGENT_ROLE`, the role of a rank or core (`rank_role`, `core_role`), or
            `VISITOR_ROLE` for a host that only looks whether it could join.
        run: run of the head in which the epoch is counted (`new_run`); "" for head, agents and visitors.
        epoch: epoch of the connections that the process may make; 0 for head, agents and visitors.
    """

    cluster: str
    host: str
    role: str
    run: str = ""
    epoch: int = 0

    @property
    def uri(self) -> str:
        run = f"/{self.run}" if self.run else ""
        return f"penstock://{self.cluster}/host/{self.host}/{self.role}{run}/{self.epoch}"

    @classmethod
    def parse(cls, uri: str) -> PeerName:
        """Return the name that a URI spells.

        Raises:
            ValueError: the URI is not a name of a process of a cluster.
        """
        match = _URI.fullmatch(uri)
        if match is None:
            raise ValueError("not the name of a process of a cluster")
        parts = match.groupdict()
        return cls(
            cluster=parts["cluster"],
            host=parts["host"],
            role=parts["role"],
            run=parts["run"] or "",
            epoch=int(parts["epoch"]),
        )


def new_run() -> str:
    """Return 16 random hexadecimal digits that name a run of the head."""
    return secrets.token_hex(8)


def rank_role(rank: int, replica: int | None = None) -> str:
    """Return the role of a rank; `replica` is the number of its pipeline, or None if there is only one."""
    return f"rank-{rank}" + ("" if replica is None else f"-of-{replica}")


def core_role(replica: int | None = None) -> str:
    """Return the role of an engine core; `replica` as for a rank."""
    return "core" + ("" if replica is None else f"-of-{replica}")


def require_host_name(name: str) -> None:
    """Raise an error if a host name cannot stand in a certificate.

    Raises:
        UsageError: the name has other characters than letters, digits, dots, dashes and underscores, does not
            begin and end with a letter or digit, or is empty or too long.
    """
    if HOST_NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name[:80]!r} is not a valid host name: use 1 to 64 letters, digits, dots, dashes and "
            "underscores, with a letter or digit at both ends.",
            remedy="Choose another name.",
            param="name",
        )
