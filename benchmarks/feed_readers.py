"""What one reader of the live page's feed costs a server: throughput, and CPU time of all its processes.

    python benchmarks/feed_readers.py [--model demo] [--stages 2] [--requests 16] [--tokens 1024]

One `penstock serve` takes the same requests again and again: with nobody looking, with one reader of
`/debug/pipeline/events?lanes=true`, and with nobody again, in turns. The model is small, so that steps are
short and there are more of them to be told than of any real one. The reader takes what comes and draws
nothing: a browser on the same machine costs what its drawing costs. The bar is 1 % of throughput.

Where the machine is not quiet enough for that, the CPU time of the programs that serve the reader tells more:
core and API process, since no reader changes what stages do. It is counted in windows of one steady load,
with and without a reader in turns, and printed as a share of the CPU time of all processes.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from cpu_time import cpu_seconds
from ratios import against_off, in_turns, shown

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from served import Served

WINDOW_S = 3.0  # in which CPU time is counted
SETTLE_S = 1.0  # in which a reader that comes gets the last seconds
SUBJECTS = ("nobody", "one reader", "nobody again")


class Round:
    """What one round has taken: tokens a second, and tokens for each second of CPU time."""

    def __init__(self, tokens: int, seconds: float, cpu_s: float) -> None:
        self.rate = tokens / seconds
        self.cpu_rate = tokens / cpu_s


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
            with looking(subject, server.url):
                return measure(server, options.requests, options.tokens)

        rounds = in_turns(SUBJECTS, take, options.rounds, warm_up=2)
        shares = [*cpu_shares(server, options)]
    print("| | nobody | one reader | reader/nobody | control |\n|---|---|---|---|---|")
    for name, pick in (("tokens/s", "rate"), ("tokens per CPU second", "cpu_rate")):
        cells = against_off([[getattr(each, pick) for each in of_round] for of_round in rounds])
        print(f"| {name} | {' | '.join(cells)} |")
    for name, *cells in shares:
        print(f"CPU time of the {name}, in % of all: " + ", ".join(cells))
    lost = 1 - statistics.median(of_round[1].rate / of_round[0].rate for of_round in rounds)
    return 0 if lost < 0.01 else 1


def measure(server: Served, num_requests: int, num_tokens: int) -> Round:
    """Have all requests answered at once."""
    targets = [(server.url, number, num_tokens) for number in range(num_requests)]
    threads = [threading.Thread(target=complete, args=target) for target in targets]
    pids = [process.pid for process in server.family()]
    cpu, began = cpu_seconds(pids), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    return Round(num_requests * num_tokens, seconds, cpu_seconds(pids) - cpu)


def cpu_shares(server: Served, options: argparse.Namespace) -> Iterator[list[str]]:
    """Yield for core and API process their share of CPU time, what a reader adds to it, and the control."""
    titles = {process.pid: process.cmdline()[0] for process in server.family()}
    pids = {
        name: [pid for pid, title in titles.items() if title.startswith(start)]
        for name, start in (("core", "penstock core"), ("API process", "penstock api"), ("all", ""))
    }
    assert len(pids["core"]) == len(pids["API process"]) == 1, titles
    is_over = threading.Event()

    def keep_busy() -> None:
        while not is_over.is_set():
            measure(server, options.requests, options.tokens)

    def take(subject: str) -> dict[str, float]:
        with looking(subject, server.url):
            before = {name: cpu_seconds(own) for name, own in pids.items()}
            time.sleep(WINDOW_S)
            taken = {name: cpu_seconds(own) - before[name] for name, own in pids.items()}
        return {name: 100 * seconds / taken["all"] for name, seconds in taken.items()}

    load = threading.Thread(target=keep_busy)
    load.start()
    try:
        rounds = in_turns(SUBJECTS, take, options.rounds, warm_up=1)
    finally:
        is_over.set()
        load.join()
    for name in ("core", "API process"):
        more = [[of_round[which][name] - of_round[0][name] for of_round in rounds] for which in (1, 2)]
        usual = statistics.median(of_round[0][name] for of_round in rounds)
        yield [name, f"{usual:.2f}", f"with one reader more by {shown(more[0])}", f"control {shown(more[1])}"]


def complete(url: str, number: int, num_tokens: int) -> None:
    """Have one request answered."""
    body = {"prompt": [5 + number, 7, 9], "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == num_tokens


def looking(subject: str, url: str) -> AbstractContextManager[None]:
    """Return a context in which a reader reads, if that is the subject."""
    return reading(url) if subject == "one reader" else nullcontext()


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
