"""`penstock cache`: what is shown of a store, what goes, and what is said of what is no store."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from io import StringIO
from pathlib import Path

import lmdb
import pytest

from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.kvstore.catalogue import StoreCatalogue
from penstock.kvstore.description import Description, description_key, encoded
from penstock.kvstore.guard import GuardedStore
from penstock.kvstore.inspection import SAMPLE_RECORDS
from penstock.kvstore.lmdb_store import LmdbStore
from penstock.kvstore.names import namespace, record_key
from penstock.kvstore.store import open_store

SPACES = [namespace(bytes([n]) * 32, dtype="float32", block_size=8, kind="plain") for n in range(2)]
ABOUT = Description(
    model="demo",
    dtype="float32",
    kind="penstock, none weights",
    block_size=8,
    quota_bytes=4 << 20,
    opened_at=0.0,
)


def cache(*words: str, answer: str = "", **environ: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(answer), environ=environ)
    return run(["cache", *words], invocation), out.getvalue(), err.getvalue()


def fill(url: str, num_blocks: int = 3) -> None:
    """Blocks of two models; the second has told nobody what it is."""
    for space, about, count in zip(SPACES, (encoded(ABOUT), b""), (num_blocks, 1), strict=True):
        store = GuardedStore(open_store(url))
        names = [bytes([n]) * 32 for n in range(count)]
        assert store.put(
            {record_key(space, name, layer, 0): bytes(900) for name in names for layer in (0, 1)}
        )
        with closing(StoreCatalogue(store, space, about)) as catalogue:
            catalogue.enter(names)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    fill(str(tmp_path / "kv"))
    return tmp_path / "kv"


def keys_in(directory: Path) -> list[bytes]:
    with closing(LmdbStore(directory)) as store:
        return [found.key for page in store.scan() for found in page]


def test_ls_shows_whose_blocks_there_are(directory: Path) -> None:
    code, out, err = cache("ls", str(directory))
    assert (code, err) == (0, "")
    head, first, second = out.splitlines()
    assert head.split() == ["namespace", "blocks", "records", "size", "opened", "model"]
    assert first.split() == [
        *(SPACES[0].hex()[:12], "3", "10", first.split()[3], "kB", "1970-01-01", "00:00", "UTC"),
        *("demo", "(float32,", "penstock,", "none", "weights,", "blocks", "of", "8)"),
    ]
    assert second.split()[:3] == [SPACES[1].hex()[:12], "1", "3"]
    assert second.split()[-2:] == ["-", "unknown"]


@pytest.mark.parametrize("form", ["{}", "lmdb://{}"])
def test_the_store_can_be_named_in_every_way(directory: Path, form: str) -> None:
    url = form.format(directory)
    expected = cache("ls", str(directory))
    assert cache("ls", "--kv-store", url) == expected
    assert cache("ls", PENSTOCK_KV_STORE=url) == expected
    code, _, err = cache("ls")
    assert code == 2
    assert "PENSTOCK_KV_STORE" in err


def test_stat_sums_up_and_verifies(directory: Path) -> None:
    for words in ((), ("--verify",)):
        code, out, err = cache("stat", str(directory), *words)
        assert (code, err) == (0, "")
        rows = dict(line.split(maxsplit=1) for line in out.splitlines())
        assert (rows["namespaces"], rows["blocks"], rows["records"]) == ("2", "4", "13")
        assert rows["quota"] == "4.2 MB, set by a server"
        assert rows["verified"] == "13 records, all good"


def test_r9_stat_finds_a_record_that_is_not_what_it_should_be(directory: Path) -> None:
    with closing(LmdbStore(directory)) as store:
        store.put({record_key(SPACES[0], bytes(32), 0, 0): b"something else"})
    code, out, err = cache("stat", str(directory), "--verify")
    assert code == 1
    assert "13 records, 1 bad" in out
    assert "cache clear" in err


def test_stat_of_a_large_store_looks_at_some(tmp_path: Path) -> None:
    fill(str(tmp_path), num_blocks=SAMPLE_RECORDS - 1)
    _, out, _ = cache("stat", str(tmp_path))
    assert f"{SAMPLE_RECORDS} records, all good" in out
    _, out, _ = cache("stat", str(tmp_path), "--verify")
    assert f"{3 * (SAMPLE_RECORDS - 1) + 4} records, all good" in out


def test_looking_is_no_use_and_changes_no_byte(directory: Path) -> None:
    before = (directory / "data.mdb").read_bytes()
    cache("ls", str(directory))
    cache("stat", str(directory), "--verify")
    assert (directory / "data.mdb").read_bytes() == before


def test_clear_asks_first(directory: Path) -> None:
    before = keys_in(directory)
    for answer in ("", "n\n", "maybe\n"):
        code, out, _ = cache("clear", str(directory), "--all", answer=answer)
        assert code == 1
        assert "[y/N]" in out
        assert out.endswith("nothing was removed\n")
    assert keys_in(directory) == before
    code, out, _ = cache("clear", str(directory), "--all", answer="y\n")
    assert code == 0
    assert out.endswith("removed 13 records\n")
    assert keys_in(directory) == []
    assert cache("ls", str(directory)) == (0, "the store is empty\n", "")
    assert cache("clear", str(directory), "--all") == (0, "the store is empty\n", "")


def test_clear_takes_one_namespace(directory: Path) -> None:
    digits = SPACES[0].hex()[:5].upper()
    code, out, _ = cache("clear", str(directory), "--namespace", digits, "--yes")
    assert (code, out) == (0, "removed 10 records\n")
    assert {key[:16] for key in keys_in(directory)} == {SPACES[1]}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give either --namespace"),
        (["--all", "--namespace", "ab"], "give either --namespace"),
        (["--namespace", "zz"], "fits 0 of 2 namespaces"),
    ],
)
def test_clear_is_told_exactly_what_goes(directory: Path, words: list[str], told: str) -> None:
    code, out, err = cache("clear", str(directory), "--yes", *words)
    assert (code, out) == (2, "")
    assert told in err
    assert len(keys_in(directory)) == 13


def test_a_store_can_be_seen_and_cleared_while_another_process_uses_it(directory: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from penstock.kvstore.lmdb_store import LmdbStore\n"
        "store = LmdbStore(Path(sys.argv[1]), quota_bytes=4 << 20)\n"
        "for line in sys.stdin:\n"
        "    store.put({bytes([n]) * 40: bytes(500) for n in range(int(line))})\n"
        "    print(sum(len(page) for page in store.scan()), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def put(count: int) -> int:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(f"{count}\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        assert put(5) == 18
        assert "18" in cache("stat", str(directory))[1]
        assert cache("clear", str(directory), "--all", "--yes")[:2] == (0, "removed 18 records\n")
        assert put(2) == 2
        assert cache("ls", str(directory))[1].count("\n") == 3
        server.stdin.close()


def test_objects_are_shown_and_cleared(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    url = (tmp_path / "objects").as_uri()
    fill(url)
    (tmp_path / "objects" / "README").write_text("not ours")
    code, out, _ = cache("ls", url)
    assert code == 0
    assert out.splitlines()[1].split()[:3] == [SPACES[0].hex()[:12], "3", "10"]
    assert "quota      4.2 MB" in cache("stat", url, "--verify")[1]
    assert cache("clear", url, "--all", "--yes")[:2] == (0, "removed 13 records\n")
    assert cache("ls", url)[1] == "the store is empty\n"
    assert (tmp_path / "objects" / "README").exists()


# --- what is no store -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("ls",), ("stat",), ("clear", "--all", "--yes")])
def test_what_is_no_store_is_named_and_left_as_it_is(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "data.mdb").write_text("no LMDB at all")
    foreign = lmdb.open(str(tmp_path / "foreign"))
    with foreign.begin(write=True) as transaction:
        transaction.put(b"somebody", b"else")
    foreign.close()
    before = (tmp_path / "foreign" / "data.mdb").read_bytes()
    for name, told in (
        ("missing", "is not a directory"),
        ("empty", "does not hold a KV store"),
        ("file", "is not a directory"),
        ("text", "InvalidError"),
        ("foreign", "NotFoundError"),
    ):
        code, out, err = cache(*command, str(tmp_path / name))
        assert (code, out) == (5, ""), name
        assert told in err, name
        assert len(err.splitlines()) == 2, "what happened, and what to do"
    assert not (tmp_path / "missing").exists()
    assert os.listdir(tmp_path / "empty") == []
    assert (tmp_path / "foreign" / "data.mdb").read_bytes() == before


def test_a_file_that_was_cut_short_is_no_end_of_the_program(directory: Path) -> None:
    os.truncate(directory / "data.mdb", 3 * 4096)
    code, _, err = cache("ls", str(directory))
    assert code != 0
    assert "data.mdb has 12,288 bytes of" in err


@pytest.mark.parametrize("url", ["memory:", "ftp://host/x", "s3://"])
def test_an_address_that_cannot_be_right_is_exit_2(url: str) -> None:
    code, out, err = cache("ls", url)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


def test_the_description_lies_beside_the_entries_and_is_no_block(directory: Path) -> None:
    keys = keys_in(directory)
    assert description_key(SPACES[0]) in keys
    assert description_key(SPACES[1]) not in keys


def test_the_group_has_a_help_screen() -> None:
    code, out, _ = cache()
    assert code == 0
    assert "clear" in out
    assert cache("--help") == (0, out, "")
    assert cache("drop")[0] == 2
