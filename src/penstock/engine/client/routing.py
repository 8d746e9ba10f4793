"""Chooses the replica of a request: the one that has least to compute before the request's first token.

What a replica has to compute are these tokens:

    tokens of requests before it  +  tokens of its own prompt that the replica has not cached

The router assumes that a replica has cached the prompts that were sent to it. It remembers their beginnings
in multiples of 64 tokens. It does no I/O: `engine.client.replicas` says how much work each replica has, and
`examples/ray_serve.py` does so for replicas that come and go.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

DECODE_TOKENS = 16  # a request that decodes counts as so many prompt tokens, since it is in each step
_CHUNK = 64  # tokens; beginnings of prompts are remembered in multiples of it
_MAX_CHUNKS = 64  # so many multiples of a prompt are looked at
_MAX_REMEMBERED = 1 << 16  # beginnings of prompts, for each replica

Replica = TypeVar("Replica", bound=Hashable)


class Load(NamedTuple):
    """The load of one replica, as the router needs it for one request.

    Attributes:
        ahead: tokens that the replica has to compute before it comes to a new request.
        has_room: whether the replica takes requests; those that are not ready or full are tried last.
    """

    ahead: int
    has_room: bool = True


class Router(Generic[Replica]):
    """Orders replicas for each request, and remembers where requests went.

    Args:
        has_cache: whether replicas keep the KV blocks of prompts for later prompts.
    """

    def __init__(self, *, has_cache: bool) -> None:
        self._num_routed: Counter[Replica] = Counter()
        self._has_cache = has_cache
        self._seen: defaultdict[Replica, OrderedDict[int, None]] = defaultdict(OrderedDict)

    def order(self, prompt: Sequence[int], loads: Mapping[Replica, Load]) -> list[Replica]:
        """Return the replicas in the order in which a request should try them, the best first.

        Replicas with room come before others. Within both groups, replicas with fewer tokens to compute
        before the request's first token come first; of equal ones, those that got fewer requests so far.
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
        """Forget all replicas except these; the others have ended, and their caches with them."""
        for replica in self._num_routed.keys() - replicas:
            del self._num_routed[replica]
            self._seen.pop(replica, None)

    def _num_cached(self, replica: Replica, hashes: Sequence[int]) -> int:
        """Return the number of tokens of the longest beginning that was sent to the replica."""
        seen: Mapping[int, None] = self._seen.get(replica, {})
        return next((_CHUNK * count for count in range(len(hashes), 0, -1) if hashes[count - 1] in seen), 0)


def _beginnings(prompt: Sequence[int]) -> Iterator[int]:
    """Yield a hash for each beginning of the prompt of a multiple of `_CHUNK` tokens, the shortest first."""
    value = 0
    for end in range(_CHUNK, min(len(prompt), _CHUNK * _MAX_CHUNKS) + 1, _CHUNK):
        value = hash((value, *prompt[end - _CHUNK : end]))
        yield value
