"""How long long answers keep a server's event loop waiting while they are written, the worst of each.

Usage: python benchmarks/long_answers.py [--tokens 4000] [--rounds 5]

Answers: what a late reader of a stream gets of `--tokens` tokens with 20 likeliest each; the events that
complete such a response; whole answers of 2**19 scores of a prompt, and of 2,048 vectors of 1,024 numbers.
The last two are written beside the event loop: the longest time counts in which another thread does not run.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec

from penstock.engine.client.outputs import TextDelta, num_at_once
from penstock.request import TokenLogprobs
from penstock.server.answers.encoding import encode_in_slices
from penstock.server.answers.responses_output import Output, ResponseText
from penstock.server.answers.text_logprobs import PlacedLogprobs
from penstock.server.openai.logprobs import chat_logprobs, prompt_logprobs
from penstock.server.openai.message_reader import Reading
from penstock.server.openai.openai_types import (
    CompletionChoice,
    CompletionResponse,
    Embedding,
    EmbeddingResponse,
    EmbeddingUsage,
    PromptTokensDetails,
    Usage,
)

TOP = 20
USAGE = Usage(
    prompt_tokens=1, completion_tokens=0, total_tokens=1, prompt_tokens_details=PromptTokensDetails(0)
)
ENTRY = TokenLogprobs(-1.2345, 3, list(range(97, 97 + TOP)), [-0.1234 * place for place in range(TOP)])


def token_bytes(token_id: int) -> bytes:
    return bytes([token_id % 128])


class Letters:
    """A detokenizer of tokens that are a letter each."""

    def feed(self, token_ids: Any) -> str:
        return "a" * len(token_ids)

    def finish(self) -> str:
        return ""


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def held(work: Callable[[], object]) -> float:
    """The longest time of this work in which another thread, which wakes often, does not run."""
    gaps, is_done = [0.0], threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not is_done.wait(0.0005):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=watch)
    thread.start()
    time.sleep(0.02)
    gaps.clear()
    work()
    is_done.set()
    thread.join()
    return max(gaps, default=0.0)


def late_reader(num_tokens: int) -> tuple[float, float]:
    """Seconds to write all as one event, and for the longest of the pieces that are written now."""
    one = TextDelta("a", [97], [ENTRY])
    size = num_at_once([one] * num_tokens)

    def write(count: int) -> None:
        msgspec.json.encode(chat_logprobs([97] * count, [ENTRY] * count, token_bytes))

    return seconds(lambda: write(num_tokens)), max(seconds(lambda: write(size)) for _ in range(5))


def last_events(num_tokens: int) -> tuple[float, float]:
    """Seconds for the events that complete a response, all together and the longest alone."""
    unknown: Any = SimpleNamespace()
    text = ResponseText(
        unknown, Output("u", Reading().reader("r", 0), PlacedLogprobs(token_bytes, Letters()))
    )
    text._is_opened = True
    for _ in range(num_tokens):
        for _ in text.chunk(TextDelta("a", [97], [ENTRY])):
            pass
    each = list(_timed(iter(text.chunk(TextDelta("", [], [], "stop")))))
    return sum(each), max(each)


def _timed(pieces: Iterator[bytes]) -> Iterator[float]:
    while True:
        begin = time.perf_counter()
        if next(pieces, None) is None:
            return
        yield time.perf_counter() - begin


def whole(answer: msgspec.Struct) -> tuple[float, float]:
    """Longest times without another thread, for one call and in slices."""
    return held(lambda: msgspec.json.encode(answer)), held(lambda: encode_in_slices(answer))


def scores() -> msgspec.Struct:
    count = (1 << 19) // (1 + TOP)
    told = prompt_logprobs([97] * (count + 1), [ENTRY] * count, TOP, token_bytes)
    choice = CompletionChoice(
        index=0, text="", logprobs=None, finish_reason="length", stop_reason=None, prompt_logprobs=told
    )
    return CompletionResponse(id="x", object="o", created=1, model="m", choices=[choice], usage=USAGE)


def vectors() -> msgspec.Struct:
    vector = [0.1234567 * number for number in range(1024)]
    data = [Embedding(index=index, embedding=vector) for index in range(2048)]
    return EmbeddingResponse(data=data, model="m", usage=EmbeddingUsage(prompt_tokens=1, total_tokens=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    settings = parser.parse_args()
    prompt, inputs = scores(), vectors()
    cases: dict[str, Callable[[], tuple[float, float]]] = {
        "late reader": lambda: late_reader(settings.tokens),
        "last events of a response": lambda: last_events(settings.tokens),
        "scores of a prompt": lambda: whole(prompt),
        "vectors": lambda: whole(inputs),
    }
    print("ms at once: in one piece, as it is; median (least to most)")
    for name, measure in cases.items():
        rounds = [measure() for _ in range(settings.rounds)]
        told = [f"{statistics.median(x):.1f} ({min(x):.1f} to {max(x):.1f})" for x in _in_ms(rounds)]
        print(f"{name}: {told[0]}, {told[1]}")


def _in_ms(rounds: list[tuple[float, float]]) -> list[list[float]]:
    return [[1000 * value for value in column] for column in zip(*rounds, strict=True)]


if __name__ == "__main__":
    main()
