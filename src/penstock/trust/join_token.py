"""The token that lets a worker join: a secret, and the hash of the key of the cluster that it is for.

    A-ABCD-EFGH-…       one character for the version, then 14 groups of 4

The 56 characters are base32 of 35 bytes: 16 random bytes (the secret), the first 16 bytes of the SHA-256 of
the cluster's public key (the pin), and a checksum of 3 bytes. An attacker that wants to pass for the cluster
must find another key whose hash has the same 16 bytes. That takes 2^128 tries, as many as guessing the secret
takes: only the owner of the cluster has chosen its key, so finding any two keys with one hash does not help.
The checksum distinguishes a mistyped token from a wrong one. Reading accepts small letters, spaces, line
ends, dashes and underscores. It also accepts the digits 0 and 1 for the letters O and I, since base32 lacks
these digits.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from pathlib import Path

from penstock.errors import JoinTokenError, WrongClusterError
from penstock.trust.certificates import fingerprint
from penstock.trust.private_files import create_private, read_private

VERSION = "A"
SECRET_BYTES = PIN_BYTES = 16
_CHECKSUM_BYTES = 3
_NUM_CHARACTERS = 56
_LOOK_ALIKES = str.maketrans("01", "OI")
_SEPARATORS = dict.fromkeys(map(ord, " \t\r\n-_"))


class JoinToken:
    """A secret of a cluster, and the pin of the cluster's key; `repr` shows neither.

    Args:
        secret: 16 random bytes.
        pin: the first 16 bytes of the fingerprint of the cluster's key.
    """

    __slots__ = ("_pin", "_secret")

    def __init__(self, secret: bytes, pin: bytes) -> None:
        assert (len(secret), len(pin)) == (SECRET_BYTES, PIN_BYTES)
        self._secret = secret
        self._pin = pin

    def __repr__(self) -> str:
        return "JoinToken(…)"

    @classmethod
    def new(cls, public_key: bytes) -> JoinToken:
        """Return a new token for the cluster whose key (DER) this is."""
        return cls(secrets.token_bytes(SECRET_BYTES), fingerprint(public_key)[:PIN_BYTES])

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Read a token that was copied or typed.

        Raises:
            JoinTokenError: the text is mistyped, or of another version. The message does not repeat the text.
        """
        characters = text.translate(_SEPARATORS).upper()
        version, body = characters[:1], characters[1:].translate(_LOOK_ALIKES)
        if version != VERSION or len(body) != _NUM_CHARACTERS:
            raise _mistyped(f"it should begin with {VERSION} and have {_NUM_CHARACTERS + 1} characters")
        try:
            content = base64.b32decode(body)
        except (binascii.Error, ValueError):  # the latter: a letter that is not ASCII
            raise _mistyped("it has a character that is not allowed in tokens") from None
        payload, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if checksum != _checksum(payload):
            raise _mistyped("a character is wrong, or two are swapped")
        return cls(payload[:SECRET_BYTES], payload[SECRET_BYTES:])

    def text(self) -> str:
        """Return the token as people copy it; this text belongs in a private file and nowhere else."""
        payload = self._secret + self._pin
        body = base64.b32encode(payload + _checksum(payload)).decode("ascii")
        return "-".join([VERSION, *(body[start : start + 4] for start in range(0, _NUM_CHARACTERS, 4))])

    @property
    def cluster(self) -> str:
        """The name of the cluster whose token this is."""
        return self._pin.hex()

    def is_pin_of(self, public_key: bytes) -> bool:
        """Return whether the token is for the cluster whose key (DER) this is."""
        return hmac.compare_digest(fingerprint(public_key)[:PIN_BYTES], self._pin)

    def proof_key(self) -> bytes:
        """Return the key with which the secret is proved and checked; the secret cannot be found from it."""
        return hmac.digest(self._secret, b"penstock join proof", "sha256")


def head_token(path: Path, public_key: bytes) -> JoinToken:
    """Return the token of the head, the content of a private file, which is made if it does not exist.

    Raises:
        UsageError: other users may read the file, or it cannot be written.
        JoinTokenError: the file does not hold a token.
        WrongClusterError: the token in the file is for another cluster.
    """
    create = JoinToken.new(public_key)
    try:
        token = worker_token(path)
    except FileNotFoundError:
        token = create if create_private(path, f"{create.text()}\n".encode()) else worker_token(path)
    if not token.is_pin_of(public_key):
        raise WrongClusterError(
            f"the token in {path} is for another cluster than this head's.",
            remedy="Delete the file to get a new one, or start with that cluster's state directory.",
        )
    return token


def worker_token(path: Path) -> JoinToken:
    """Return the token in a private file.

    Raises:
        FileNotFoundError: there is no such file.
        UsageError: other users may read the file, or it cannot be read.
        JoinTokenError: the file does not hold a token.
    """
    try:
        return JoinToken.parse(read_private(path).decode("utf-8"))
    except UnicodeDecodeError:
        raise _mistyped("it is not text") from None


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(b"penstock join token " + VERSION.encode() + payload).digest()[:_CHECKSUM_BYTES]


def _mistyped(reason: str) -> JoinTokenError:
    return JoinTokenError(
        f"the join token is mistyped or of another version: {reason}.",
        remedy="Copy the token again from the token file of the head.",
        code="mistyped_token",
    )
