"""Certificates that tests make for themselves, of an authority that nobody else knows."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import trustme

from penstock.process.endpoints import TlsMaterial


class Certificate:
    """A server's certificate and key as files.

    Args:
        directory: where the files are written.
        names: that the certificate is for.

    Attributes:
        certfile, keyfile: of the server.
        ca_file: of the authority that signed it.
    """

    def __init__(self, directory: Path, *names: str) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
        self.certfile, self.keyfile, self.ca_file = (
            str(directory / name) for name in ("server.crt", "server.key", "authority.crt")
        )
        Path(self.certfile).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        Path(self.keyfile).write_bytes(issued.private_key_pem.bytes())
        Path(self.ca_file).write_bytes(authority.cert_pem.bytes())

    def trusting(self) -> ssl.SSLContext:
        """Return the context of a client that knows the authority."""
        return ssl.create_default_context(cafile=self.ca_file)


class PeerCertificates:
    """Certificates of one authority for peers that show them to each other, as files without a name.

    Args:
        names: of the peers. Each of two expects the other one's.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._authority = trustme.CA()
        self._memories = [self._memory_of(self._authority.cert_pem.bytes())]
        for name in names:
            issued = self._authority.issue_cert(name)
            self._memories.append(self._memory_of(b"".join(blob.bytes() for blob in issued.cert_chain_pems)))
            self._memories.append(self._memory_of(issued.private_key_pem.bytes()))

    def __enter__(self) -> PeerCertificates:
        return self

    def __exit__(self, *_: object) -> None:
        for memory in self._memories:
            os.close(memory)

    def material(self, index: int, peer_name: str | None = None) -> TlsMaterial:
        """What the peer of this index is given; it expects the other one, or whom it is told."""
        return TlsMaterial(
            certificate_fd=self._memories[1 + 2 * index],
            key_fd=self._memories[2 + 2 * index],
            authority_fd=self._memories[0],
            peer_name=peer_name or self._names[1 - index],
        )

    @staticmethod
    def _memory_of(content: bytes) -> int:
        memory = os.memfd_create("certificate")
        os.write(memory, content)
        return memory
