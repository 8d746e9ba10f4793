"""Payloads of bulk channels in chunks: what one says, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.errors import ProtocolError
from penstock.pipeline.bulk.chunk import MAX_NAME_BYTES, Chunk, chunks_of, max_data_bytes
from penstock.pipeline.links.ring_channel import ONE_FRAME_BYTES

NAME = "kv/7"
ROOM = max_data_bytes(NAME)


@pytest.mark.parametrize("length", [0, 1, ROOM - 1, ROOM, ROOM + 1, 3 * ROOM + 5])
def test_g1_the_chunks_of_a_payload_are_the_payload(length: int) -> None:
    payload = random.Random(length).randbytes(length)
    chunks = [Chunk.unpack(chunk.pack()) for chunk in chunks_of(NAME, payload)]
    assert b"".join(chunk.data for chunk in chunks) == payload
    assert [chunk.offset for chunk in chunks] == list(range(0, max(1, length), ROOM))
    assert {(chunk.name, chunk.payload_bytes) for chunk in chunks} == {(NAME, length)}


@pytest.mark.parametrize("name", ["a", "ü" * 100, "x" * MAX_NAME_BYTES])
def test_g1_a_chunk_fits_one_frame_of_a_ring_whatever_its_name(name: str) -> None:
    first, last = chunks_of(name, bytes(max_data_bytes(name) + 1))
    assert len(first.pack()) == ONE_FRAME_BYTES
    assert Chunk.unpack(last.pack()).name == name


def test_g1_the_same_bytes_at_another_place_have_another_checksum() -> None:
    first, second = chunks_of(NAME, bytes(2 * ROOM))
    assert first.data == second.data
    assert first.checksum != second.checksum


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"PST",
        bytes(200),
        b"XXXX" + replace(next(chunks_of(NAME, b"12")), data=b"").pack()[4:],
        next(chunks_of(NAME, b"")).pack()[:-1],  # its name is cut
        next(chunks_of(NAME, b"")).pack()[:-1] + b"\xff",  # its name is not text
    ],
)
def test_g1_what_is_not_a_chunk_is_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"chunk|name of a payload") as caught:
        Chunk.unpack(message)
    assert caught.value.remedy
