"""Loads the certificate of an HTTPS server: at start to check it, and in the API process to serve with it."""

from __future__ import annotations

import ssl
from pathlib import Path

from penstock.config.server import ServerConfig
from penstock.errors import UsageError

_REMEDY = "Give a file in PEM form; each certificate comes before the one that signed it."


def server_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the context that encrypts connections; None where the server speaks plain HTTP.

    Raises:
        UsageError: a file cannot be read or is not PEM, or the key is encrypted or of another certificate.
    """
    if not config.ssl_certfile or not config.ssl_keyfile:
        return None
    _require_part(config.ssl_certfile, b"-----BEGIN CERTIFICATE-----", "certificate", "ssl_certfile")
    _require_part(config.ssl_keyfile, b"PRIVATE KEY-----", "private key", "ssl_keyfile")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_refuse_encrypted_key)
    except ssl.SSLError as error:
        raise _refusal(config.ssl_certfile, config.ssl_keyfile, error) from error
    return context


def _require_part(path: str, mark: bytes, what: str, param: str) -> None:
    flag = "--" + param.replace("_", "-")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{flag} {path} cannot be read: {error.strerror}.", remedy=_REMEDY, param=param
        ) from error
    if mark not in content:
        raise UsageError(f"{flag} {path} holds no {what}.", remedy=_REMEDY, param=param)


def _refuse_encrypted_key() -> str:
    raise UsageError(
        "the file of --ssl-keyfile is encrypted, and a server cannot ask for its password.",
        remedy="Decrypt it: `openssl pkey -in KEY -out PLAIN`, and keep PLAIN unreadable for others.",
        param="ssl_keyfile",
    )


def _refusal(certfile: str, keyfile: str, error: ssl.SSLError) -> UsageError:
    if error.reason == "KEY_VALUES_MISMATCH":
        return UsageError(
            f"--ssl-keyfile {keyfile} is not the key of --ssl-certfile {certfile}.",
            remedy="Give the key of the server's certificate; a chain begins with the server's own "
            "certificate.",
            param="ssl_keyfile",
        )
    reason = (error.reason or str(error)).replace("_", " ").lower()
    return UsageError(
        f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} cannot be used: {reason}.",
        remedy=_REMEDY,
        param="ssl_certfile",
    )
