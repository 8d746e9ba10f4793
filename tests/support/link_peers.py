"""Ranks of one cluster that are to meet over a link, with what their agents would hand them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from penstock.process.endpoints import Certified, Challenged
from penstock.trust import certificates
from penstock.trust.challenge import new_epoch_key
from penstock.trust.identity import ClusterIdentity
from penstock.trust.peer_names import PeerName

RANKS = ("rank-0", "rank-1")
EPOCH = 3


class LinkPeers:
    """Ranks of hosts of their own, with credentials of one authority and one epoch, in memory.

    Args:
        roles: of the ranks. Each of the first two expects the other one.
    """

    def __init__(self, roles: Sequence[str] = RANKS) -> None:
        key = certificates.new_key()
        identity = ClusterIdentity(key, certificates.sign_authority(key, time.time()), time.time)
        epoch_key = new_epoch_key()
        self._names = [
            PeerName(cluster=identity.name, host=f"host-{number}", role=role, run=identity.run, epoch=EPOCH)
            for number, role in enumerate(roles)
        ]
        self._memories = [
            msgspec.structs.replace(identity.link_credentials(name), epoch_key=epoch_key).to_memory()
            for name in self._names
        ]

    def __enter__(self) -> LinkPeers:
        return self

    def __exit__(self, *_: object) -> None:
        for memory in self._memories:
            os.close(memory)

    def named(self, index: int, **changed: str | int) -> PeerName:
        """The name of a rank, or one that differs in something."""
        return msgspec.structs.replace(self._names[index], **changed)

    def certified(self, index: int, peer: PeerName | None = None) -> Certified:
        """What this rank is given for TLS; it expects the other one, or whom it is told."""
        return Certified(credentials_fd=self._memories[index], peer=(peer or self._names[1 - index]).uri)

    def challenged(self, index: int, peer: PeerName | None = None) -> Challenged:
        """The same for plain text."""
        return Challenged(
            credentials_fd=self._memories[index],
            own=self._names[index].uri,
            peer=(peer or self._names[1 - index]).uri,
        )
