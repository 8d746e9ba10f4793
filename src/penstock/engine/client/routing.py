"""Chooses the replica of a request: the one that has least to compute before its first token.

What a replica has to compute are these tokens:

    tokens ahead of it in the replica  +  its own that the replica has not cached

A replica is taken to have cached the beginnings of prompts that were sent to it, in whole chunks. Does no
I/O: `engine.client.replicas` says how much work each replica has, and `examples/ray_serve.py` does so for
replicas that come and go.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

DECODE_TOKENS = 16  # a request that decodes counts as a prompt of so many: it takes part in each step
_CHUNK = 64  # tokens; beginnings are remembered in multiples
_MAX_CHUNKS = 64  # of a prompt that are looked at
_MAX_REMEMBERED = 1 << 16

Replica = TypeVar("Replica", bound=Hashable)


class Load(NamedTuple):
    """The load of one replica, as the router needs it for one request.

    Attributes:
        ahead: tokens that the replica has to compute before it comes to another request.
        has_room: whether it takes requests; replicas that are away or full come last.
    """

    ahead: int
    has_room: bool = True


class Router(Generic[Replica]):
    """Orders replicas for each request, and remembers where requests went.

    Args:
        has_cache: whether replicas keep the keys and values of prompts for later ones.
    """

    def __init__(self, *, has_cache: bool) -> None:
        self._num_routed: Counter[Replica] = Counter()
        self._has_cache = has_cache
        self._seen: defaultdict[Replica, OrderedDict[int, None]] = defaultdict(OrderedDict)

    def order(self, prompt: Sequence[int], loads: Mapping[Replica, Load]) -> list[Replica]:
        """Return the replicas in the order in which a request should try them, the best first.

        Those with room come first; among them the one with the fewest tokens to compute until the request has
        its first token.
        """
        hashes = list(_beginnings(prompt)) if self._has_cache else []
        costs = {
            replica: (
                not load.has_room,
                load.ahead - self._num_cached(replica, hashes),
                self._num_routed[replica],
            )
            for replica, load in loads.items()
        }
        return sorted(costs, key=costs.__getitem__)

    def routed(self, prompt: Sequence[int], replica: Replica) -> None:
        """Record that the request with this prompt was sent to the replica, which may now have it cached."""
        self._num_routed[replica] += 1
        if not self._has_cache:
            return
        seen = self._seen[replica]
        for beginning in _beginnings(prompt):
            seen[beginning] = None
            seen.move_to_end(beginning)
        while len(seen) > _MAX_REMEMBERED:
            seen.popitem(last=False)

    def forget_others(self, replicas: Collection[Replica]) -> None:
        """Forget all replicas that are not among these: they have ended, and their caches with them."""
        for replica in self._num_routed.keys() - replicas:
            del self._num_routed[replica]
            self._seen.pop(replica, None)

    def _num_cached(self, replica: Replica, hashes: Sequence[int]) -> int:
        """Return the number of tokens of the longest beginning that was sent to the replica."""
        seen: Mapping[int, None] = self._seen.get(replica, {})
        return next((_CHUNK * count for count in range(len(hashes), 0, -1) if hashes[count - 1] in seen), 0)


def _beginnings(prompt: Sequence[int]) -> Iterator[int]:
    """Yield a hash for each beginning of whole chunks, the shortest first."""
    value = 0
    for end in range(_CHUNK, min(len(prompt), _CHUNK * _MAX_CHUNKS) + 1, _CHUNK):
        value = hash((value, *prompt[end - _CHUNK : end]))
        yield value
