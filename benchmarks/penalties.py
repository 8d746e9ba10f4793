"""What penalties cost on the last stage, beside the head that computes the logits anyway.

    python benchmarks/penalties.py [--vocab 151936] [--hidden 896] [--history 2048] [--repeats 30]

Each turn asks the head for the likeliest token of rows without penalties, and then of rows with a
repetition, a presence and a frequency penalty after a history of different tokens, one more token having
come in each turn; once with our kernels' head and once from whole logits by torch. Prints the median of the
ratios of neighbouring turns, the ratio of the least times (for a machine that others use) and, alone, the
time to keep the counts and to write the request.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from kernel_head import packed_vocabulary

from penstock.batch import GREEDY, LogitChanges
from penstock.kernels.candidates import HeadOutput, HeadRequest, head_output_of
from penstock.kernels.cpu import library as kernel_library
from penstock.kernels.cpu.head import Head, dense_product
from penstock.sample.logit_changes import TokenHistory
from penstock.sample.sampling_rows import SamplingRows

CHANGES = LogitChanges(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2)
WARM_UP = 3


class Rows:
    """Rows of a rank that get another token in each turn."""

    def __init__(
        self, num_rows: int, vocab: int, history: int, turns: int, changes: LogitChanges | None
    ) -> None:
        rng = np.random.default_rng(1)
        ids = np.stack([rng.permutation(vocab)[: history + turns] for _ in range(num_rows)])
        self._rows, self._index = np.arange(num_rows), np.zeros(num_rows, dtype=np.int64)
        prompt_len = np.full(num_rows, history // 2)
        self._index += history - history // 2
        self._sampling = SamplingRows(TokenHistory(token_ids=ids, prompt_len=prompt_len), vocab)
        for row in range(num_rows):
            self._sampling.add(row, msgspec.structs.replace(GREEDY, changes=changes))

    def next(self) -> HeadRequest:
        self._index += 1
        return self._sampling.batch(self._rows, self._index.tolist()).head


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(answer: Callable[[HeadRequest], HeadOutput], num_rows: int, options: argparse.Namespace) -> str:
    turns = options.repeats + WARM_UP + 1
    plain, changed, counted = (
        Rows(num_rows, options.vocab, options.history, turns, changes) for changes in (None, CHANGES, CHANGES)
    )
    works = [lambda: answer(plain.next()), lambda: answer(changed.next()), counted.next]
    taken: list[list[float]] = []
    for turn in range(options.repeats + WARM_UP):
        order = works if turn % 2 else works[::-1]
        times = {id(work): seconds(work) for work in order}
        taken.append([times[id(work)] for work in works])
    taken = taken[WARM_UP:]
    ratio = statistics.median(one[1] / one[0] for one in taken)
    bare, keeping = (1000 * statistics.median(one[part] for one in taken) for part in (0, 2))
    least = min(one[1] for one in taken) / min(one[0] for one in taken)
    return f"{ratio:.3f} x the {bare:6.2f} ms without (of the least: {least:.3f}); counting {keeping:5.3f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--history", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = kernel_library.load()
    if loaded.library is None:
        print(f"no kernels: {loaded.reason}", file=sys.stderr)
        return 1
    vocab, hidden, numbers = options.vocab, options.hidden, torch.Generator().manual_seed(0)
    packed = packed_vocabulary(loaded.library, vocab, hidden, numbers)
    for num_rows in (1, 8, 32):
        x = torch.randn(num_rows, hidden, generator=numbers).bfloat16()
        product = dense_product(packed.data_ptr(), hidden, vocab, x.dtype)
        head = Head(loaded.library)
        found = measure(lambda asked: head.answer(x, product, asked), num_rows, options)  # noqa: B023
        print(f"{num_rows:3} rows  kernel  {found}")
        logits = torch.randn(num_rows, vocab, generator=numbers)
        found = measure(lambda asked: head_output_of(logits, asked), num_rows, options)  # noqa: B023
        print(f"{num_rows:3} rows  torch, from logits  {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
