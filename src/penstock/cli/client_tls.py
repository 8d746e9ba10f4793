"""The HTTPS of commands that talk to a running server: the certificates they trust, and their errors.

Commands trust the authorities of the system, or in their place those of `SSL_CERT_FILE` and `SSL_CERT_DIR` in
the environment, and besides them the certificates of `--ca-file`. They always check the server's name.
"""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

from penstock.errors import LinkClosedError, UsageError

CA_FILE_HELP = "trusted certificates besides the system's, PEM"
_MOST_FLIGHTS = 4  # most times that a client sends something in a handshake
_NAME_MISMATCH = frozenset(
    {62, 64}
)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH


def client_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return the context of an HTTPS client.

    Args:
        ca_file: file of certificates to trust besides the system's: of authorities, or a server's own.

    Raises:
        UsageError: the file cannot be read, or holds no certificate.
    """
    context = ssl.create_default_context()
    if ca_file is None:
        return context
    try:
        context.load_verify_locations(ca_file)
    except OSError as error:  # `ssl.SSLError` too
        is_ssl = isinstance(error, ssl.SSLError)
        reason = "it does not hold a certificate in PEM form" if is_ssl else error.strerror
        raise UsageError(
            f"--ca-file {ca_file} cannot be used: {reason}.",
            remedy="Give the server's --ssl-certfile, or the certificate of the authority that signed it.",
            param="ca_file",
        ) from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a server's own certificate is enough
    return context


def is_trusted(server: ssl.SSLContext) -> bool:
    """Return whether a client without `--ca-file` accepts a server's certificate. The name is not checked.

    A client and the server shake hands in memory, as they would over a connection.
    """
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = client_context(None)
    trusting.check_hostname = False
    client = trusting.wrap_bio(to_client, to_server)
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_MOST_FLIGHTS):
        try:
            client.do_handshake()
            return True
        except ssl.SSLWantReadError:
            with contextlib.suppress(ssl.SSLWantReadError):
                serving.do_handshake()
        except ssl.SSLError:
            return False
    return False


def connection_error(url: str, error: Exception) -> LinkClosedError:
    """Return the error of a server that cannot be reached, or whose certificate is not trusted."""
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = "If it is your server, give its certificate or authority with --ca-file or SSL_CERT_FILE."
        if error.verify_code in _NAME_MISMATCH:
            remedy = "Use a host name that is in the certificate, or issue one for this name."
        return LinkClosedError(
            f"the certificate of {url} is not trusted: {error.verify_message}.",
            remedy=remedy,
            code="certificate_not_trusted",
        )
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).replace("_", " ").lower()
        return LinkClosedError(
            f"{url} did not complete the TLS handshake: {reason}.",
            remedy="Use http:// if it speaks plain HTTP.",
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return LinkClosedError(f"no server at {url}: {reason}.", remedy="Start one with `penstock serve MODEL`.")
