"""Tells other hosts of this host's streams: where it listens, and how its processes prove their identity.

Used by `hosts.local` on the head and on every worker. A host offers one kind only: `tls`, or `challenged`
(plain text after a proof) if its own command line says so. What the other side asks for does not count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.errors import PeerError, ProtocolError, UsageError
from penstock.hosts.rank_host import HostEnd, MeetingNeed, Need, Parties
from penstock.hosts.stream_ends import DiallingEnd, ListeningEnd, StreamInvitation
from penstock.process.endpoints import Certified, Challenged, StreamSecurity
from penstock.process.link_ports import PortRange, listen_in_range
from penstock.trust.credentials import Credentials
from penstock.trust.peer_names import PeerName

TLS, CHALLENGED = "tls", "challenged"

Issue = Callable[[PeerName], Credentials]  # for a process of this host; PenstockError: there are none


class LinkStreams(Protocol):
    """The interface by which a host makes its ends of streams, the connections to other hosts."""

    def offers(self, need: Need) -> Sequence[str]:
        """Return the kinds of streams that this host offers for a need, best first, such as "tls"."""
        ...

    def accept(self, kind: str, need: Need, parties: Parties) -> HostEnd:
        """Listen for a stream from another host, and return the end for a process of this host.

        The process itself accepts the stream later. `RankHost.accept` calls this.

        Raises:
            PeerError: this host does not offer this kind, or cannot listen.
        """
        ...

    def join(self, kind: str, need: Need, parties: Parties, invitation: object) -> HostEnd:
        """Return the end from which a process of this host will dial another host.

        `RankHost.join` calls this.

        Args:
            invitation: a `StreamInvitation`, which says where the other host listens.

        Raises:
            PeerError: this host does not offer this kind, or the invitation is of another type.
        """
        ...

    def close(self) -> None:
        """Forget the credentials of all processes of this host."""
        ...


class NoStreams:
    """The streams of a host that is alone: it offers no kind, and refuses to make an end."""

    def offers(self, need: Need) -> Sequence[str]:
        return []

    def accept(self, kind: str, need: Need, parties: Parties) -> HostEnd:
        raise _not_offered(kind)

    def join(self, kind: str, need: Need, parties: Parties, invitation: object) -> HostEnd:
        raise _not_offered(kind)

    def close(self) -> None:
        """Do nothing."""


class ProvedStreams:
    """The streams whose two ends prove that they are processes of one cluster and one epoch.

    Args:
        host, cluster: names of this host and its cluster, as in the credentials of its processes.
        run_of_head: returns the name of the head's run, which is in the credentials too (`trust.peer_names`).
        address_for: returns the address at which a given host reaches this one, if the head names none.
        ports: ports at which this host may listen.
        issue: returns the credentials of a process of this host.
        is_plain: after the proof, streams are in plain text (`--insecure-links`).
        fixed_address: address at which this host listens, whatever the head names; empty: none is fixed.
    """

    def __init__(
        self,
        host: str,
        cluster: str,
        run_of_head: Callable[[], str],
        address_for: Callable[[str], str],
        ports: PortRange,
        issue: Issue,
        *,
        is_plain: bool = False,
        fixed_address: str = "",
    ) -> None:
        self._fixed_address = fixed_address
        self._host, self._cluster, self._run_of_head = host, cluster, run_of_head
        self._address_for, self._ports = address_for, ports
        self._issue = issue
        self._kind = CHALLENGED if is_plain else TLS
        self._memories: dict[PeerName, int] = {}  # by process: descriptor of memory with its credentials

    def offers(self, need: Need) -> Sequence[str]:
        return [] if isinstance(need, MeetingNeed) else [self._kind]

    def accept(self, kind: str, need: Need, parties: Parties) -> HostEnd:
        if isinstance(need, MeetingNeed):
            raise _not_offered(kind)
        security = self._security(kind, parties)
        address = self._fixed_address or parties.address or self._address_for(parties.peer_host)
        try:
            listener = listen_in_range(address, self._ports)
        except UsageError as error:  # an interface has gone; another network path may be found later
            raise PeerError(error.message, remedy=error.remedy) from error
        return ListeningEnd(need, listener, address, is_joining=parties.is_swapped, security=security)

    def join(self, kind: str, need: Need, parties: Parties, invitation: object) -> HostEnd:
        if isinstance(need, MeetingNeed):
            raise _not_offered(kind)
        if not isinstance(invitation, StreamInvitation):
            raise ProtocolError(f"a {type(invitation).__name__} does not name an address.")
        place = StreamInvitation(host=parties.peer_address or invitation.host, port=invitation.port)
        return DiallingEnd(
            need,
            place,
            own_address=parties.address,
            is_joining=not parties.is_swapped,
            security=self._security(kind, parties),
        )

    def close(self) -> None:
        for memory in self._memories.values():
            os.close(memory)
        self._memories.clear()

    def _security(self, kind: str, parties: Parties) -> StreamSecurity:
        if kind != self._kind:
            raise _not_offered(kind)
        own = self._name(self._host, parties.own, parties.epoch)
        peer = self._name(parties.peer_host, parties.peer, parties.epoch)
        memory = self._memory(own)
        if kind == TLS:
            return Certified(credentials_fd=memory, peer=peer.uri)
        return Challenged(credentials_fd=memory, own=own.uri, peer=peer.uri)

    def _memory(self, own: PeerName) -> int:
        """Return a descriptor of memory with the credentials of a process, which the process is handed.

        Credentials of its older epochs, and of other runs of the head, are forgotten.
        """
        if own not in self._memories:
            older = [
                name
                for name in self._memories
                if name.run != own.run or (name.role == own.role and name.epoch < own.epoch)
            ]
            for name in older:
                os.close(self._memories.pop(name))
            self._memories[own] = self._issue(own).to_memory()
        return self._memories[own]

    def _name(self, host: str, role: str, epoch: int) -> PeerName:
        run = self._run_of_head()
        return PeerName(cluster=self._cluster, host=host, role=role, run=run, epoch=epoch)


def _not_offered(kind: str) -> PeerError:
    return PeerError(
        f"this host does not offer connections of kind {kind!r} to other hosts.",
        remedy="Give --insecure-links on all hosts, or on none.",
    )
