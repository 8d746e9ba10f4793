"""Pool and store together find, before and after a restart, what two LRU queues find (rows H1, H9)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from depth import sampled, soaked
from paths import REPOSITORY
from penstock.kvstore.lmdb_store import LmdbStore
from penstock.kvstore.names import BLOCK_HASH_BYTES, NAMESPACE_BYTES, is_entry

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    tiered_trace: Any = importlib.import_module("tiered_trace")
    prefix_trace: Any = importlib.import_module("prefix_trace")


@pytest.mark.parametrize("settings", tiered_trace.TRACES)
@pytest.mark.parametrize(
    "sizes", sampled([(160, 300), (256, 256), (256, 1024), (1024, 1024), (400, 100_000)], 2), ids=str
)
def test_h1_h9_pool_and_store_find_what_two_queues_find(
    settings: dict[str, Any], sizes: tuple[int, int]
) -> None:
    num_blocks, num_stored = sizes
    trace = prefix_trace.conversations(1, 100, **settings)
    num_bytes = num_stored * tiered_trace.BLOCK_SIZE
    store = tiered_trace.BoundedStore(num_bytes)
    served = tiered_trace.served_hits(trace, num_blocks, lambda: store)
    queue = tiered_trace.Queue(num_bytes)
    assert served == tiered_trace.lru_hits(trace, num_blocks, queue)
    kept = [("entry" if is_entry(key) else "part", key[NAMESPACE_BYTES:][:BLOCK_HASH_BYTES]) for key in store]
    assert kept == list(queue.sizes), "what the store would give up next, and so on"
    found = sum(map(sum, served))
    best = prefix_trace.belady_hits(trace, num_blocks + num_stored)
    assert found <= best <= prefix_trace.ideal_hits(trace)
    assert num_stored == 256 or sum(hits.store for hits in served[50:]), "it is found after the restart"
    if num_stored == 100_000:
        assert found == best


class Watched:
    """A directory that tells how many records it has after each `put`."""

    def __init__(self, directory: Path, quota_bytes: int) -> None:
        self._store = LmdbStore(directory, quota_bytes=quota_bytes)
        self.counts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, records: Mapping[bytes, bytes]) -> None:
        self._store.put(records)
        self.counts.append(sum(len(page) for page in self._store.scan(b"")))


class Following(tiered_trace.Queue):  # type: ignore[misc]
    """Is told how many things stay, which in a file of pages is nobody else's affair, and says which."""

    def __init__(self, counts: Iterator[int]) -> None:
        super().__init__(1 << 60)
        self._counts = counts

    def settle(self) -> None:
        count = next(self._counts)
        while len(self.sizes) > count:
            self.drop(next(iter(self.sizes)))
        assert len(self.sizes) == count


@pytest.mark.parametrize("quota_mib", [8, *soaked(12)])
def test_h1_h9_a_directory_with_a_quota_keeps_what_was_used_last(tmp_path: Path, quota_mib: int) -> None:
    """The oracle is told how many records stay, and says which; of how many, only bounds are held here."""
    trace = prefix_trace.conversations(1, 60)
    stores: list[Watched] = []

    def opened() -> Watched:
        stores.append(Watched(tmp_path, quota_mib << 20))
        return stores[-1]

    served = tiered_trace.served_hits(trace, 256, opened)
    counts = [count for store in stores for count in store.counts]
    assert served == tiered_trace.lru_hits(trace, 256, Following(iter(counts)))
    assert (tmp_path / "data.mdb").stat().st_size <= quota_mib << 20
    given_up = [after for before, after in pairwise(counts) if after < before]
    assert given_up, "some were given up"
    num_bytes = min(given_up) // 2 * tiered_trace.BLOCK_SIZE  # of a block there are a part and an entry
    assert num_bytes > (quota_mib << 20) // 2, "not more than what copying on write needs"
    assert sum(hits.store for hits in served[30:])
