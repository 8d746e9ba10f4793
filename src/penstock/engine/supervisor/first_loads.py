"""Keeps what the ranks of a pipeline read when it was loaded first, for the ranks that replace them.

One table serves all ranks of a pipeline, so that what several of them have read is kept once.
"""

from __future__ import annotations

from penstock.process.config import FirstLoad
from penstock.weights.read_digests import parse_table


class FirstLoads:
    """The digests of the first load of one pipeline. What was heard first stays."""

    def __init__(self) -> None:
        self._digests: dict[bytes, bytes] = {}
        self._identities: dict[int, bytes] = {}  # of the model as each rank has sampled it, by member index

    def add(self, digests: bytes) -> None:
        """Add records of a table of `weights.read_digests`."""
        for key, digest in parse_table(digests).items():
            self._digests.setdefault(key, digest)

    def identify(self, member_index: int, identity: bytes) -> None:
        """Note which model a rank has loaded."""
        self._identities.setdefault(member_index, identity)

    def of(self, member_index: int) -> FirstLoad:
        """Return what the replacement of a rank must find on its disk."""
        table = b"".join(key + digest for key, digest in self._digests.items())
        return FirstLoad(identity=self._identities.get(member_index, b""), digests=table)
