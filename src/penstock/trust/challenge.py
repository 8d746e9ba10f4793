"""A challenge by which both ends of an unencrypted link prove themselves, with the key of an epoch.

Links are in plain text only if the command lines of both hosts have `--insecure-links`. Then an attacker on
the network can read hidden states, and change them by changing packets. But nobody can open a link without
the key of the epoch, which the head gives to the processes of that epoch over encrypted channels.

    dialler                                                      accepter
    OPENING, nonce (32), length and name of the dialler    ──▶   checks that it expects this name
                                          ◀──   nonce (32), HMAC over both nonces and both names, as accepter
    HMAC over the same, as dialler                         ──▶
                                                           ◀──   welcome; all bytes after it are the link's

Each side proves itself with a text that has the other side's nonce and its own role. A proof can therefore
not be used again, for another side or at another time. Only the name has a free length; it is compared with
the expected names, and never parsed.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Collection

from penstock.errors import CertificateError, LinkClosedError, PenstockError, ProtocolError
from penstock.trust.conversation import WELCOME, Welcomed
from penstock.trust.peer_names import PeerName

KEY_BYTES = 32
OPENING = b"penstock link 1\n"
_NONCE_BYTES = _PROOF_BYTES = 32
_HEAD_BYTES = len(OPENING) + _NONCE_BYTES + 2
_MAX_NAME = 256


def new_epoch_key() -> bytes:
    """Return the key of an epoch (`Credentials.epoch_key`)."""
    return secrets.token_bytes(KEY_BYTES)


class _Challenge:
    """The common part of both sides: a message of `_needed` bytes is passed to `_next` once it is whole.

    Args:
        key: the key of the epoch.
        needed, take: length and receiver of the first message that this side waits for.
    """

    def __init__(self, key: bytes, needed: int, take: Callable[[bytes], None]) -> None:
        assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
        self._key = key
        self._buffer = self._outgoing = b""
        self._needed, self._next = needed, take

    @property
    def wanted(self) -> int:
        return self._needed - len(self._buffer)

    def take_outgoing(self) -> bytes:
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def receive(self, data: bytes) -> None:
        self._buffer += data
        if self.wanted:
            return
        message, self._buffer, self._needed = self._buffer, b"", 0
        self._next(message)

    def end_of_stream(self) -> None:
        raise _closed()

    def abandon(self) -> None:
        self._needed = len(self._buffer)


class DialledChallenge(_Challenge):
    """The side that has connected. Implements `Conversation`.

    Args:
        key: the key of the epoch.
        own, peer: names of this process and of the process that it wants to reach.
    """

    def __init__(self, key: bytes, own: PeerName, peer: PeerName) -> None:
        super().__init__(key, _NONCE_BYTES + _PROOF_BYTES, self._take_proof)
        self.peer = peer
        self._names = (own, peer)
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        name = own.uri.encode()
        self._outgoing = OPENING + self._nonce + len(name).to_bytes(2, "big") + name

    def _take_proof(self, message: bytes) -> None:
        nonces = self._nonce + message[:_NONCE_BYTES]
        expected = _proof(self._key, b"accepter", nonces, self._names)
        if not hmac.compare_digest(expected, message[_NONCE_BYTES:]):
            raise _not_proved()
        self._outgoing += _proof(self._key, b"dialler", nonces, self._names)
        self._needed, self._next = len(WELCOME), self._take_welcome

    def _take_welcome(self, message: bytes) -> None:
        Welcomed().receive(message)


class AcceptedChallenge(_Challenge):
    """The side that has accepted the connection. Implements `Conversation`.

    Args:
        key: the key of the epoch.
        own: name of this process.
        expected: names of the processes that may connect.

    Attributes:
        peer: name of the process that has connected, once it has proved itself.
    """

    def __init__(self, key: bytes, own: PeerName, expected: Collection[PeerName]) -> None:
        super().__init__(key, _HEAD_BYTES, self._take_head)
        self.peer: PeerName
        self._own = own
        self._expected = {name.uri.encode(): name for name in expected}
        self._dialler: PeerName
        self._nonces = b""

    def _take_head(self, message: bytes) -> None:
        if not message.startswith(OPENING):
            raise ProtocolError(
                "the other side does not accept links in plain text.",
                remedy="Give --insecure-links on all hosts, or on none.",
                code="not_a_link",
            )
        length = int.from_bytes(message[-2:], "big")
        if not 0 < length <= _MAX_NAME:
            raise ProtocolError(f"the other side has a name of {length} bytes.", code="too_long")
        self._nonces = message[len(OPENING) : -2]
        self._needed, self._next = length, self._take_name

    def _take_name(self, message: bytes) -> None:
        dialler = self._expected.get(message)
        if dialler is None:
            raise CertificateError(
                "an unexpected process tries to open a link in this epoch.", code="unexpected_peer"
            )
        self._dialler = dialler
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._nonces += nonce
        self._outgoing += nonce + _proof(self._key, b"accepter", self._nonces, (dialler, self._own))
        self._needed, self._next = _PROOF_BYTES, self._take_proof

    def _take_proof(self, message: bytes) -> None:
        if not hmac.compare_digest(
            _proof(self._key, b"dialler", self._nonces, (self._dialler, self._own)), message
        ):
            raise _not_proved()
        self.peer = self._dialler
        self._outgoing += WELCOME


def _proof(key: bytes, role: bytes, nonces: bytes, names: tuple[PeerName, PeerName]) -> bytes:
    """Return the proof of a side: an HMAC over role, names and nonces.

    Names have no line ends and nonces have a fixed length, so no two sets of these give the same text.
    """
    dialler, accepter = (name.uri.encode() for name in names)
    return hmac.digest(key, b"\n".join((OPENING + role, dialler, accepter, nonces)), "sha256")


def _not_proved() -> PenstockError:
    return CertificateError(
        "the other side of a link does not have the key of this epoch.",
        remedy="If a worker was started twice, end one of them.",
        code="wrong_epoch_key",
    )


def _closed() -> PenstockError:
    return LinkClosedError("the other side closed a link before it was open.")
