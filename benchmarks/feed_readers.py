"""What one reader of the live page's feed costs a server: throughput, and CPU time of all its processes.

    python benchmarks/feed_readers.py [--model demo] [--stages 2] [--requests 16] [--tokens 1024]

One `penstock serve` takes the same requests again and again: with nobody looking, with one reader of
`/debug/pipeline/events?lanes=true`, and with nobody again, in turns. The model is small, so that steps are
short and there are more of them to be told than of any real one. The reader takes what comes and draws
nothing: a browser on the same machine costs what its drawing costs. The bar is 1 % of throughput.

Where the machine is not quiet enough for that, the CPU time of the programs that serve the reader tells more:
supervisor, core and API process, without the stages, whose work no reader changes. Their time for a token
with a reader, less that without one, is printed as a share of the time of all processes for a token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cpu_time import cpu_seconds
from ratios import against_off, in_turns, shown

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from served import Served

SETTLE_S = 1.0  # in which a reader that comes gets the last seconds
SUBJECTS = ("nobody", "one reader", "nobody again")


class Round:
    """What one round has taken.

    Attributes:
        rate: tokens a second.
        cpu_rate: tokens for each second of CPU time.
        served_s: seconds of CPU time for a token, of the processes that are no stages.
    """

    def __init__(self, tokens: int, seconds: float, stages_s: float, others_s: float) -> None:
        self.rate = tokens / seconds
        self.cpu_rate = tokens / (stages_s + others_s)
        self.served_s = others_s / tokens


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    arguments = [options.model, "--pp", str(options.stages), "--threads-per-rank", "1"]
    with Served(*arguments, "--speculative-method", "off") as server:

        def take(subject: str) -> Round:
            with ExitStack() as readers:
                if subject == "one reader":
                    readers.enter_context(reading(server.url))
                return measure(server, options.requests, options.tokens)

        rounds = in_turns(SUBJECTS, take, options.rounds, warm_up=2)
    print("| | nobody | one reader | reader/nobody | control |\n|---|---|---|---|---|")
    for name, pick in (("tokens/s", "rate"), ("tokens per CPU second", "cpu_rate")):
        cells = against_off([[getattr(each, pick) for each in of_round] for of_round in rounds])
        print(f"| {name} | {' | '.join(cells)} |")
    for name, which in (("one reader", 1), ("nobody again", 2)):
        shares = [
            100 * (of_round[which].served_s - of_round[0].served_s) * of_round[0].cpu_rate
            for of_round in rounds
        ]
        print(f"CPU time besides the stages', {name}: {shown(shares)} % more of all CPU time")
    lost = 1 - statistics.median(of_round[1].rate / of_round[0].rate for of_round in rounds)
    return 0 if lost < 0.01 else 1


def measure(server: Served, num_requests: int, num_tokens: int) -> Round:
    """Have all requests answered at once."""
    targets = [(server.url, number, num_tokens) for number in range(num_requests)]
    threads = [threading.Thread(target=complete, args=target) for target in targets]
    processes = server.family()
    stages = [process.pid for process in processes if "stage" in " ".join(process.cmdline())]
    others = [process.pid for process in processes if process.pid not in stages]
    before, began = [cpu_seconds(pids) for pids in (stages, others)], time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    taken = [cpu_seconds(pids) - cpu for pids, cpu in zip((stages, others), before, strict=True)]
    return Round(num_requests * num_tokens, seconds, *taken)


def complete(url: str, number: int, num_tokens: int) -> None:
    """Have one request answered."""
    body = {"prompt": [5 + number, 7, 9], "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == num_tokens


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Read the feed while the block runs."""
    is_over, has_begun = threading.Event(), threading.Event()

    def read() -> None:
        with urllib.request.urlopen(f"{url}/debug/pipeline/events?lanes=true", timeout=30) as feed:
            while not is_over.is_set():
                assert feed.readline()
                has_begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(30)
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        is_over.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
