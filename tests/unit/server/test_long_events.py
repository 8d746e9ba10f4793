"""Long events of a stream go out one by one, and the event loop turns between them (issue 25, point 18)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fake_engine import ByteDetokenizer, fake_logprobs
from penstock.engine.client.outputs import TextDelta
from penstock.server.answers import encoding
from penstock.server.answers.generation import StreamedResponse
from penstock.server.answers.responses_output import Output, ResponseText
from penstock.server.answers.text_logprobs import PlacedLogprobs
from penstock.server.openai.message_reader import Reading

LAST = TextDelta(text="", token_ids=[], finish_reason="stop")


class OneDelta:
    """The stream of a sequence that ends at once."""

    async def next(self) -> TextDelta:
        return LAST


class Pieces:
    """Writes these, and notes the loop's turns at which each is made."""

    def __init__(self, pieces: list[bytes], turns: list[int]) -> None:
        self._pieces, self._turns = pieces, turns
        self.made_at: list[int] = []

    def chunk(self, _delta: TextDelta) -> Iterator[bytes]:
        for piece in self._pieces:
            self.made_at.append(self._turns[0])
            yield piece


def follow(pieces: list[bytes]) -> tuple[list[bytes], list[int]]:
    """What is sent of these, and the turns of the loop at which they were made."""
    turns, sent = [0], []

    async def turn() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def body() -> list[int]:
        job: Any = SimpleNamespace(headers={}, record=SimpleNamespace())
        context: Any = SimpleNamespace(clock=lambda: 0.0)
        writer: Any = Pieces(pieces, turns)
        response = StreamedResponse(job, context, SimpleNamespace(writers=[writer]))  # type: ignore[arg-type]
        response._send = send  # type: ignore[assignment]
        others = asyncio.ensure_future(turn())
        await response._follow(OneDelta(), writer)  # type: ignore[arg-type]
        others.cancel()
        return writer.made_at  # type: ignore[no-any-return]

    made_at = asyncio.run(body())
    return sent[1:], made_at


@pytest.mark.parametrize(("size", "num_turns"), [(100_000, 4), (100, 1)])
def test_others_have_their_turn_between_long_events(size: int, num_turns: int) -> None:
    pieces = [b"a" * size, b"b" * size, b"c" * size, b"d" * size]
    sent, made_at = follow(pieces)
    assert sent == pieces
    assert len(set(made_at)) == num_turns


def test_the_last_events_of_a_response_are_encoded_as_they_go_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of all tokens stand in four of them, and are encoded with their delta alone."""
    sizes: list[int] = []
    encode = encoding.encode

    def noted(value: Any) -> bytes:
        encoded = encode(value)
        sizes.append(len(encoded))
        return encoded

    output = Output("u", Reading().reader("r", 0), PlacedLogprobs(lambda _: b"a", ByteDetokenizer()))
    text = ResponseText(SimpleNamespace(), output)  # type: ignore[arg-type]
    text.opening = lambda: b""  # type: ignore[method-assign]
    for _ in range(100):
        entries = [fake_logprobs(97, 20)] * 10
        list(text.chunk(TextDelta(text="a" * 10, token_ids=[97] * 10, logprobs=entries)))
    monkeypatch.setattr(encoding, "encode", noted)
    pieces = text.chunk(LAST)
    assert next(pieces) == b""
    for num_encoded in range(1, 4):
        assert len(next(pieces)) > 400_000
        assert len(sizes) == num_encoded
    assert max(sizes) < 4000
