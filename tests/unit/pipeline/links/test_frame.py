"""Headers of frames: DR1, DR2, d1."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import ProtocolError
from penstock.pipeline.links.frame import (
    ALIGNMENT,
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    check_header,
    check_packed,
    check_payload,
    frame_bytes,
    payload_checksum,
)

HEADER = FrameHeader(
    epoch=3,
    step_id=2**40,
    kind=FrameKind.HIDDEN,
    num_tokens=17,
    width=896,
    dtype="bfloat16",
    num_tensors=2,
    digest=0xDEADBEEF,
)


def test_d1_a_header_survives_the_wire() -> None:
    packed = HEADER.pack()
    assert len(packed) == HEADER_BYTES
    assert len(packed) + len(payload_checksum([])) == ALIGNMENT
    assert FrameHeader.unpack(packed) == HEADER
    assert FrameHeader.unpack(memoryview(packed)) == HEADER


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", 4),
        ("step_id", 7),
        ("num_tokens", 16),
        ("width", 897),
        ("dtype", "float32"),
        ("num_tensors", 1),
        ("digest", 1),
    ],
)
def test_dr1_any_other_frame_is_refused_naming_link_step_and_requests(field: str, value: object) -> None:
    found = FrameHeader.unpack(replace(HEADER, **{field: value}).pack())
    with pytest.raises(ProtocolError) as caught:
        check_header(HEADER, found, "stage 0 -> stage 1", ["req-a", "req-b"])
    message = caught.value.message
    assert f"{field} expected {getattr(HEADER, field)}, found {value}" in message
    assert "stage 0 -> stage 1" in message
    assert f"step {HEADER.step_id}" in message
    assert "req-a, req-b" in message
    assert message.count("expected") == 1


def test_dr1_the_same_frame_is_accepted() -> None:
    check_header(HEADER, FrameHeader.unpack(HEADER.pack()), "stage 0 -> stage 1", [])


@pytest.mark.parametrize(("offset", "value"), [(0, b"X"), (4, b"\xff"), (6, b"\xff"), (32, b"\x09")])
def test_d1_garbage_is_refused(offset: int, value: bytes) -> None:
    packed = bytearray(HEADER.pack())
    packed[offset : offset + 1] = value
    with pytest.raises(ProtocolError):
        FrameHeader.unpack(bytes(packed))
    names = rf"link a -> b .*step {HEADER.step_id}: frame .*\. Requests of the step: req-a\."
    with pytest.raises(ProtocolError, match=names):
        check_packed(HEADER, bytes(packed), "a -> b", ["req-a"])


@pytest.mark.parametrize("bit", range(8 * HEADER_BYTES))
def test_d1_no_flipped_bit_of_a_header_goes_unnoticed(bit: int) -> None:
    packed = bytearray(HEADER.pack())
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match=rf"step {HEADER.step_id}"):
        check_packed(HEADER, bytes(packed), "a -> b", [])


def test_d1_a_payload_that_is_another_is_refused_naming_link_step_and_requests() -> None:
    """Issue 25, point 4."""
    checksum = payload_checksum([b"hidden states", b"residual"])
    check_payload(HEADER, checksum, [memoryview(b"hidden states"), memoryview(b"residual")], "a -> b", [])
    names = rf"link a -> b .*hidden states of step {HEADER.step_id}.*checksum.*Requests of the step: req-a"
    others = [[b"residual", b"hidden states"], [b"hidden states", b"residua"], [b"", b"residual"], []]
    for parts in others:
        with pytest.raises(ProtocolError, match=names) as caught:
            check_payload(HEADER, checksum, parts, "a -> b", ["req-a"])
        assert "memory of the host" in caught.value.remedy


def test_i8_a_frame_holds_a_header_and_the_hidden_states_once() -> None:
    assert frame_bytes(max_num_tokens=512, width=896, itemsize=2) == 64 + 512 * 896 * 2
    assert frame_bytes(max_num_tokens=1, width=3, itemsize=4) == 64 + 64
