"""The credentials of a process within its cluster: its key, its certificate, the authority's certificate.

An agent keeps its credentials in a private file, and joins again with them. A rank gets credentials for one
epoch, as a descriptor of memory without a name. They are never in a named file or an environment variable,
which other processes could see.

    agent                                            rank
    key, request = new_key(), signing_request(key)
    certificate  = the head's answer (`ClusterIdentity.sign_link`)
    fd = Credentials(…).to_memory() ── inherited, or over the control socket ──▶ Credentials.from_memory(fd)

Needs no library beyond Python's own.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from penstock.errors import ProtocolError, UsageError
from penstock.trust.private_files import make_private_directory, read_private, replace_private

_MAX_BYTES = 1 << 16


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """The key and certificate of a process and the certificate of the authority; `repr` shows none of them.

    Attributes:
        key_pem: private key of the process.
        certificate_pem: certificate of the process.
        authority_pem: certificate of the cluster's authority.
        epoch_key: 32 random bytes that only the processes of one epoch have, to prove themselves on links in
            plain text (`trust.challenge`); empty for credentials that are not for links.
    """

    key_pem: bytes
    certificate_pem: bytes
    authority_pem: bytes
    epoch_key: bytes = b""

    def __repr__(self) -> str:
        return "Credentials(…)"

    def save(self, path: Path) -> None:
        """Write the credentials to a private file in a private directory, in place of older ones.

        Raises:
            UsageError: the directory cannot be used, or others may enter it.
        """
        make_private_directory(path.parent)
        replace_private(path, msgspec.msgpack.encode(self))

    @classmethod
    def load(cls, path: Path) -> Credentials:
        """Read what `save` has written.

        Raises:
            FileNotFoundError: there is no such file.
            UsageError: other users may read the file, or it is damaged.
        """
        content = read_private(path)
        try:
            return msgspec.msgpack.decode(content, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{path} is damaged.", remedy="Delete the file, and join again with a token."
            ) from error

    def to_memory(self) -> int:
        """Return a descriptor of sealed memory with the credentials; the caller closes it."""
        handle = os.memfd_create("penstock-credentials", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _write_all(handle, msgspec.msgpack.encode(self))
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(handle)
            raise
        return handle

    @classmethod
    def from_memory(cls, handle: int) -> Credentials:
        """Read what `to_memory` has written, and close the descriptor.

        Raises:
            ProtocolError: the memory holds something else.
        """
        try:
            content = os.pread(handle, _MAX_BYTES, 0)  # the offset is shared with other processes
            return msgspec.msgpack.decode(content, type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError("the credentials passed to this process are damaged.") from error
        finally:
            os.close(handle)


def _write_all(handle: int, content: bytes) -> None:
    while content:
        content = content[os.write(handle, content) :]
