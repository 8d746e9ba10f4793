"""The identity of a cluster: the key of its head, which signs the certificates of all its processes.

The key is kept in a private file of the head's state directory and survives restarts. A head that loses it
begins another cluster: workers then refuse the head until they are given a new token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.errors import UsageError
from penstock.trust import certificates
from penstock.trust.challenge import new_epoch_key
from penstock.trust.credentials import Credentials
from penstock.trust.peer_names import AGENT_ROLE, HEAD_ROLE, PeerName, new_run, require_host_name
from penstock.trust.private_files import create_private, make_private_directory, read_private

IDENTITY_FILE = "cluster.pem"  # in the head's part of the state directory
_BEGIN = b"-----BEGIN CERTIFICATE-----"


class ClusterIdentity:
    """The authority of a cluster.

    Args:
        key_pem, certificate_pem: private key and certificate of the authority.
        wall_clock: Unix time (seconds since 1970).

    Attributes:
        certificate_pem: certificate of the authority.
        public_key: public key of the authority (DER); tokens have a part of its SHA-256.
        name: name of the cluster, as in `PeerName.cluster`.
        run: name of this run of the head, as in `PeerName.run`; each object, so each start, has a new one.
    """

    def __init__(self, key_pem: bytes, certificate_pem: bytes, wall_clock: Callable[[], float]) -> None:
        self._key_pem = key_pem
        self._wall_clock = wall_clock
        self.certificate_pem = certificate_pem
        self.public_key = certificates.public_key_of(key_pem)
        self.name = certificates.cluster_name(self.public_key)
        self.run = new_run()
        self._epoch_keys: dict[int, bytes] = {}
        self._of_head: dict[str, Credentials] = {}  # by name of the head's host, of which there is one

    @classmethod
    def open(cls, directory: Path, wall_clock: Callable[[], float]) -> ClusterIdentity:
        """Return the identity that is kept in a state directory; if there is none, make it.

        Raises:
            UsageError: the library is missing, the directory cannot be used, others may read the key, or the
                file is damaged.
        """
        make_private_directory(directory)
        path = directory / IDENTITY_FILE
        try:
            content = read_private(path)
        except FileNotFoundError:
            key = certificates.new_key()
            create_private(path, key + certificates.sign_authority(key, wall_clock()))
            content = read_private(path)  # the content of another process, if that was faster
        key, mark, certificate = content.partition(_BEGIN)
        if not certificates.is_pair(key, mark + certificate):
            raise UsageError(
                f"{path} does not hold the key and certificate of a cluster.",
                remedy="Restore the file from a copy; or delete it, and let the workers join with a new "
                "token.",
            )
        return cls(key, mark + certificate, wall_clock)

    def head_credentials(self, host: str) -> Credentials:
        """Return key and certificate of the head itself, which are never written to a file.

        They are the same in every call until the second half of their life, and then new ones.

        Raises:
            UsageError: the name of the host cannot stand in a certificate.
        """
        require_host_name(host)
        kept = self._of_head.get(host)
        if kept is None or not certificates.is_fresh(kept.certificate_pem, self._wall_clock()):
            name = PeerName(cluster=self.name, host=host, role=HEAD_ROLE)
            kept = self._of_head[host] = self._own_credentials(name, certificates.HOST_LIFE_S)
        return kept

    def link_credentials(self, name: PeerName) -> Credentials:
        """Return a new key and certificate for the links of a process in one epoch, and the epoch's key.

        Args:
            name: name of the process, with the run of this identity: no peer expects another run.
        """
        assert name.run == self.run, "a process of another run of the head"
        epoch_key = self._epoch_keys.setdefault(name.epoch, new_epoch_key())
        credentials = self._own_credentials(name, certificates.LINK_LIFE_S)
        return msgspec.structs.replace(credentials, epoch_key=epoch_key)

    def sign_host(self, request: bytes, host: str) -> bytes:
        """Return the certificate (PEM) of the agent of a host.

        Raises:
            CertificateError: the request is damaged.
            UsageError: the name cannot stand in a certificate.
        """
        require_host_name(host)
        name = PeerName(cluster=self.name, host=host, role=AGENT_ROLE)
        return self._sign(request, name, certificates.HOST_LIFE_S)

    def sign_link(self, request: bytes, name: PeerName) -> bytes:
        """Return the certificate (PEM) of a process for the links of one epoch.

        The head calls this for an agent whose connection is authenticated, and decides the name itself: host,
        role and epoch come from the head's plan, and not from the agent.

        Raises:
            CertificateError: the request is damaged.
        """
        return self._sign(request, name, certificates.LINK_LIFE_S)

    def _own_credentials(self, name: PeerName, life_s: float) -> Credentials:
        key = certificates.new_key()
        certificate = self._sign(certificates.signing_request(key), name, life_s)
        return Credentials(key_pem=key, certificate_pem=certificate, authority_pem=self.certificate_pem)

    def _sign(self, request: bytes, name: PeerName, life_s: float) -> bytes:
        return certificates.sign_name(
            self._key_pem, self.certificate_pem, request, name, self._wall_clock(), life_s
        )
