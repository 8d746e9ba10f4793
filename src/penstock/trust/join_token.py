"""The token that lets a worker join: a secret, and the pin of the cluster that it is for.

    A-ABCD-EFGH-…       one character for the version, then 14 groups of 4

The 56 characters are base32 of 35 bytes: 16 random ones, 16 of the SHA-256 of the cluster's public key, and a
checksum of 3. To pass for the cluster, a key must be found whose hash has the same 16 bytes; that takes 2^128
tries, as guessing the secret does, since nobody but the owner of the cluster chooses its first key. The
checksum tells a slip of the pen from a wrong token. Reading takes small letters, spaces, line ends and
dashes, and the digits 0 and 1 for the letters O and I, which base32 has in their place.
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
    """A secret of a cluster and the pin of its key. Its `repr` shows neither.

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
            JoinTokenError: it is mistyped, or of another version. The message does not repeat it.
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
        """Return the token as people copy it. It belongs in a private file and nowhere else."""
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
        """Return the key with which the secret is proved and checked. It does not lead back to the secret."""
        return hmac.digest(self._secret, b"penstock join proof", "sha256")


def head_token(path: Path, public_key: bytes) -> JoinToken:
    """Return the token of the head: the content of a private file, which is written when it is not there.

    Raises:
        UsageError: others may read the file, or it cannot be written.
        JoinTokenError: it does not hold a token.
        WrongClusterError: its token is for another cluster.
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
        UsageError: others may read it, or it cannot be read.
        JoinTokenError: it does not hold a token.
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
