"""Names KV blocks: a name says what a block holds, and all that came before it.

    root (salt, numeric class) ──▶ hash of block 0 ──▶ hash of block 1 ──▶ …
                                    tokens 0 .. B-1     tokens B .. 2B-1

A hash is the SHA-256 of the hash before and of the block's tokens, so that equal hashes mean equal keys and
values, given one model and dtype. Names do not depend on stages, ranks or epochs [d15], but on the
numeric class in which the ranks compute: the results of one class differ in the last bits from those of
another. A salt keeps clients that do not share it apart: they cannot tell from the time of an answer what
others have asked.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence


def root_hash(salt: str = "") -> bytes:
    """Return the hash that stands before the first block of a prompt in its chain of hashes.

    Args:
        salt: requests with different salts share no blocks.
    """
    return hashlib.sha256(b"penstock kv block\0" + salt.encode("utf-8", "surrogatepass")).digest()


def root_in_class(root: bytes, numeric_class: str) -> bytes:
    """Return the hash before the first block, for blocks that ranks of this numeric class compute.

    Ranks of one class compute the same bits.

    Args:
        root: the hash from `root_hash`.
        numeric_class: "" is the unknown class, for which the root itself is returned.
    """
    return hashlib.sha256(root + numeric_class.encode()).digest() if numeric_class else root


def block_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hashes of the whole blocks of `token_ids`, in order; a partial block has none.

    Args:
        parent: the hash of the block before, or the root.
        token_ids: the token ids, each in [0, 2**32).
        block_size: tokens per block.
    """
    sha256, stride = hashlib.sha256, 4 * block_size
    numbers = array("I", token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    data, hashes = memoryview(numbers.tobytes()), []
    for start in range(0, len(data) - stride + 1, stride):
        parent = sha256(parent + data[start : start + stride]).digest()
        hashes.append(parent)
    return hashes
