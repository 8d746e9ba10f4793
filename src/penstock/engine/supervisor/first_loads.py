"""Keeps digests of the weights that the first ranks have read, to check what their replacements read.

One table of digests (checksums) serves all ranks, so that a tensor that several ranks read is kept once.
"""

from __future__ import annotations

from penstock.process.config import FirstLoad
from penstock.weights.read_digests import parse_table


class FirstLoads:
    """The digests of the weights that the ranks of one pipeline have read at the first load.

    The first report about a tensor or a rank stays; later ones change nothing.
    """

    def __init__(self) -> None:
        self._digests: dict[bytes, bytes] = {}
        self._identities: dict[int, bytes] = {}  # by member index: a hash over samples of the model's files

    def add(self, digests: bytes) -> None:
        """Add the digests that a rank reports, in a table of `weights.read_digests`."""
        for key, digest in parse_table(digests).items():
            self._digests.setdefault(key, digest)

    def identify(self, member_index: int, identity: bytes) -> None:
        """Record the identity of the model that a rank has loaded, a hash over samples of its files.

        Args:
            member_index: number of the rank.
        """
        self._identities.setdefault(member_index, identity)

    def of(self, member_index: int) -> FirstLoad:
        """Return the model identity and digests that a replacement of this rank must find on its disk."""
        table = b"".join(key + digest for key, digest in self._digests.items())
        return FirstLoad(identity=self._identities.get(member_index, b""), digests=table)
