"""The messages between a worker and the head while the worker joins, and their frames.

Inside TLS 1.3 each message is a header of 7 bytes and a body of msgpack:

    protocol (2 bytes) | kind (1) | length of the body (4) | body

    head                                             worker
    HELLO   public key (91), then Hello       ──▶    checks the key against its pin, and that it has signed
                                                     the head's certificate; only then it reads on
                                              ◀──    JOIN    proof (32), then JoinRequest: with a token
                                              ◀──    REJOIN  RejoinRequest: with a certificate
                                              ◀──    VISIT   as JOIN, or as REJOIN: a host that looks whether
                                                     it could join; no use of the token is counted
    WELCOME Welcome                           ──▶    stores what is new
                                              ◀──    STORED
    DONE                                      ──▶
    REFUSED ErrorInfo, in place of either     ──▶
                                              ◀──    OTHER_VERSION, in place of a request

The header, and the place of the public key in HELLO, are the same in every version, so that each side can
name the version of the other. The proof is an HMAC over the head's certificate, the head's nonce and the body
behind it: the head reads no byte of a JOIN before it has checked it.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from typing import TypeVar

import msgspec

from penstock.errors import OtherVersionError, ProtocolError

PROTOCOL = 1
MAX_BYTES = 16 << 10  # of all messages of a peer that has not proved itself, and of each message
NOT_JOINED = "not_joined"  # code of the error; the connection of the worker may be broken for a moment
NONCE_BYTES = PROOF_BYTES = 32
HEADER = struct.Struct(">HBI")
_CONTEXT = b"penstock join 1"

Message = TypeVar("Message", bound=msgspec.Struct)


class Kind(enum.IntEnum):
    """The kind of a message, which follows from its header."""

    HELLO = 1
    JOIN = 2
    REJOIN = 3
    WELCOME = 4
    STORED = 5
    DONE = 6
    REFUSED = 7
    OTHER_VERSION = 8
    VISIT = 9


_KINDS = frozenset(Kind)


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first words of the head.

    Attributes:
        version: version of Penstock.
        authority: the certificate (PEM) of the cluster.
        nonce: 32 random bytes for the proof.
    """

    version: str
    authority: bytes
    nonce: bytes


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker with a token wants a certificate.

    Attributes:
        host: the name that it wants.
        request: request for the certificate, DER.
    """

    version: str
    host: str
    request: bytes


class RejoinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker with a certificate is back.

    Attributes:
        request: request for a newer certificate, DER; empty where the present one is young.
    """

    version: str
    request: bytes = b""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker is let in.

    Attributes:
        certificate: PEM; empty where none was requested.
    """

    certificate: bytes = b""


def proof(key: bytes, head_certificate: bytes, nonce: bytes, body: bytes) -> bytes:
    """Return the proof that only a peer with the token's key can make, for this connection and request alone.

    Args:
        key: `JoinToken.proof_key`.
        head_certificate: DER, as the TLS handshake has shown it; a host in between has another one.
    """
    parts = (head_certificate, nonce, body)
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hmac.digest(key, _CONTEXT + digests, "sha256")


def framed(kind: Kind, body: bytes = b"") -> bytes:
    """Return a message with its header."""
    assert len(body) + HEADER.size <= MAX_BYTES, f"{len(body)} bytes"
    return HEADER.pack(PROTOCOL, kind, len(body)) + body


def decode(body: bytes, message: type[Message]) -> Message:
    """Read a body.

    Raises:
        ProtocolError: it is not such a message.
    """
    try:
        return msgspec.msgpack.decode(body, type=message)
    except (msgspec.MsgspecError, ValueError) as error:
        raise garbage() from error


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """A message as it came.

    Attributes:
        protocol: version of the other side's protocol.
    """

    protocol: int
    kind: Kind
    body: bytes


class MessageReader:
    """Cuts a stream into messages, and never asks for a byte behind the present one.

    Args:
        max_bytes: most bytes of all messages together, headers included.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._bytes_left = max_bytes
        self._buffer = bytearray()
        self._needed = HEADER.size

    @property
    def wanted(self) -> int:
        """The number of bytes that the present header or body still lacks; at least 1."""
        return self._needed - len(self._buffer)

    def feed(self, data: bytes) -> Frame | None:
        """Take at most `wanted` bytes, and return a message once it is whole.

        Raises:
            ProtocolError: it is not a header, or the message is too long.
        """
        assert len(data) <= self.wanted
        self._buffer += data
        if not self.wanted and self._needed == HEADER.size:
            self._needed += self._checked_length()
        if self.wanted:
            return None
        protocol, kind, _ = HEADER.unpack_from(self._buffer)
        frame = Frame(protocol=protocol, kind=Kind(kind), body=bytes(self._buffer[HEADER.size :]))
        self._buffer.clear()
        self._needed = HEADER.size
        return frame

    def _checked_length(self) -> int:
        """Return the length of the body; no memory is taken before it is known to be small."""
        _, kind, length = HEADER.unpack(self._buffer)
        if kind not in _KINDS:
            raise garbage()
        self._bytes_left -= HEADER.size + length
        if self._bytes_left < 0:
            raise ProtocolError(
                f"the other side sent a message of {length} bytes, which is too long before a worker has "
                "joined.",
                code="too_long",
            )
        return int(length)


def garbage() -> ProtocolError:
    """Return the error about a peer that says something else than the protocol has at this place."""
    return ProtocolError(
        "the other side does not speak the join protocol.",
        remedy="Check that the address is the one printed by the head.",
        code="garbage",
    )


def other_protocol(protocol: int) -> OtherVersionError:
    """Return the error about a peer whose join protocol is another one."""
    return OtherVersionError(
        f"the other side speaks version {protocol} of the join protocol, but this host version {PROTOCOL}.",
        remedy="Install the same version of Penstock on all hosts.",
    )


def other_version(theirs: str, ours: str) -> OtherVersionError:
    """Return the error about a peer that runs another Penstock."""
    return OtherVersionError(
        f"the worker runs Penstock {theirs[:40]!r}, and the head {ours!r}.",
        remedy="Install the same version of Penstock on all hosts.",
    )
