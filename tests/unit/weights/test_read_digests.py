"""Digests of what a rank reads: however cut into reads, and other bytes are named (issue 25, point 1)."""

from __future__ import annotations

import random
import weakref

import pytest

from penstock.errors import ModelChangedError
from penstock.weights.read_digests import ASIDE_BYTES, RECORD_BYTES, ReadDigests, parse_table

CONTENT = random.Random(7).randbytes(1000)


def table_of(*reads: tuple[str, int, int], content: bytes = CONTENT, expected: bytes = b"") -> bytes:
    """Return the table of a load that reads bytes `[begin, end)` of tensors, in this order."""
    digests = ReadDigests(expected)
    for tensor, begin, end in reads:
        digests.add("model.safetensors", tensor, begin, memoryview(content)[begin:end])
    return digests.finish()


def test_a_table_does_not_depend_on_how_a_tensor_was_cut_into_reads() -> None:
    whole = table_of(("a", 0, 1000))
    assert len(whole) == RECORD_BYTES
    assert table_of(("a", 0, 1), ("a", 1, 300), ("a", 300, 1000)) == whole


def test_large_reads_are_digested_beside_what_the_reader_does_to_the_same_table() -> None:
    content = random.Random(8).randbytes(2 * ASIDE_BYTES + 5)
    digests, memory = ReadDigests(), memoryview(content)
    for begin in range(0, len(content), ASIDE_BYTES):
        with digests.beside("f", "a", begin, memory[begin : begin + ASIDE_BYTES]):
            pass
    table = digests.finish()
    assert table == table_of(("a", 0, len(content)), content=content)


def test_a_changed_tensor_is_told_from_beside_and_so_is_what_the_reader_finds() -> None:
    content = memoryview(bytes(ASIDE_BYTES))
    digests = ReadDigests(table_of(("a", 0, 1000)))
    digests.add("f", "a", 0, content[:1000])
    with pytest.raises(ModelChangedError, match="a"), digests.beside("f", "b", 0, content):
        pass
    with pytest.raises(ZeroDivisionError), digests.beside("f", "c", 0, content):
        1 / 0  # noqa: B018


def test_nobody_holds_bytes_that_were_digested_beside() -> None:
    digests, memory = ReadDigests(), memoryview(bytes(ASIDE_BYTES))
    held = weakref.ref(memory)
    with digests.beside("f", "a", 0, memory):
        pass
    del memory
    assert held() is None
    digests.finish()


def test_a_repeated_read_adds_nothing() -> None:
    once = table_of(("a", 0, 500), ("b", 0, 1000))
    assert table_of(("a", 0, 500), ("a", 0, 500), ("b", 0, 1000), ("a", 100, 200)) == once


def test_ranges_tensors_and_bands_are_told_apart() -> None:
    digests = ReadDigests()
    for tensor, offset, band in (
        ("a", 0, ""),
        ("b", 0, ""),
        ("b", 200, ""),
        ("b", 0, "0:5"),
        ("b", 0, "5:9"),
    ):
        digests.add("f", tensor, offset, memoryview(CONTENT)[:100], band)
    assert len(parse_table(digests.finish())) == 5


@pytest.mark.parametrize("place", [0, 499, 999])
def test_one_other_byte_is_refused_with_tensor_and_file(place: int) -> None:
    changed = bytearray(CONTENT)
    changed[place] ^= 1
    expected = table_of(("a", 0, 1000), ("b", 0, 10))
    with pytest.raises(
        ModelChangedError, match=r"model\.safetensors: tensor a: expected the bytes"
    ) as caught:
        table_of(("a", 0, 600), ("a", 600, 1000), content=bytes(changed), expected=expected)
    assert (caught.value.file, caught.value.tensor) == ("model.safetensors", "a")
    assert (caught.value.info().code, caught.value.exit_code) == ("model_changed", 3)


def test_other_bytes_are_noticed_as_soon_as_the_next_tensor_is_read() -> None:
    digests = ReadDigests(table_of(("a", 0, 1000)))
    digests.add("f", "a", 0, memoryview(bytes(1000)))
    with pytest.raises(ModelChangedError):
        digests.add("f", "b", 0, memoryview(CONTENT))


def test_a_range_that_the_first_load_did_not_read_is_taken() -> None:
    expected = table_of(("a", 0, 1000))
    assert len(parse_table(table_of(("a", 0, 1000), ("b", 0, 5), expected=expected))) == 2
