"""The messages between a worker and the head while the worker joins, and their frames.

Inside TLS 1.3 each message is a header of 7 bytes and a body of msgpack:

    protocol (2 bytes) | kind (1) | length of the body (4) | body

    head                                             worker
    HELLO   public key (91), then Hello       ──▶    checks that the key fits its token or certificate, and
                                                     has signed the head's certificate; then it reads on
                                              ◀──    JOIN    proof (32), then JoinRequest: with a token
                                              ◀──    REJOIN  RejoinRequest: with a certificate
                                              ◀──    VISIT   body as of JOIN or REJOIN: a host only looks
                                                     whether it could join; it uses no token up
    WELCOME Welcome                           ──▶    stores its new certificate, if any
                                              ◀──    STORED
    DONE                                      ──▶
    REFUSED ErrorInfo                         ──▶    in place of WELCOME or DONE
                                              ◀──    OTHER_VERSION, in place of a request

The header, and the place of the public key in HELLO, are the same in every version, so that each side can
name the version of the other. The proof is an HMAC over the head's certificate, the head's nonce and the body
behind the proof. The head parses no byte of a JOIN before it has checked the proof.
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
MAX_BYTES = 16 << 10  # the most bytes of all messages of a peer in this protocol together
NOT_JOINED = "not_joined"  # code of an error; the worker's connection may only be broken for a moment
NONCE_BYTES = PROOF_BYTES = 32
HEADER = struct.Struct(">HBI")
_CONTEXT = b"penstock join 1"

Message = TypeVar("Message", bound=msgspec.Struct)


class Kind(enum.IntEnum):
    """The kind of a message, which stands in its header."""

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
    """The first message of the head, behind its public key.

    Attributes:
        version: version of Penstock.
        authority: the certificate (PEM) of the cluster.
        nonce: 32 random bytes for the proof.
    """

    version: str
    authority: bytes
    nonce: bytes


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request of a worker that has a token and wants a certificate.

    Attributes:
        version: version of Penstock.
        host: the name that the worker wants for its host.
        request: signing request for the certificate (DER).
    """

    version: str
    host: str
    request: bytes


class RejoinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request of a worker that has a certificate and connects again.

    Attributes:
        version: version of Penstock.
        request: signing request for a newer certificate (DER); empty: the worker needs none yet.
    """

    version: str
    request: bytes = b""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The head's answer to a request that it accepts.

    Attributes:
        certificate: the new certificate (PEM); empty if none was requested.
    """

    certificate: bytes = b""


def proof(key: bytes, head_certificate: bytes, nonce: bytes, body: bytes) -> bytes:
    """Return the proof that only a peer with the token's key can make, for this connection and request alone.

    Args:
        key: `JoinToken.proof_key`.
        head_certificate: the head's certificate (DER) as the TLS handshake has shown it. An attacker in
            between would show another one, for which the proof is of no use.
        nonce: the head's random bytes for this connection.
        body: the body of the request.
    """
    parts = (head_certificate, nonce, body)
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hmac.digest(key, _CONTEXT + digests, "sha256")


def framed(kind: Kind, body: bytes = b"") -> bytes:
    """Return a message with its header."""
    assert len(body) + HEADER.size <= MAX_BYTES, f"{len(body)} bytes"
    return HEADER.pack(PROTOCOL, kind, len(body)) + body


def decode(body: bytes, message: type[Message]) -> Message:
    """Return the message that a body encodes.

    Raises:
        ProtocolError: the body is not a message of this type.
    """
    try:
        return msgspec.msgpack.decode(body, type=message)
    except (msgspec.MsgspecError, ValueError) as error:
        raise garbage() from error


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """A message as it came.

    Attributes:
        protocol: the other side's version of the join protocol.
    """

    protocol: int
    kind: Kind
    body: bytes


class MessageReader:
    """Cuts a stream into messages, and never wants a byte behind the end of the present message.

    Args:
        max_bytes: the most bytes of all messages together, with their headers.
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
            ProtocolError: the data is not a header, or the message is too long.
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
        """Return the length of the body, after checking that it is small enough to be kept in memory."""
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
    """Return the error about a peer that sends what the protocol does not have at this place."""
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
