"""The access to the server: which API keys, host names and origins a request may have.

- If API keys are set, every path needs a key, except health probes and the files of the web page. These files
  are the same for everybody; what the page fetches needs a key.
- Paths of administrators exist only if an admin key is set, and need that key. It opens all other paths too.
- Without JavaScript, a browser can send a key only as a password. It then adds the password to every request
  by itself, whatever page has caused the request. A password is therefore accepted only where a request
  changes nothing and other pages cannot read the answer.
- Requests from web pages of another origin are refused by their `Origin` header, unless the operator has
  allowed that origin (`cross_origin`).
- While the server listens on a loopback address, a foreign host name that leads to this machine (DNS
  rebinding) is refused by the `Host` header, unless the operator has allowed the name.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence

from penstock.errors import AuthenticationError, NotFoundError
from penstock.process.listening import refuse_bad_hosts, refuse_bad_keys
from penstock.server.http.errors import ForbiddenError, PasswordMissingError

ADMIN_PATHS = frozenset(
    {
        *("/pause", "/resume", "/is_paused", "/flush_cache", "/abort", "/slow_down"),
        *("/start_profile", "/stop_profile", "/open_session", "/close_session"),
    }
)
OPEN_PATHS = frozenset({"/health", "/health/ready", "/health/live", "/health/generate"})
PAGE_PATHS = frozenset({"/", "/page.css", "/page.js"})  # files of the web page, without data
PASSWORD_PATHS = frozenset({"/debug/pipeline/table"})  # where a key may come as a password

Headers = Iterable[tuple[bytes, bytes]]


def refuse_odd_path(path: str) -> None:
    """Raise `NotFoundError` for a path with control characters, which no route has.

    The router's patterns ignore a line feed at the end of a path: a route would answer under a second path.
    """
    if not path.isprintable():
        raise NotFoundError("this path does not exist.")


class ApiKeys:
    """Decides whether a request carries a key that opens its path.

    Args:
        keys: any of them opens all paths but those of administrators. If there are none, these paths need no
            key.
        admin_keys: any of them opens all paths.

    Raises:
        UsageError: a key is blank, which an empty `Authorization` would match, or is of both kinds.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        refuse_bad_keys(keys, admin_keys)
        self._keys = [key.encode() for key in keys]
        self._admin_keys = [key.encode() for key in admin_keys]

    def check(self, path: str, headers: Headers) -> None:
        """Raise `AuthenticationError` unless the request carries a key that opens the path, or needs none.

        The time that this takes does not show how much of a wrong key is right.
        """
        is_admin_path = path in ADMIN_PATHS and bool(self._admin_keys)
        if path in OPEN_PATHS | PAGE_PATHS or not (self._keys or is_admin_path):
            return
        fitting = self._admin_keys if is_admin_path else [*self._keys, *self._admin_keys]
        sent = _sent_keys(headers)
        if path in PASSWORD_PATHS:
            sent.append(_password(header_value(headers, b"authorization")))
        matches = [hmac.compare_digest(given, key) for given in sent for key in fitting]
        if not any(matches) and path in PASSWORD_PATHS:
            raise PasswordMissingError("The API key is missing or wrong.", remedy="Send it as the password.")
        if not any(matches):
            kind = "admin key" if is_admin_path else "API key"
            raise AuthenticationError(
                f"The {kind} is missing or wrong.",
                remedy="Send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`.",
            )


def key_digest(headers: Headers) -> bytes:
    """Return a digest of the key that a request carries, in either header, whether or not it is valid."""
    return hashlib.sha256(b"\0".join(sorted(set(_sent_keys(headers))))).digest()


def _sent_keys(headers: Headers) -> list[bytes]:
    """Return the keys of a request in both headers for them; empty ones are left out."""
    sent = [_bearer(header_value(headers, b"authorization")), header_value(headers, b"x-api-key").strip()]
    return list(filter(None, sent))


def _bearer(value: bytes) -> bytes:
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _password(value: bytes) -> bytes:
    """Return the password of HTTP Basic (RFC 7617), whatever the user's name is."""
    scheme, _, encoded = value.partition(b" ")
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(encoded.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


class HostPolicy:
    """Refuses requests that reached this server under a foreign host name, or come from a foreign page.

    Args:
        host: the address that the server listens on.
        allowed_origins: origins whose pages may use the server, besides its own origin.
        allowed_hosts: further host names that are accepted while the server listens on a loopback address.

    Raises:
        UsageError: an entry of `allowed_hosts` is not a host name.
    """

    def __init__(
        self, host: str, allowed_origins: Sequence[str] = (), allowed_hosts: Sequence[str] = ()
    ) -> None:
        refuse_bad_hosts(allowed_hosts)
        self._allowed_origins = frozenset(origin.encode() for origin in allowed_origins)
        self._is_loopback = is_loopback(host)
        self._own_names = {host.lower(), *(name.lower() for name in allowed_hosts)}

    def check(self, headers: Headers) -> None:
        """Raise `ForbiddenError` for a foreign `Host` on loopback, or a foreign `Origin`.

        An `Origin` is foreign if it is neither our own nor allowed.
        """
        host = header_value(headers, b"host").decode("latin-1").lower()
        if self._is_loopback and host and not self._is_ours(_without_port(host)):
            raise ForbiddenError(
                "This server listens on a loopback address and does not accept that Host.",
                remedy="Use http://127.0.0.1 or http://localhost. The operator can allow another name, "
                "such as host.docker.internal, with --allowed-hosts.",
                code="host_not_allowed",
            )
        sent = header_value(headers, b"origin")
        origin = sent.decode("latin-1").lower()
        if origin and sent not in self._allowed_origins and origin.partition("://")[2] != host:
            raise ForbiddenError(
                "Requests from web pages of another origin are refused.",
                remedy="The operator can allow the origin with --allowed-origins.",
            )

    def _is_ours(self, name: str) -> bool:
        return name in self._own_names or is_loopback(name)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def header_value(headers: Headers, wanted: bytes) -> bytes:
    """Return the value of the first header of that lower-case name; empty if there is none."""
    return next((value for name, value in headers if name == wanted), b"")
