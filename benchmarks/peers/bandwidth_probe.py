"""Read bandwidth of the memory, as an engine script of `cpu_peers.py` whose only request is {"threads": N}.

The answer is {"bytes_per_s": ...}: the best of several sums over a gigabyte, far beyond any cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from peer_protocol import Answer, answer_lines, claim_stdout, die_with_parent, installed

NUM_BYTES = 1 << 30
NUM_SUMS = 7


def main() -> None:
    with claim_stdout() as answers:
        die_with_parent()
        words = torch.ones(NUM_BYTES // 4)

        def answer(request: Mapping[str, int]) -> Answer:
            torch.set_num_threads(request["threads"])
            return {"bytes_per_s": NUM_BYTES / min(sum_seconds(words) for _ in range(NUM_SUMS))}

        answer_lines(answers, answer, versions=installed(("torch",)), notes=[])


def sum_seconds(words: torch.Tensor) -> float:
    begin = time.perf_counter()
    words.sum()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
