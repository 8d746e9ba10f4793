"""How far predictions of a layout over two hosts are from what the engine does: as `plan_accuracy.py` does.

    python benchmarks/plan_accuracy_hosts.py [--model demo|0.5B|DIR] [--points 8] [--seed 0] [--rounds 3]
                         [--window-s 2] [--rates 1000,100] [--delays-ms 1:50] [--max-tokens 8192]
                         [--record FILE]
    python benchmarks/plan_accuracy_hosts.py --recorded FILE [--model demo|0.5B|DIR]

Two hosts are network namespaces of this machine, each with one stage. The engine is calibrated over a link
without delay. Other links are drawn from the seed: a rate of the given ones, and a delay, each way, evenly on
a scale of powers. So are the loads. Calibration and loads are measured in turns, in several rounds. A
prediction gets the calibrated stages, and the link as a user writes it down: its rate and its latency.
docs/test-bed.md names what the machine needs; the program that delays packets shares the cores with the
stages. `--record` keeps what was measured in a file, and `--recorded` predicts it anew, as in
`plan_accuracy.py`.

Prints a row for each point and the mean absolute errors. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from measured_loads import Engine, Measured, Point, running
from peers.checkpoint import FULL_SHAPE, make_checkpoint
from plan_accuracy import Errors, draw, errors_of, in_rounds, learn, mean_errors, row

from penstock.config.engine import ModelConfig
from penstock.layouts.devices import Link
from penstock.layouts.model_sizes import ModelSizes, read_sizes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from network import Host, ShapedLink, shaped_network

NUM_STAGES = 2
PORT = 7700
JUMBO = 9000  # bytes of a packet, where a program carries them
NO_DELAY = Link(kind="network", bytes_per_s=1.25e9, latency_s=0.0)  # during calibration
START_LIMIT_S = 120.0
SETTLE_S = 3.0  # after a change of the link, until the engine has measured it


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was measured over links between two hosts.

    Attributes:
        links: the drawn points, and the link of each.
        in_order: all measurements, in their order.
    """

    links: list[tuple[Point, Link]]
    in_order: list[Measured]


def main() -> int:
    options = parse_options()
    if options.head:
        return asyncio.run(be_head(json.loads(options.head)))
    with tempfile.TemporaryDirectory(prefix="plan-accuracy-hosts-") as scratch:
        model = options.model
        if model == "0.5B":
            model = str(Path(scratch, "0.5B"))
            make_checkpoint(Path(model), FULL_SHAPE)
        if options.recorded:
            record = msgspec.json.decode(Path(options.recorded).read_bytes(), type=Record)
            print_errors(record, read_sizes(ModelConfig(model=model)))
            return 0
        with shaped_network(seed=options.seed, mtu=JUMBO) as network:
            return measure(model, Path(scratch), network.hosts, options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="in which all points are measured once")
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--rates", default="1000,100", help="Mbit/s of the links")
    parser.add_argument("--delays-ms", default="1:50", help="least and longest delay of a link, each way")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of all prompts of a point together")
    parser.add_argument("--record", default="", help="a file for what was measured")
    parser.add_argument("--recorded", default="", help="such a file, which is predicted anew")
    parser.add_argument("--head", default="", help="used by the benchmark itself")
    return parser.parse_args()


def measure(model: str, scratch: Path, hosts: Sequence[Host[ShapedLink]], options: argparse.Namespace) -> int:
    """Start the head and the worker, and set the links that the head asks for."""
    head_host, worker_host = hosts
    token = scratch / "token"
    told = {name: value for name, value in vars(options).items() if name != "head"}
    told |= {
        "model": model,
        "settings": {
            "hosts": 2,
            "listen_workers": f"{head_host.address}:{PORT}",
            "join_token_file": str(token),
            "threads_per_rank": 1,  # both hosts share two cores
            "state_dir": str(scratch / "tower"),
        },
    }
    command = [sys.executable, __file__, "--head", json.dumps(told)]
    head = head_host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    worker = None
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not token.exists():
            if head.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the head did not start; its output says why")
            time.sleep(0.05)
        words = ["worker", "--join", f"{head_host.address}:{PORT}", "--join-token-file", str(token)]
        words += ["--name", "desk", "--models-dir", model, "--state-dir", str(scratch / "desk")]
        worker = worker_host.popen([sys.executable, "-m", "penstock", *words], stdout=subprocess.DEVNULL)
        serve_head(head, hosts)
        return head.wait()
    finally:
        for program in filter(None, (head, worker)):
            program.terminate()
            program.wait()


def serve_head(head: subprocess.Popen[str], hosts: Sequence[Host[ShapedLink]]) -> None:
    """Print what the head prints, and set the links when it asks for that."""
    assert head.stdout is not None
    assert head.stdin is not None
    for line in head.stdout:
        if not line.startswith("{"):
            print(line, end="", flush=True)
            continue
        asked = json.loads(line)
        hosts[1].link.set_delay(asked["delay_s"])
        for host in hosts:
            host.link.set_rate(asked["bits_per_s"])
        head.stdin.write("set\n")
        head.stdin.flush()


async def be_head(told: dict[str, Any]) -> int:
    """Be the head: measure the calibration without delay, and each other point over its link."""
    options = argparse.Namespace(**told)
    sizes = read_sizes(ModelConfig(model=options.model))
    links = draw_links(options)

    async def prepare(point: Point) -> None:
        await ask_for_link(links.get(point, NO_DELAY))

    async with running(options.model, NUM_STAGES, 1, **options.settings) as llm:
        engine = Engine(llm, NUM_STAGES, sizes.spec.vocab_size, options.window_s)
        in_order = await in_rounds(engine, list(links), options, prepare)
    report(Record(links=[*links.items()], in_order=in_order), sizes, options.record)
    return 0


def report(record: Record, sizes: ModelSizes, path: str) -> None:
    """Print the errors, and keep what was measured in a file, unless its path is empty."""
    if path:
        Path(path).write_bytes(msgspec.json.encode(record))
    print_errors(record, sizes)


def print_errors(record: Record, sizes: ModelSizes) -> None:
    """Print a row for each drawn point, and the mean absolute errors."""
    links = dict(record.links)
    calibrated, drawn = learn(record.in_order, NUM_STAGES, sizes)
    print("| Mbit/s | delay, ms | at once | prompt | ms per token | first token, ms | bubble, % |")
    print("|---|---|---|---|---|---|---|")
    errors: list[Errors] = []
    for measured in drawn:
        link = links[measured.point]
        predicted = calibrated.predict(measured.point, measured.context, sizes, link)
        errors.append(errors_of(measured, predicted))
        labels = [f"{link.bytes_per_s * 8 / 1e6:g}", f"{1e3 * link.latency_s:.1f}"]
        print(row(labels, measured, predicted))
    print(f"\nmean absolute errors over {len(errors)} points: {mean_errors(errors)}", flush=True)


def draw_links(options: argparse.Namespace) -> dict[Point, Link]:
    """Draw the points, and the link of each."""
    rates = [*map(float, options.rates.split(","))]
    shortest_ms, longest_ms = map(float, options.delays_ms.split(":"))
    source = random.Random(f"links {options.seed}")
    links = {}
    for point in draw(options.seed, "hosts", options.points, options.max_tokens):
        mbits = source.choice(rates)
        delay_ms = shortest_ms * (longest_ms / shortest_ms) ** source.uniform(0, 1)
        links[point] = Link(kind="network", bytes_per_s=mbits * 1e6 / 8, latency_s=delay_ms / 1e3)
    return links


async def ask_for_link(link: Link) -> None:
    """Have the links set, and wait until the engine has measured them."""
    told = {"bits_per_s": int(link.bytes_per_s * 8), "delay_s": link.latency_s}
    print(json.dumps(told), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.sleep(SETTLE_S)


if __name__ == "__main__":
    raise SystemExit(main())
