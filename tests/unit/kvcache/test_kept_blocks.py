"""What open sessions keep: bounds, the order in which it is given up, and when they close by themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeClock
from penstock.config.engine import EvictionPolicy
from penstock.errors import InvalidRequestError, NotFoundError, OverloadedError
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_hash import block_hashes, root_hash
from penstock.kvcache.block_pool import BlockPool
from penstock.kvcache.eviction import HeapOrder, LruOrder, Worth, eviction_order
from penstock.kvcache.prefix_cache import PrefixCache
from penstock.kvcache.sessions import Sessions
from penstock.operations import CloseSession, OpenSession

BLOCK = 4
ROOT = root_hash()
POLICIES: tuple[EvictionPolicy, ...] = ("lru", "lfu", "priority")


class Rig:
    """A pool with sessions, used as the scheduler does."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy = "lru", max_sessions: int = 8) -> None:
        cache = PrefixCache(num_blocks, eviction_order(policy))
        self.blocks = BlockAllocator(BlockPool(num_blocks, cache), BLOCK)
        self.clock = FakeClock()
        self.sessions = Sessions(self.blocks, max_sessions, self.clock)
        self._owners: dict[int, tuple[str, list[bytes]]] = {}

    def open(self, session_id: str, capacity_tokens: int | None = None, idle_s: float = 60.0) -> None:
        self.sessions.open(OpenSession(session_id, capacity_tokens, idle_s))

    def begin(self, tokens: list[int], session_id: str = "", priority: int = 0) -> int:
        """A request that computes them; its number."""
        owner = len(self._owners)
        names = block_hashes(ROOT, tokens, BLOCK)
        found = self.blocks.find(names)
        self.sessions.enter(session_id, owner)
        self.blocks.attach(owner, found, priority)
        assert self.blocks.grow(owner, len(tokens)) is not None
        self.blocks.name(owner, len(found), names[len(found) :], priority)
        self._owners[owner] = session_id, names
        self.blocks.check_invariants()
        return owner

    def end(self, owner: int) -> None:
        session_id, names = self._owners[owner]
        if session_id:
            self.sessions.leave(session_id, owner, names[: len(self.blocks.find(names))])
        self.blocks.free(owner)
        self.blocks.check_invariants()

    def run(self, tokens: list[int], session_id: str = "", priority: int = 0) -> None:
        self.end(self.begin(tokens, session_id, priority))

    def num_found(self, tokens: list[int]) -> int:
        return len(self.blocks.find(block_hashes(ROOT, tokens, BLOCK)))


def chain(token: int, length: int) -> list[int]:
    """Tokens of so many blocks."""
    return [token] * (BLOCK * length)


# --- bounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_g4_kept_blocks_outlive_others_that_were_let_go_later(policy: EvictionPolicy) -> None:
    rig = Rig(8, policy)
    rig.open("a")
    rig.run(chain(1, 3), "a")
    for token in range(2, 9):
        rig.run(chain(token, 5), priority=9)
    assert rig.num_found(chain(1, 3)) == 3
    assert rig.sessions.num_kept == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_g4_nobody_is_refused_a_block_because_of_sessions(policy: EvictionPolicy) -> None:
    rig = Rig(8, policy)
    rig.open("a")
    rig.run(chain(1, 4), "a")
    assert rig.blocks.num_free_blocks == 8
    rig.run(chain(2, 6))
    assert rig.num_found(chain(1, 4)) == 2, "its deepest went, when there was nothing else"
    rig.run(chain(3, 8))
    assert rig.num_found(chain(1, 4)) == 0


def test_g4_a_session_keeps_the_beginning_that_fits_its_capacity() -> None:
    rig = Rig(20)
    rig.open("a", capacity_tokens=3 * BLOCK + 3)
    rig.run(chain(1, 5), "a")
    assert rig.sessions.num_kept == 3
    rig.run(chain(2, 17))
    assert rig.num_found(chain(1, 5)) == 3


def test_g4_what_only_older_turns_had_makes_room_first_and_the_deepest_of_it() -> None:
    rig = Rig(40)
    rig.open("a", capacity_tokens=6 * BLOCK)
    rig.run(chain(1, 2) + chain(2, 3), "a")
    rig.run(chain(1, 2) + chain(3, 3), "a")
    rig.run(chain(9, 34))
    assert rig.num_found(chain(1, 2) + chain(3, 3)) == 5, "the newest turn"
    assert rig.num_found(chain(1, 2) + chain(2, 3)) == 3, "of the one before one block has room"


@pytest.mark.parametrize(("last", "expected"), [("a", (6, 2)), ("b", (3, 5))])
def test_g4_two_sessions_share_half_of_the_pool_and_the_one_goes_short_that_was_used_longest_ago(
    last: str, expected: tuple[int, int]
) -> None:
    rig = Rig(16)
    for name in "ab":
        rig.open(name)
    rig.run(chain(1, 6), "a")
    rig.run(chain(2, 5), "b")
    if last == "a":
        rig.run(chain(1, 6), "a")
    assert rig.sessions.num_kept == 8
    rig.run(chain(9, 8))
    assert (rig.num_found(chain(1, 6)), rig.num_found(chain(2, 5))) == expected


def test_g4_what_turns_have_in_common_is_as_new_as_the_newest_of_them() -> None:
    rig = Rig(16)
    rig.open("a", capacity_tokens=2 * BLOCK)
    for token in (2, 3, 4):
        rig.run(chain(1, 1) + chain(token, 1), "a")
    rig.run(chain(9, 14))
    assert rig.num_found(chain(1, 1) + chain(4, 1)) == 2


def test_g4_what_two_sessions_begin_with_is_kept_and_counted_once() -> None:
    rig = Rig(16)
    for name in "ab":
        rig.open(name)
    rig.run(chain(1, 4) + chain(2, 1), "a")
    rig.run(chain(1, 4) + chain(3, 1), "b")
    assert rig.sessions.num_kept == 6
    rig.sessions.close("a")
    assert rig.sessions.num_kept == 5
    rig.run(chain(9, 11))
    assert rig.num_found(chain(1, 4) + chain(3, 1)) == 5
    assert rig.num_found(chain(1, 4) + chain(2, 1)) == 4


def test_g4_what_a_closed_session_kept_goes_when_it_would_have_gone() -> None:
    """Not as if it had been let go when the session was closed."""
    rig = Rig(6)
    rig.open("a")
    rig.run(chain(1, 2), "a")
    rig.run(chain(2, 2))
    rig.sessions.close("a")
    rig.run(chain(3, 3))
    assert (rig.num_found(chain(1, 2)), rig.num_found(chain(2, 2))) == (1, 2)


def test_g4_a_session_that_is_opened_again_gets_other_bounds_and_keeps_what_fits() -> None:
    rig = Rig(16)
    rig.open("a", idle_s=10)
    rig.run(chain(1, 5), "a")
    rig.clock.advance(9)
    rig.open("a", capacity_tokens=2 * BLOCK, idle_s=5)
    assert (len(rig.sessions), rig.sessions.num_kept) == (1, 2)
    rig.clock.advance(5)
    rig.sessions.expire()
    assert len(rig.sessions) == 0


def test_g4_more_sessions_than_the_bound_are_refused_until_one_is_closed() -> None:
    rig = Rig(8, max_sessions=2)
    rig.open("a")
    rig.open("b")
    rig.open("a")
    with pytest.raises(OverloadedError) as raised:
        rig.open("c")
    assert raised.value.code == "too_many_sessions"
    rig.sessions.apply(CloseSession("b"))
    rig.sessions.apply(OpenSession("c"))
    assert [asked.session_id for asked in rig.sessions.opened()] == ["a", "c"]


def test_g4_what_is_not_open_is_told_by_name() -> None:
    rig = Rig(8)
    rig.open("a")
    rig.sessions.require("a")
    rig.sessions.require("")
    for call in (rig.sessions.require, rig.sessions.close):
        with pytest.raises(NotFoundError) as raised:
            call("b")
        assert (raised.value.param, raised.value.code) == ("session_id", "session_not_found")


def test_g4_without_a_prefix_cache_there_is_nothing_to_keep() -> None:
    sessions = Sessions(BlockAllocator(BlockPool(4), BLOCK), 8, FakeClock())
    with pytest.raises(InvalidRequestError) as raised:
        sessions.open(OpenSession("a"))
    assert raised.value.code == "no_prefix_cache"


def test_g4_whoever_listens_hears_what_has_become_of_each_session() -> None:
    rig = Rig(8)
    rig.open("a")
    rig.open("b")
    rig.sessions.close("a")
    assert rig.sessions.take_changes() == ([OpenSession("b", None, 60.0)], ["a"])
    assert rig.sessions.take_changes() == ([], [])
    rig.open("b", capacity_tokens=8)
    assert rig.sessions.take_changes() == ([OpenSession("b", 8, 60.0)], [])
    rig.clock.advance(60)
    rig.sessions.expire()
    assert rig.sessions.take_changes() == ([], ["b"])


# --- time -------------------------------------------------------------------------------------------


def test_g4_a_session_that_nobody_uses_is_closed_and_keeps_nothing() -> None:
    rig = Rig(16)
    rig.open("a", idle_s=30)
    rig.open("b", idle_s=100)
    rig.run(chain(1, 2), "a")
    rig.run(chain(2, 2), "b")
    rig.clock.advance(29.9)
    rig.sessions.expire()
    assert len(rig.sessions) == 2
    rig.clock.advance(0.1)
    rig.sessions.expire()
    assert [asked.session_id for asked in rig.sessions.opened()] == ["b"]
    assert (rig.sessions.num_kept, rig.sessions.num_reaped) == (2, 1)


def test_g4_every_request_is_a_use_and_while_one_is_there_the_session_is() -> None:
    rig = Rig(16)
    rig.open("a", idle_s=30)
    for _ in range(3):
        rig.clock.advance(29)
        rig.run(chain(1, 2), "a")
        rig.sessions.expire()
    owner = rig.begin(chain(1, 2), "a")
    rig.clock.advance(1000)
    rig.sessions.expire()
    rig.end(owner)
    rig.clock.advance(29)
    rig.sessions.expire()
    assert len(rig.sessions) == 1
    rig.clock.advance(1)
    rig.sessions.expire()
    assert len(rig.sessions) == 0


def test_g4_a_request_that_ends_after_its_session_leaves_what_any_other_leaves() -> None:
    rig = Rig(16)
    rig.open("a")
    owner = rig.begin(chain(1, 2), "a")
    rig.sessions.close("a")
    rig.end(owner)
    assert rig.sessions.num_kept == 0
    owner = rig.begin(chain(1, 2), "a")
    rig.open("a", idle_s=1)
    rig.end(owner)
    rig.clock.advance(1)
    rig.sessions.expire()
    assert len(rig.sessions) == 0, "it is not taken to be there still"


@pytest.mark.parametrize("is_open_at_first", [True, False])
def test_g4_a_session_that_is_opened_again_does_not_expire_under_its_request(is_open_at_first: bool) -> None:
    """The requests that run were forgotten with the session that was closed."""
    rig = Rig(16)
    if is_open_at_first:
        rig.open("a", idle_s=30)
    owner = rig.begin(chain(1, 2), "a")
    if is_open_at_first:
        rig.sessions.close("a")
    rig.open("a", idle_s=30)
    rig.clock.advance(1000)
    rig.sessions.expire()
    rig.end(owner)
    assert (len(rig.sessions), rig.sessions.num_kept) == (1, 2)
    rig.clock.advance(30)
    rig.sessions.expire()
    assert len(rig.sessions) == 0


# --- the order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(
    worths=st.lists(
        st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(0, 5), st.booleans()), max_size=40
    )
)
def test_h10_what_is_restored_goes_in_its_place(
    policy: EvictionPolicy, worths: list[tuple[int, int, int, bool]]
) -> None:
    """Blocks come in the order of time, some are taken out and come back late."""
    order = LruOrder() if policy == "lru" else HeapOrder(policy)
    made = [
        Worth(uses=uses, priority=priority, freed_at=time, depth=time % 2 * depth, hash=bytes([time]))
        for time, (uses, priority, depth, _) in enumerate(worths)
    ]
    late = [block for block, (_, _, _, is_late) in enumerate(worths) if is_late]
    for block, worth in enumerate(made):
        order.add(block, worth)
    for block in late:
        order.discard(block)
    for block in reversed(late):
        order.restore(block, made[block])
    given_up = [order.pop(made.__getitem__) for _ in range(len(order))]
    rank = {"lru": lambda _: 0, "lfu": lambda one: one.uses, "priority": lambda one: one.priority}[policy]
    assert given_up == sorted(range(len(made)), key=lambda block: (rank(made[block]), block))
    assert len(order) == 0


@dataclass
class Plain:
    """Cache and sessions as their definition says it, with lists that are searched."""

    num_blocks: int
    policy: EvictionPolicy
    held: dict[int, list[bytes]] = field(default_factory=dict)
    known: dict[bytes, list[int]] = field(default_factory=dict)  # uses, priority, freed at, depth
    sessions: list[tuple[str, int, list[bytes]]] = field(default_factory=list)  # used longest ago first
    now: int = 0

    def open(self, session_id: str, capacity: int) -> None:
        kept = self._take(session_id)
        self.sessions.append((session_id, capacity, kept[:capacity]))

    def close(self, session_id: str) -> None:
        self._take(session_id)

    def begin(self, owner: int, session_id: str, names: list[bytes], priority: int) -> None:
        self._touch(session_id)
        found = next((n for n, name in enumerate(names) if name not in self.known), len(names))
        self.held[owner] = names
        for name in names[:found]:
            self.known[name][0] += 1
            self.known[name][1] = max(self.known[name][1], priority)
        for _ in names[found:]:
            while len(self._held_names() | set(self.known)) > self.num_blocks:
                self._evict()
        for depth, name in enumerate(names[found:], found):
            self.known.setdefault(name, [0, priority, -1, depth])

    def end(self, owner: int, session_id: str) -> None:
        names = self.held.pop(owner)
        if self._touch(session_id):
            _, capacity, kept = self.sessions[-1]
            new = names[:capacity]
            kept[:] = (new + [name for name in kept if name not in new])[:capacity]
        while len(self.kept()) > self.num_blocks // 2:
            next(kept for _, _, kept in self.sessions if kept).pop()
        self.now += 1
        for name in names:
            if name not in self._held_names():
                self.known[name][2] = self.now

    def kept(self) -> set[bytes]:
        return {name for _, _, kept in self.sessions for name in kept}

    def _take(self, session_id: str) -> list[bytes]:
        found = [one for one in self.sessions if one[0] == session_id]
        self.sessions = [one for one in self.sessions if one[0] != session_id]
        return found[0][2] if found else []

    def _touch(self, session_id: str) -> bool:
        found = [one for one in self.sessions if one[0] == session_id]
        self.sessions = [one for one in self.sessions if one[0] != session_id] + found
        return bool(found)

    def _held_names(self) -> set[bytes]:
        return {name for names in self.held.values() for name in names}

    def _evict(self) -> None:
        kept = self.kept()

        def worth(name: bytes) -> tuple[bool, int, int, int, bytes]:
            uses, priority, freed_at, depth = self.known[name]
            rank = {"lru": 0, "lfu": uses, "priority": priority}[self.policy]
            return name in kept, rank, freed_at, -depth, name

        del self.known[min(set(self.known) - self._held_names(), key=worth)]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.sampled_from("xyz"), st.integers(0, 7)),
        st.tuples(st.just("close"), st.sampled_from("xyz"), st.just(0)),
        st.tuples(
            st.sampled_from(["", "x", "y", "z"]),
            st.tuples(st.integers(0, 1), st.integers(1, 4), st.integers(0, 3), st.integers(0, 2)),
            st.booleans(),
        ),
    ),
    min_size=1,
    max_size=50,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=200, deadline=None)
@given(events=EVENTS)
def test_g4_what_is_there_and_what_is_kept_is_what_the_definition_says(
    policy: EvictionPolicy, events: list[tuple[str, object, object]]
) -> None:
    rig, plain = Rig(11, policy), Plain(11, policy)
    alive: list[tuple[int, str]] = []

    def end(owner: int, session_id: str) -> None:
        rig.end(owner)
        plain.end(owner, session_id)

    for what, which, more in events:
        if what == "open":
            rig.open(str(which), capacity_tokens=BLOCK * int(str(more)))
            plain.open(str(which), min(int(str(more)), 5))
        elif what == "close":
            if which in {asked.session_id for asked in rig.sessions.opened()}:
                rig.sessions.close(str(which))
            plain.close(str(which))
        else:
            assert isinstance(which, tuple)
            family, length, branch, priority = which
            tokens = chain(family, length) + chain(10 + branch, 1)
            names = block_hashes(ROOT, tokens, BLOCK)
            while alive and not rig.blocks.has_room(len(tokens), rig.blocks.find(names), 0):
                end(*alive.pop(0))
            owner = rig.begin(tokens, what, priority)
            plain.begin(owner, what, names, priority)
            alive.append((owner, what))
            if not more:
                end(*alive.pop())
        assert set(rig.blocks.pool.cache.names()) == set(plain.known)
        assert rig.sessions._keepers.keys() == plain.kept()
