"""The LMDB directory: shared, bounded, whole after kill -9, and clean errors for all that disks can do."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import lmdb
import pytest

from penstock.errors import StoreError, UsageError
from penstock.kvstore import lmdb_store
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.lmdb_store import MAX_TOUCHED, MIN_QUOTA_BYTES, LmdbStore
from penstock.kvstore.lmdb_tables import LmdbTables
from penstock.kvstore.names import namespace, record_key

SPACE = namespace(bytes(32), dtype="bfloat16", block_size=32, kind="keys and values")
PAGE = 4096


def key_of(n: int) -> bytes:
    return record_key(SPACE, n.to_bytes(32, "big"), 0, 0)


def record_of(n: int, num_bytes: int = 20_000) -> bytes:
    return random.Random(n).randbytes(num_bytes)


def some(numbers: Iterable[int], num_bytes: int = 20_000) -> dict[bytes, bytes]:
    return {key_of(n): record_of(n, num_bytes) for n in numbers}


def kept(store: LmdbStore, numbers: Iterable[int]) -> list[int]:
    numbers = list(numbers)
    found = {found.key for page in store.scan() for found in page}
    return [n for n in numbers if key_of(n) in found]


def file_bytes(directory: Path) -> int:
    return (directory / "data.mdb").stat().st_size


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "new" / "store"


@pytest.fixture
def store(directory: Path) -> Iterator[LmdbStore]:
    store = LmdbStore(directory)
    yield store
    store.close()


@pytest.fixture
def small(directory: Path) -> Iterator[LmdbStore]:
    """Holds 30 records of 20,000 bytes, or a few more."""
    store = LmdbStore(directory, quota_bytes=MIN_QUOTA_BYTES)
    yield store
    store.close()


# --- what is put is there ---------------------------------------------------------------------------


def test_records_come_back_and_go(store: LmdbStore) -> None:
    records = some(range(5)) | {key_of(9): b""}
    keys = [*records, key_of(10)]
    store.put(records)
    assert store.get(keys) == [*records.values(), None]
    assert kept(store, range(11)) == [0, 1, 2, 3, 4, 9]
    store.put({key_of(0): b"other", key_of(1): records[key_of(1)]})
    assert store.get([key_of(0), key_of(1)]) == [b"other", records[key_of(1)]]
    store.delete([key_of(0), key_of(10)])
    assert kept(store, range(10)) == [1, 2, 3, 4, 9]
    store.put({})
    assert store.get([]) == []


def test_keys_of_32_to_64_bytes_are_taken(store: LmdbStore) -> None:
    store.put({b"a" * 32: b"1", b"b" * 64: b"2"})
    assert store.get([b"a" * 32, b"b" * 64]) == [b"1", b"2"]
    for key in (b"a" * 31, b"b" * 65):
        with pytest.raises(AssertionError, match="32 to 64"):
            store.get([key])


def test_records_outlive_the_store(directory: Path) -> None:
    store = LmdbStore(directory)
    store.put(some(range(3)))
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.get([key_of(0)])
    again = LmdbStore(directory)
    assert again.get([key_of(2)]) == [record_of(2)]
    again.close()


def test_rule_9_nobody_else_can_read_it(store: LmdbStore, directory: Path) -> None:
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_rule_9_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StoreError, match="others can write to") as refused:
        LmdbStore(tmp_path)
    assert "chmod 700" in (refused.value.remedy or "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(StoreError, match="is a file") as refused:
        LmdbStore(file / below)
    assert "Give a directory" in (refused.value.remedy or "")
    assert file.read_text() == "mine"


# --- the quota --------------------------------------------------------------------------------------


def test_a_quota_keeps_the_file_small_and_what_was_used_last(small: LmdbStore, directory: Path) -> None:
    for n in range(300):
        small.put(some([n]))
        assert file_bytes(directory) <= MIN_QUOTA_BYTES
    found = kept(small, range(300))
    assert found == list(range(300 - len(found), 300))
    assert 30 <= len(found) <= 50
    assert small.get([key_of(n) for n in found]) == [record_of(n) for n in found]


def test_being_found_is_a_use_and_being_looked_for_is_none(small: LmdbStore) -> None:
    small.put(some(range(20)))
    for n in range(100, 200):
        assert small.get([key_of(3)]) == [record_of(3)]
        kept(small, [4])
        small.put(some([n]))
    assert kept(small, range(20)) == [3]


def test_what_comes_first_in_a_call_goes_last(small: LmdbStore) -> None:
    """Behind the first block of a chain that is missing nothing can be found."""
    small.put(some(range(100)))
    found = kept(small, range(100))
    assert found == list(range(len(found)))
    small.get([key_of(n) for n in found])
    small.put(some(range(100, 110)))
    left = kept(small, range(100))
    assert left == list(range(len(left)))
    assert 0 < len(left) < len(found)


def test_uses_are_written_down_at_the_end_and_when_there_are_many(directory: Path) -> None:
    store = LmdbStore(directory, quota_bytes=MIN_QUOTA_BYTES)
    store.put(some(range(20)))
    store.get([key_of(19)])
    store.close()
    store = LmdbStore(directory, quota_bytes=MIN_QUOTA_BYTES)
    store.put(some(range(100, 120)))
    store.put(some(range(120, 130)))
    assert kept(store, range(20)) == [*range(len(kept(store, range(20))) - 1), 19]
    store.close()


def test_many_uses_are_written_down_by_a_reader(directory: Path) -> None:
    keys = [key_of(n) for n in range(MAX_TOUCHED)]
    store = LmdbStore(directory)
    store.put(dict.fromkeys(keys, b"small"))
    store.get(keys)
    assert store._touched == {}
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_records_of_all_sizes_fit_somehow(directory: Path, seed: int) -> None:
    """Free pages must lie side by side; where they do not, more is given up."""
    store, choose = LmdbStore(directory, quota_bytes=MIN_QUOTA_BYTES), random.Random(seed)
    expected: dict[bytes, bytes] = {}
    for n in range(150):
        batch = {
            key_of(choose.randrange(60)): record_of(n, choose.choice([0, 100, 5000, 60_000, 200_000]))
            for _ in range(choose.randrange(1, 4))
        }
        store.put(batch)
        expected |= batch
        assert file_bytes(directory) <= MIN_QUOTA_BYTES
    found = store.get(list(expected))
    assert all(record in (None, expected[key]) for key, record in zip(expected, found, strict=True))
    assert sum(record is not None for record in found) > 3
    store.close()


def test_a_smaller_quota_holds_for_what_is_there_already(directory: Path) -> None:
    store = LmdbStore(directory)
    store.put(some(range(200)))
    store.close()
    size = file_bytes(directory)
    store = LmdbStore(directory, quota_bytes=MIN_QUOTA_BYTES)
    for n in range(200, 260):
        store.put(some([n]))
    found = kept(store, range(260))
    assert 30 <= len(found) <= 50
    assert found[-1] == 259
    assert file_bytes(directory) <= size + MIN_QUOTA_BYTES // 4
    store.close()


def test_what_can_never_fit_is_refused(small: LmdbStore) -> None:
    small.put(some([1]))
    with pytest.raises(StoreError, match="Give the store a larger quota"):
        small.put({key_of(0): bytes(MIN_QUOTA_BYTES)})
    assert kept(small, [0, 1]) == [1]
    with pytest.raises(UsageError, match="Give at least"):
        LmdbStore(Path("nowhere"), quota_bytes=MIN_QUOTA_BYTES - 1)


# --- disks ------------------------------------------------------------------------------------------


class FullDisk:
    """Stands in for `LmdbTables.write`: full for the first calls that bring records."""

    def __init__(self, num_failures: int, error: Exception) -> None:
        self.write = LmdbTables.write
        self.num_left = num_failures
        self.error = error

    def __call__(self, tables: LmdbTables, records: dict[bytes, bytes], touched: Iterable[bytes]) -> None:
        if records and self.num_left:
            self.num_left -= 1
            raise self.error
        self.write(tables, records, touched)


@pytest.mark.parametrize(
    "error", [lmdb.MapFullError("full"), lmdb.DiskError("no space")], ids=["map", "disk"]
)
def test_r9_a_full_disk_gives_up_old_records(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    store.put(some(range(40)))
    full = FullDisk(2, error)
    monkeypatch.setattr(LmdbTables, "write", lambda *args: full(*args))
    store.put(some([50]))
    found = kept(store, range(40))
    assert kept(store, [50]) == [50]
    assert found == list(range(len(found)))
    assert 0 < len(found) < 40


def test_r9_a_disk_that_stays_full_is_an_error_that_says_so(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(some(range(3)))
    full = FullDisk(1000, lmdb.DiskError("no space"))
    monkeypatch.setattr(LmdbTables, "write", lambda *args: full(*args))
    with pytest.raises(StoreError, match=r"DiskError: no space\. Check that the disk has space"):
        store.put(some([50]))
    monkeypatch.undo()
    store.put(some([51]))
    assert kept(store, [50, 51]) == [51], "opened again"


def test_r9_a_map_without_free_pages_makes_room(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing: nothing is given up beforehand, until LMDB itself has no page left."""
    monkeypatch.setattr(lmdb_store, "_MAX_TRIES", 20)
    store = LmdbStore(directory, quota_bytes=MIN_QUOTA_BYTES)
    monkeypatch.setattr(store, "_max_live_bytes", 1 << 40)
    for n in range(120):
        store.put(some([n]))
    found = kept(store, range(120))
    assert found[-1] == 119
    assert 20 <= len(found) <= 55
    assert store.get([key_of(n) for n in found]) == [record_of(n) for n in found]
    store.close()


@pytest.mark.parametrize("comes_back", [False, True])
def test_r9_a_directory_that_vanishes_is_made_anew(
    store: LmdbStore, directory: Path, comes_back: bool
) -> None:
    store.put(some(range(3)))
    shutil.rmtree(directory)
    if comes_back:
        other = LmdbStore(directory)
        other.put(some([7]))
        other.close()
    assert kept(store, range(10)) == ([7] if comes_back else [])
    store.put(some([5]))
    assert store.get([key_of(5)]) == [record_of(5)]
    assert directory.is_dir()


def test_r9_a_directory_that_cannot_come_back_is_an_error_each_time(
    store: LmdbStore, directory: Path
) -> None:
    shutil.rmtree(directory)
    directory.write_text("in the way", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(StoreError, match="is a file"):
            store.get([key_of(0)])
    directory.unlink()
    assert store.get([key_of(0)]) == [None]


def test_r9_a_read_only_directory_is_an_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*args: object, **kwargs: object) -> None:
        raise lmdb.ReadonlyError("Read-only file system")

    monkeypatch.setattr(lmdb, "open", read_only)
    with pytest.raises(StoreError, match="ReadonlyError: Read-only file system"):
        LmdbStore(directory)


def test_r9_a_directory_that_becomes_read_only_is_an_error_until_it_is_writable_again(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was put before is there then."""
    store.put(some([5]))

    def read_only(*args: object, **kwargs: object) -> None:
        raise lmdb.ReadonlyError("Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(LmdbTables, "write", read_only)
        patch.setattr(lmdb, "open", read_only)  # after the failed call it is opened again
        for call in (lambda: store.put(some([6])), lambda: store.get([key_of(5)])):
            with pytest.raises(StoreError, match="ReadonlyError: Read-only file system"):
                call()
    assert kept(store, range(10)) == [5]
    store.put(some([6]))
    assert kept(store, range(10)) == [5, 6]


@pytest.mark.parametrize("left", [0, 100, 2 * PAGE, 3 * PAGE, 10 * PAGE + 17], ids=str)
def test_r9_a_file_that_was_cut_short_is_never_believed_nor_fatal(directory: Path, left: int) -> None:
    records = {key_of(n): record_of(n) for n in range(30)}
    with_seals = GuardedStore(LmdbStore(directory))
    with_seals.put(records)
    with_seals.close()
    os.truncate(directory / "data.mdb", left)
    if left:  # an empty file is a new one
        for _ in range(2):
            with pytest.raises(StoreError, match=re.escape(str(directory))) as raised:
                LmdbStore(directory)
            assert "delete the directory" in raised.value.remedy
        shutil.rmtree(directory)
    guard = GuardedStore(LmdbStore(directory))
    for key, record in records.items():
        assert guard.get([key])[0] in (None, record)
    assert guard.counts().num_hits == 0
    guard.put(records)
    assert guard.get(list(records)) == list(records.values())
    guard.close()


@pytest.mark.parametrize("seed", range(8))
def test_r9_flipped_bits_in_the_records_are_never_believed(directory: Path, seed: int) -> None:
    """Anywhere in the payloads; in LMDB's own pages they may be noticed by nobody, as on any disk."""
    records = {key_of(n): record_of(n) for n in range(10)}
    guard = GuardedStore(LmdbStore(directory))
    guard.put(records)
    guard.close()
    data, choose = bytearray((directory / "data.mdb").read_bytes()), random.Random(seed)
    victim = choose.randrange(10)
    start = data.index(record_of(victim)[:64])
    data[start + choose.randrange(20_000)] ^= 1 << choose.randrange(8)
    (directory / "data.mdb").write_bytes(data)
    guard = GuardedStore(LmdbStore(directory))
    assert guard.get(list(records)) == [None if n == victim else record_of(n) for n in range(10)]
    assert guard.counts().num_verify_failures == 1
    guard.close()


def test_r9_a_file_that_is_none_of_ours_is_an_error(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "data.mdb").write_bytes(b"something else entirely" * 1000)
    with pytest.raises(StoreError, match="InvalidError"):
        LmdbStore(directory)


def test_one_process_opens_it_once(store: LmdbStore, directory: Path) -> None:
    with pytest.raises(StoreError, match="already open in this process"):
        LmdbStore(directory)


# --- several processes ------------------------------------------------------------------------------

OTHER = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_lmdb_store import key_of, record_of, some
from penstock.kvstore.lmdb_tables import LmdbTables
from penstock.kvstore.lmdb_store import LmdbStore
quota = int(sys.argv[2]) or None
store = LmdbStore(Path(sys.argv[1]), quota_bytes=quota)
"""


def other_process(directory: Path, program: str, quota: int = 0) -> subprocess.Popen[str]:
    """With its ends as pipes; whoever starts it waits for it."""
    arguments = [
        sys.executable,
        "-c",
        OTHER + program,
        str(directory),
        str(quota),
        str(Path(__file__).parent),
    ]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_share_a_directory(store: LmdbStore, directory: Path) -> None:
    store.put(some(range(10)))
    program = """
assert store.get([key_of(n) for n in range(10)]) == [record_of(n) for n in range(10)]
for n in range(100, 140):
    store.put(some([n]))
store.delete([key_of(0)])
store.close()
"""
    with other_process(directory, program) as child:
        for n in range(200, 240):
            store.put(some([n]))
            store.get([key_of(5)])
        assert child.wait(60) == 0
    expected = [*range(1, 10), *range(100, 140), *range(200, 240)]
    assert kept(store, range(300)) == expected
    assert store.get([key_of(n) for n in expected]) == [record_of(n) for n in expected]


def test_two_processes_keep_one_quota(small: LmdbStore, directory: Path) -> None:
    program = """
for n in range(100, 200):
    store.put(some([n]))
store.close()
"""
    with other_process(directory, program, MIN_QUOTA_BYTES) as child:
        for n in range(200, 300):
            small.put(some([n]))
        assert child.wait(60) == 0
    assert file_bytes(directory) <= MIN_QUOTA_BYTES
    assert 30 <= len(kept(small, range(300))) <= 50


def test_a_file_that_another_process_let_grow_is_followed(small: LmdbStore, directory: Path) -> None:
    program = "store.put(some(range(200)))\nstore.close()\n"
    with other_process(directory, program) as child:
        assert child.wait(60) == 0
    assert small.get([key_of(n) for n in range(200)]) == [record_of(n) for n in range(200)]
    small.put(some([500]))
    assert 30 <= len(kept(small, range(501))) <= 50
    assert kept(small, [500]) == [500]


@pytest.mark.parametrize("num_lines", [1, 7, 30])
def test_r9_kill_during_put_leaves_whole_records(directory: Path, num_lines: int) -> None:
    program = """
n = 0
while True:
    store.put(some(range(n, n + 5)))
    n += 5
    print(n, flush=True)
"""
    with other_process(directory, program, 2 * MIN_QUOTA_BYTES) as child:
        assert child.stdout is not None
        done = [int(child.stdout.readline()) for _ in range(num_lines)][-1]
        os.kill(child.pid, signal.SIGKILL)
        child.stdout.read()
        assert child.wait(60) == -signal.SIGKILL
    store = LmdbStore(directory, quota_bytes=2 * MIN_QUOTA_BYTES)
    found = kept(store, range(done + 2000))
    assert store.get([key_of(n) for n in found]) == [record_of(n) for n in found]
    assert set(found) >= set(range(max(0, done - 50), done))
    store.put(some(range(5000, 5100)))
    assert kept(store, [5000]) == [5000]
    store.close()


def test_r9_a_reader_that_was_killed_keeps_no_pages(small: LmdbStore, directory: Path) -> None:
    """Its transaction would hold on to all that is given up after it."""
    small.put(some(range(10)))
    program = """
transaction = store._tables._environment.begin()
transaction.get(key_of(1), db=store._tables._records)
print("reading", flush=True)
sys.stdin.read()
"""
    with other_process(directory, program) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "reading\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait(60)
    for n in range(100, 200):
        small.put(some([n]))
    assert kept(small, [199]) == [199]
    assert file_bytes(directory) <= MIN_QUOTA_BYTES
