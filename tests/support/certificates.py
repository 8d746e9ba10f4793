"""Certificates that tests make for themselves, of an authority that nobody else knows."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


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
