"""Where a worker keeps KV blocks: what the head says of a tier, and what the worker itself is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import ProtocolError, StoreError, UsageError
from penstock.kvstore.own_store import NoOwnStore, OwnStore, TierNeed, require_usable
from penstock.process.config import StoreConfig

SPACE = bytes(range(16))
HEADS = StoreConfig(
    url="/secret/place",
    quota_bytes=1 << 30,
    namespace=SPACE,
    description=b"{}",
    host_blocks=7,
    writes_back=True,
    write_bytes_per_s=9,
)


def of_head(url: str | None, **changed: Any) -> TierNeed:
    return TierNeed.of(msgspec.structs.replace(HEADS, url=url, **changed))


def own_store(address: str | None, told: list[str] | None = None) -> OwnStore:
    return OwnStore("desk", address, Path("/state/kv-store/desk"), [].append if told is None else told.append)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("/secret/place", "lmdb"),
        ("lmdb:///secret/place", "lmdb"),
        ("file:///secret/place", "file"),
        ("s3://secret/place", "s3"),
        ("redis://user:secret@place/1", "redis"),
        ("rediss://user:secret@place/1", "redis"),
        (None, ""),
    ],
)
def test_r15_neither_place_nor_credentials_of_a_store_are_sent(url: str | None, kind: str) -> None:
    need = of_head(url)
    assert need.kind == kind
    sent = msgspec.json.encode(need)
    assert b"secret" not in sent
    assert msgspec.json.decode(sent, type=TierNeed) == need


def test_g1_a_store_in_a_directory_is_one_for_each_host() -> None:
    expected = msgspec.structs.replace(HEADS, url="/state/kv-store/desk", host="desk")
    assert own_store(None).config(of_head("/secret/place")) == expected
    other = own_store("/other").config(of_head("/secret/place"))
    assert other == msgspec.structs.replace(expected, url="/other")


def test_g1_a_store_with_an_address_is_opened_with_the_workers_own() -> None:
    config = own_store("rediss://me:mine@place/1").config(of_head("redis://you:yours@place/1"))
    assert config == msgspec.structs.replace(
        HEADS, url="rediss://me:mine@place/1", quota_bytes=None, host=""
    ), "the core uses it, too"


def test_g1_host_memory_alone_needs_no_store() -> None:
    config = own_store("s3://mine").config(of_head(None))
    assert config == msgspec.structs.replace(HEADS, url=None, quota_bytes=None)


@pytest.mark.parametrize(
    ("head", "own", "words"),
    [
        ("s3://place", None, ["of the kind s3", "worker desk has no --kv-store", "--kv-store s3://"]),
        ("s3://place", "/mine", ["of the kind s3", "a store of the kind lmdb", "--kv-store s3://"]),
        ("file:///place", None, ["of the kind file", "no --kv-store", "--kv-store file://"]),
        ("/place", "s3://mine", ["of the kind lmdb", "a store of the kind s3", "give it a directory"]),
    ],
)
def test_g1_a_worker_without_such_a_store_says_which_flag_it_needs(
    head: str, own: str | None, words: list[str]
) -> None:
    told: list[str] = []
    with pytest.raises(UsageError) as raised:
        own_store(own, told).config(of_head(head))
    text = f"{raised.value.message} {raised.value.remedy}"
    assert [word for word in words if word not in text] == []
    assert told == [text], "on the worker, too"
    assert raised.value.param == "kv_store"


def test_r15_a_namespace_that_is_none_is_refused() -> None:
    with pytest.raises(ProtocolError, match="16 bytes"):
        own_store(None).config(of_head("/place", namespace=b"../../x"))


@pytest.mark.parametrize("field", ["quota_bytes", "host_blocks", "write_bytes_per_s"])
def test_r15_numbers_that_cannot_be_are_refused(field: str) -> None:
    sent = msgspec.to_builtins(of_head("/place")) | {field: -1}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(sent, TierNeed)


def test_a_host_that_keeps_nothing_refuses_every_tier() -> None:
    with pytest.raises(UsageError, match="does not keep KV blocks"):
        NoOwnStore().config(of_head(None))


def test_a_store_that_can_never_work_is_refused_before_a_worker_joins(tmp_path: Path) -> None:
    require_usable(str(tmp_path / "store"))
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StoreError, match="file"):
        require_usable(str(tmp_path / "file" / "store"))
    with pytest.raises(UsageError, match="that begin with ftp"):
        require_usable("ftp://place")
