"""Which replica gets a request: the one that has least to compute before its first token.

    tokens ahead of it in the replica  +  its own that the replica has not cached

A replica is taken to have cached the beginnings of prompts that were sent to it, in whole chunks. Does no
I/O: `engine.client.replicas` says how much work each replica has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

DECODE_TOKENS = 16  # a request that decodes counts as a prompt of so many: it takes part in each step
_CHUNK = 64  # tokens; beginnings are remembered in multiples
_MAX_CHUNKS = 64  # of a prompt that are looked at
_MAX_REMEMBERED = 1 << 16


class Router:
    """Orders replicas for each request, and remembers where requests went.

    Args:
        num_replicas: at least 1.
        has_cache: whether replicas keep the keys and values of prompts for later ones.
    """

    def __init__(self, num_replicas: int, *, has_cache: bool) -> None:
        self._num_routed = [0] * num_replicas
        self._has_cache = has_cache
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]

    def order(self, prompt: Sequence[int], ahead: Sequence[int], has_room: Sequence[bool]) -> list[int]:
        """Return the replicas to try, the best first.

        Args:
            ahead: tokens that each has to compute before it comes to this request.
            has_room: whether each takes requests; replicas that are away or full come last.
        """
        hashes = list(_beginnings(prompt)) if self._has_cache else []
        costs = [
            (not has_room[index], work - self._num_cached(index, hashes), self._num_routed[index])
            for index, work in enumerate(ahead)
        ]
        return sorted(range(len(costs)), key=costs.__getitem__)

    def routed(self, prompt: Sequence[int], replica: int) -> None:
        """Note that the request with this prompt went to the replica."""
        self._num_routed[replica] += 1
        if not self._has_cache:
            return
        seen = self._seen[replica]
        for beginning in _beginnings(prompt):
            seen[beginning] = None
            seen.move_to_end(beginning)
        while len(seen) > _MAX_REMEMBERED:
            seen.popitem(last=False)

    def _num_cached(self, replica: int, hashes: Sequence[int]) -> int:
        """Return the number of tokens of the longest beginning that was sent to the replica."""
        seen = self._seen[replica]
        return next((_CHUNK * count for count in range(len(hashes), 0, -1) if hashes[count - 1] in seen), 0)


def _beginnings(prompt: Sequence[int]) -> Iterator[int]:
    """Yield a hash for each beginning of whole chunks, the shortest first."""
    value = 0
    for end in range(_CHUNK, min(len(prompt), _CHUNK * _MAX_CHUNKS) + 1, _CHUNK):
        value = hash((value, *prompt[end - _CHUNK : end]))
        yield value
