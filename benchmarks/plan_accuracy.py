"""How far predictions of a layout are from what the engine does here: time per token, first token, bubble.

    python benchmarks/plan_accuracy.py [--models demo,0.5B] [--layouts 1x1,2x1,3x1,1x2,2x2] [--points 6]
                                       [--seed 0] [--rounds 3] [--window-s 2] [--max-tokens 16384]
                                       [--record FILE]
    python benchmarks/plan_accuracy.py --recorded FILE

For each model and layout (stages x ranks) an engine is started. It is calibrated at a few fixed points: the
costs of stages are fitted to what they report there, as the scheduler fits them; what is left of the measured
times is taken for what lies between steps. Other points are drawn from the seed:
concurrency 1 to 64 and prompts of 16 to 1,024 tokens, both evenly on a scale of powers, none of them a point
of the calibration. At each point so many requests decode; the time per token and the bubble are those of a
window in which all of them do, and the first token is that of one more request, sent while all others
decode, the median of several. Predictions are those of `layouts.prediction`, which `penstock plan` uses.

The speed of a machine that others share drifts by 10 to 20 % from minute to minute. So points of both kinds
are measured in turns, in several rounds, each in an order that the seed draws. From how the points of a few
minutes differ from their own means follows the speed of the machine then, by which times are divided. The
means of the rounds are compared.

`--record` adds what was measured to a file, a line for each layout. `--recorded` predicts anew what such a
file holds, and starts no engine: so a change of the predictions is judged by the same measurements.

Engines do not speculate: how many guesses are right depends on the text, which no prediction knows.

Prints a row for each point, and for each model the mean absolute errors: of the time per token and of the
first token in per cent of what was measured, of the bubble in points. Beside them stands by how much the
machine differs from itself: two measurements of one point, each of as many rounds as were made. No prediction
is expected to be nearer than that. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from learnt_layout import Calibrated, means_of, rounds_of, steadied
from measured_loads import Engine, Measured, Point, running
from peers.checkpoint import FULL_SHAPE, make_checkpoint

from penstock.config.engine import ModelConfig
from penstock.layouts.model_sizes import ModelSizes, read_sizes
from penstock.layouts.prediction import Prediction

MODELS = ("demo", "0.5B")
LAYOUTS = "1x1,2x1,3x1,1x2,2x2"
CALIBRATION = (
    *((1, 20), (1, 200), (1, 700), (2, 100), (3, 160), (6, 40), (6, 600)),
    *((12, 24), (12, 300), (24, 32), (24, 250), (48, 64), (64, 24)),
)  # (concurrency, prompt tokens)
MAX_PROMPT, MIN_PROMPT = 1024, 16

Errors = tuple[float, float, float]  # of the time per token, the first token, the bubble


def draw(seed: int, label: str, count: int, max_tokens: int) -> list[Point]:
    """Points of a grid, evenly on scales of powers; at most so many prompt tokens together."""
    source = random.Random(f"{seed} {label}")
    taken = set(calibration())
    points: list[Point] = []
    while len(points) < count:
        concurrency = round(2 ** source.uniform(0, 6))
        prompt = round(2 ** source.uniform(4, 10))
        point = Point(concurrency, prompt)
        if point not in taken and concurrency * prompt <= max_tokens:
            taken.add(point)
            points.append(point)
    return points


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was measured of one model and layout.

    Attributes:
        label: the model's name in the tables.
        pp, tp: stages, and ranks of each.
        in_order: all measurements, in their order.
    """

    label: str
    pp: int
    tp: int
    in_order: list[Measured]


async def measure_layout(label: str, model: str, pp: int, tp: int, options: argparse.Namespace) -> Record:
    """Start an engine of this layout, and measure all points."""
    sizes = read_sizes(ModelConfig(model=model))
    points = draw(options.seed, f"{label} {pp}x{tp}", options.points, options.max_tokens)
    async with running(model, pp, tp) as llm:
        engine = Engine(llm, pp, sizes.spec.vocab_size, options.window_s)
        return Record(label=label, pp=pp, tp=tp, in_order=await in_rounds(engine, points, options))


async def ready(_: Point) -> None:
    """Prepare nothing: the engine is ready for the point."""


async def in_rounds(
    engine: Engine,
    points: Sequence[Point],
    options: argparse.Namespace,
    prepare: Callable[[Point], Awaitable[None]] = ready,
) -> list[Measured]:
    """Measure the calibration and other points in turns; returns all measurements, in their order.

    Args:
        prepare: is awaited before a point is measured.
    """
    every, source = [*calibration(options.max_tokens), *points], random.Random(f"{options.seed} order")
    in_order = []
    for _ in range(options.rounds):
        for point in source.sample(every, len(every)):
            await prepare(point)
            in_order.append(await engine.measure(point))
    return in_order


def calibration(max_tokens: float = math.inf) -> list[Point]:
    """Return the points of the calibration with at most so many tokens of prompts."""
    return [Point(*each) for each in CALIBRATION if each[0] * each[1] <= max_tokens]


def learn(
    in_order: Sequence[Measured], num_stages: int, sizes: ModelSizes
) -> tuple[Calibrated, list[Measured]]:
    """Return what is learnt from the points of the calibration, and the means of the other points."""
    means = means_of(in_order)
    fixed = [point for point in calibration() if point in means]
    calibrated = Calibrated.of([means[point] for point in fixed], num_stages, sizes)
    return calibrated, [own for point, own in means.items() if point not in fixed]


def print_errors(record: Record, in_order: Sequence[Measured], model: str) -> list[Errors]:
    """Print a row for each point of a record, by its steadied measurements; returns their errors."""
    sizes = read_sizes(ModelConfig(model=model))
    calibrated, drawn = learn(in_order, record.pp, sizes)
    errors = []
    for measured in drawn:
        predicted = calibrated.predict(measured.point, measured.context, sizes)
        errors.append(errors_of(measured, predicted))
        print(row([record.label, f"{record.pp}x{record.tp}"], measured, predicted), flush=True)
    return errors


def errors_of(measured: Measured, predicted: Prediction) -> Errors:
    """Return the relative errors of the time per token and of the first token, and that of the bubble."""
    return (
        predicted.time_per_token_s / measured.time_per_token_s - 1,
        predicted.ttft_s / measured.ttft_s - 1,
        predicted.bubble - measured.bubble,
    )


def difference_of(rounds: Sequence[Measured]) -> Errors:
    """Return by how much two measurements of a point are expected to differ, times as shares of their means.

    Each is the mean of as many rounds as were made. If rounds are normally distributed with a standard
    deviation s, the means of n differ by 2 s / sqrt(pi n).

    Args:
        rounds: at least two.
    """
    times = [each.time_per_token_s for each in rounds]
    firsts = [each.ttft_s for each in rounds]
    factor = 2 / math.sqrt(math.pi * len(rounds))
    return (
        factor * statistics.stdev(times) / statistics.mean(times),
        factor * statistics.stdev(firsts) / statistics.mean(firsts),
        factor * statistics.stdev(each.bubble for each in rounds),
    )


def row(labels: Sequence[str], measured: Measured, predicted: Prediction) -> str:
    """Return a row of the table; each cell has what was measured, and then what was predicted."""
    cells = (
        *labels,
        f"{measured.point.concurrency}",
        f"{measured.point.prompt}",
        f"{1e3 * measured.time_per_token_s:.3f} / {1e3 * predicted.time_per_token_s:.3f}",
        f"{1e3 * measured.ttft_s:.2f} / {1e3 * predicted.ttft_s:.2f}",
        f"{100 * measured.bubble:.1f} / {100 * predicted.bubble:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def mean_errors(errors: Sequence[Errors]) -> str:
    """The mean absolute errors, in words."""
    token, first, bubble = (100 * statistics.mean(map(abs, column)) for column in zip(*errors, strict=True))
    return f"time per token {token:.1f} %, first token {first:.1f} %, bubble {bubble:.1f} points"


def records(options: argparse.Namespace, models: Mapping[str, str]) -> Iterator[Record]:
    """Yield what was recorded, or else what is measured now; the latter is recorded if that is asked for."""
    if options.recorded:
        for line in Path(options.recorded).read_bytes().splitlines():
            yield msgspec.json.decode(line, type=Record)
        return
    for label in options.models.split(","):
        for layout in options.layouts.split(","):
            pp, tp = map(int, layout.split("x"))
            record = asyncio.run(measure_layout(label, models[label], pp, tp, options))
            if options.record:
                with Path(options.record).open("ab") as file:
                    file.write(msgspec.json.encode(record) + b"\n")
            yield record


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layouts", default=LAYOUTS, help="stages x ranks of each")
    parser.add_argument("--points", type=int, default=6, help="of each model and layout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="in which all points are measured once")
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--max-tokens", type=int, default=16384, help="of all prompts of a point together")
    parser.add_argument("--record", default="", help="a file to which what was measured is added")
    parser.add_argument("--recorded", default="", help="such a file, which is predicted anew")
    options = parser.parse_args()
    print("| model | layout | at once | prompt | ms per token | first token, ms | bubble, % |")
    print("|---|---|---|---|---|---|---|", flush=True)
    of_models: dict[str, list[Errors]] = {}
    differences: dict[str, list[Errors]] = {}
    with tempfile.TemporaryDirectory(prefix="plan-accuracy-") as scratch:
        half_b = Path(scratch, "0.5B")
        if "0.5B" in options.models:
            make_checkpoint(half_b, FULL_SHAPE)
        models = {"demo": "demo", "0.5B": str(half_b)}
        for record in records(options, models):
            in_order = steadied(record.in_order)
            of_models.setdefault(record.label, []).extend(
                print_errors(record, in_order, models[record.label])
            )
            of_points = rounds_of(in_order).values()
            differences.setdefault(record.label, []).extend(
                difference_of(rounds) for rounds in of_points if len(rounds) > 1
            )
    print()
    for label, errors in of_models.items():
        print(f"{label}: mean absolute errors over {len(errors)} points: {mean_errors(errors)}")
        if own := differences[label]:
            print(f"{label}: two measurements of one point differ by: {mean_errors(own)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
