"""Which tokens' log-probabilities belong to which part of a text (issue 25, point 18)."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from fake_engine import ByteDetokenizer, fake_logprobs, syntax_of
from penstock.engine.client.outputs import TextDelta
from penstock.server.answers.responses_output import Output
from penstock.server.answers.text_logprobs import PlacedLogprobs
from penstock.server.openai.message_reader import Reading
from penstock.server.openai.openai_types import ChatTokenLogprob
from penstock.server.openai.responses_types import OutputMessage

THOUGHT = "<think>\nHm, né. Rome\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>\n'
BROKEN = '<tool_call>\n{"name": "look", "arguments": {"city": Rome}}\n</tool_call>'


class Vocabulary:
    """Tokens of any bytes, an id for each."""

    def __init__(self) -> None:
        self._tokens: list[bytes] = []

    def id_of(self, raw: bytes) -> int:
        self._tokens.append(raw)
        return len(self._tokens) - 1

    def bytes_of(self, token_id: int) -> bytes:
        return self._tokens[token_id]


class Detokenizer:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes = ByteDetokenizer()

    def feed(self, token_ids: tuple[int, ...] | list[int]) -> str:
        return "".join(self._bytes.feed(list(self._vocabulary.bytes_of(one))) for one in token_ids)

    def finish(self) -> str:
        return self._bytes.finish()


def placed(vocabulary: Vocabulary, tokens: list[bytes]) -> PlacedLogprobs:
    logprobs = PlacedLogprobs(vocabulary.bytes_of, Detokenizer(vocabulary))
    ids = [vocabulary.id_of(raw) for raw in tokens]
    logprobs.add(ids, [fake_logprobs(0, 0) for _ in ids])
    return logprobs


def raws(told: list[ChatTokenLogprob]) -> list[bytes]:
    return [bytes(entry.bytes) for entry in told]


def test_a_token_is_told_with_the_first_part_that_has_a_character_of_it() -> None:
    logprobs = placed(Vocabulary(), [b"ab", b"cd", b"", b"e", b"f"])
    assert raws(logprobs.take(1, 3)) == [b"ab", b"cd"]
    assert raws(logprobs.take(3, 5)) == [b"", b"e"]
    assert raws(logprobs.take_rest(6)) == []


def test_tokens_of_one_character_go_with_it() -> None:
    face = "😀".encode()
    logprobs = placed(Vocabulary(), [b"a" + face[:1], face[1:3], face[3:] + b"b" + face[:3], face[3:]])
    assert raws(logprobs.take(1, 2)) == [b"a" + face[:1], face[1:3], face[3:] + b"b" + face[:3]]
    assert raws(logprobs.take(3, 4)) == [face[3:]]


def test_what_stands_behind_the_text_is_the_rest() -> None:
    """A stop string that was cut off, and an end of sequence; not what is left before them."""
    logprobs = placed(Vocabulary(), [b"a", b" ", b"b", b"STOP", b""])
    assert raws(logprobs.take(0, 1)) == [b"a"]
    assert raws(logprobs.take_rest(3)) == [b"STOP", b""]
    assert raws(logprobs.take_rest(3)) == []


def cut(raw: bytes, chance: Random, longest: int) -> list[bytes]:
    parts = []
    while raw:
        size = chance.randint(1, longest)
        parts.append(raw[:size])
        raw = raw[size:]
    return parts


def overlapping(tokens: list[bytes], begin: int, end: int) -> list[bytes]:
    """Those with bytes from `begin` to `end`."""
    found, at = [], 0
    for raw in tokens:
        if at < end and at + len(raw) > begin:
            found.append(raw)
        at += len(raw)
    return found


def segments(chance: Random) -> list[tuple[bool, str]]:
    """An answer, and whether each part of it is a message's text."""
    said = ["Well, né 世界.", "call Rome", "😀 tool", "Hm"]
    found = [(False, THOUGHT)] if chance.random() < 0.5 else []
    for _ in range(chance.randint(1, 3)):
        found.append((True, chance.choice(said)))
        found.append((False, chance.choice([CALL, BROKEN])))
    return found[: chance.randint(1, len(found))]


@pytest.mark.parametrize("longest", [1, 3, 12])
def test_each_message_has_the_tokens_of_its_text_however_these_are_cut(longest: int) -> None:
    chance = Random(longest)
    syntax = syntax_of("hermes", "qwen3")
    reading = Reading(tools=syntax.tools, names=frozenset({"look"}), reasoning=syntax.reasoning)
    num_messages = 0
    for _ in range(150):
        answer = segments(chance)
        tokens = cut("".join(text for _, text in answer).encode(), chance, longest)
        wanted, at = [], 0
        for is_said, text in answer:
            size = len(text.encode())
            if is_said:
                wanted.append((text, overlapping(tokens, at, at + size)))
            at += size
        if answer[-1][0]:  # nothing follows it but the end
            wanted[-1] = (wanted[-1][0], [*wanted[-1][1], b""])
        messages, streamed = run(reading, tokens, chance)
        assert messages == wanted == streamed
        num_messages += len(wanted)
    assert num_messages > 150


def run(
    reading: Reading, tokens: list[bytes], chance: Random
) -> tuple[list[tuple[str, list[bytes]]], list[tuple[str, list[bytes]]]]:
    """The messages that these tokens make, as they are in the end, and as their deltas have it."""
    vocabulary = Vocabulary()
    text = Detokenizer(vocabulary)
    output = Output("u", reading.reader("r", 0), PlacedLogprobs(vocabulary.bytes_of, Detokenizer(vocabulary)))
    events = []
    waiting = [vocabulary.id_of(raw) for raw in (*tokens, b"")]
    while waiting:
        size = chance.randint(1, 4)
        ids, waiting = waiting[:size], waiting[size:]
        entries = [fake_logprobs(0, 0) for _ in ids]
        events += output.take(TextDelta(text.feed(ids), ids, entries, None if waiting else "stop"))
    messages = [item.content[0] for item in output.items if isinstance(item, OutputMessage)]
    deltas: dict[int, tuple[str, list[bytes]]] = {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            said, told = deltas.get(event["output_index"], ("", []))
            deltas[event["output_index"]] = (said + event["delta"], told + decoded(event["logprobs"]))
    whole = [(part.text, decoded(output.lists.encode(part.logprobs))) for part in messages]
    return whole, list(deltas.values())


def decoded(encoded: bytes) -> list[bytes]:
    return raws(msgspec.json.decode(encoded, type=list[ChatTokenLogprob]))
