"""What a row's grammar costs at each token on the last stage, with a vocabulary as large models have it.

    python benchmarks/grammar_mask.py

Texts of the schemas of the tests are walked by tokens drawn from the masks, each as `sample.grammar_rows`
does it: the token is accepted, and the mask of the next one made. Then what the mask costs where it is used.
CPU time of one thread. Prints Markdown for docs/perf-log.md.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from generated_vocabulary import write_tokenizer

from penstock.grammar.matcher import Matcher, Vocabulary, load_vocabulary
from penstock.kernels.candidates import HeadRequest, SparseBias, constrained
from penstock.request import StructuredOutputs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from schemas import schemas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200, help="of a text at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        end = write_tokenizer(Path(directory), options.vocab_size)
        began = time.perf_counter()
        vocabulary = load_vocabulary(Path(directory), [end])
        opened = time.perf_counter() - began
    print(f"vocabulary of {options.vocab_size} opened in {opened:.2f} s")
    print("| | mean | p50 | p95 | p99 | longest |\n|---|---|---|---|---|---|")
    asked = [StructuredOutputs(json=json.dumps(schema)) for schema in schemas(options.schemas)]
    builds, nexts = [], []
    for number, structured in enumerate(asked):
        build, own = walk(vocabulary, structured, end, options.tokens, random.Random(number))
        builds.append(build)
        nexts += own
    show(f"matcher built and first mask made ({len(builds)} schemas), ms", builds)
    show(f"token accepted, next mask made ({len(nexts)} tokens), ms", nexts)
    show("mask put over whole logits, a row of 32, ms", applied(options.vocab_size))


def walk(
    vocabulary: Vocabulary, structured: StructuredOutputs, end: int, most: int, chance: random.Random
) -> tuple[float, list[float]]:
    """Milliseconds of CPU: to the first mask, and of each one after it."""
    words = np.zeros(vocabulary.num_words, dtype=np.int32)
    began = time.thread_time()
    matcher = Matcher(vocabulary, structured)
    matcher.fill(words.ctypes.data, words.nbytes)
    build = time.thread_time() - began
    took: list[float] = []
    while not matcher.error and len(took) < most:
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        token_id = int(allowed[chance.randrange(len(allowed))])
        if token_id == end:
            break
        began = time.thread_time()
        matcher.accept([token_id])
        matcher.fill(words.ctypes.data, words.nbytes)
        took.append((time.thread_time() - began) * 1000)
    assert not matcher.error, matcher.error
    return build * 1000, took


def applied(vocab_size: int) -> list[float]:
    """Milliseconds a row, of 32 together."""
    torch.set_num_threads(1)
    logits = torch.randn(32, vocab_size)
    masks = np.random.default_rng(1).integers(-(2**31), 2**31, (32, -(-vocab_size // 32)), dtype=np.int32)
    request = HeadRequest(
        num_candidates=np.zeros(32, dtype=np.int64),
        wants_logits=np.ones(32, dtype=np.bool_),
        bias=SparseBias.none(32),
        allowed=masks,
    )
    took = []
    for _ in range(30):
        began = time.thread_time()
        constrained(logits, request, np.arange(32))
        took.append((time.thread_time() - began) * 1000 / 32)
    return took


def show(what: str, values: list[float]) -> None:
    points = [np.mean(values), *np.percentile(values, [50, 95, 99]), max(values)]
    print(f"| {what} | {' | '.join(f'{point:.3f}' for point in points)} |")


if __name__ == "__main__":
    main()
