"""A simulated pipe of two stages beside the same pipe on this machine: throughput and bubble.

    python benchmarks/simulate_accuracy.py [--model demo] [--points 6] [--seed 0] [--rounds 3] [--window-s 2]
                                           [--max-tokens 16384]

An engine of two stages is started, calibrated and measured as in `plan_accuracy.py`: at a few fixed loads
what stages take and what lies between steps is learnt, and other loads are drawn from the seed; all are
measured in turns, while all their requests decode. Each of the others is simulated by the engine's own
scheduler over stages of the learnt times. Throughput and the bubble should be within 10 % and 10 points; a
row for each load, as Markdown. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import sys

from learnt_layout import Calibrated, steadied
from measured_loads import MAX_LEN, Engine, Measured, running, scheduler_config
from peers.report import markdown
from plan_accuracy import draw, in_rounds, learn
from trace_events import within

from penstock.config.engine import CacheConfig, ModelConfig
from penstock.layouts.model_sizes import read_sizes
from penstock.simulator.pipe import SimulatedPipe, Wire
from penstock.simulator.replica import EngineSettings
from penstock.simulator.simulation import FinishedRun, Simulation
from penstock.simulator.timeline import timeline
from penstock.trace.chrome import spans_of
from penstock.trace.phases import BUBBLES
from penstock.workloads.requests import BenchRequest

NUM_STAGES = 2
RATE_BAR, BUBBLE_BAR = 0.10, 0.10
MAX_OUTPUT = 200  # tokens of a simulated request, around the context that was measured
KEPT_PLANS = 1 << 16


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--points", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="in which all loads are measured once")
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--max-tokens", type=int, default=16384, help="of all prompts of a load together")
    return asyncio.run(compare(parser.parse_args()))


async def compare(options: argparse.Namespace) -> int:
    """Print the table; 0 if all loads are within the bars."""
    sizes = read_sizes(ModelConfig(model=options.model))
    points = draw(options.seed, "simulated", options.points, options.max_tokens)
    async with running(options.model, NUM_STAGES, 1) as llm:
        engine = Engine(llm, NUM_STAGES, sizes.spec.vocab_size, options.window_s)
        in_order = await in_rounds(engine, points, options)
    calibrated, drawn = learn(steadied(in_order), NUM_STAGES, sizes)
    rows, fine = [], True
    for measured in drawn:
        point = measured.point
        rate, bubble = simulate(measured, calibrated)
        real = point.concurrency / measured.time_per_token_s
        met = abs(rate / real - 1) <= RATE_BAR and abs(bubble - measured.bubble) <= BUBBLE_BAR
        fine &= met
        rows.append(
            [
                f"{point.concurrency} x {point.prompt}",
                f"{real:.0f}",
                f"{rate:.0f}",
                f"{rate / real - 1:+.1%}",
                f"{measured.bubble:.1%}",
                f"{bubble:.1%}",
                "yes" if met else "no",
            ]
        )
    heads = ["load", "tokens/s", "simulated", "off by", "bubble", "simulated", "within"]
    print(markdown(heads, rows))
    return 0 if fine else 1


def simulate(measured: Measured, calibrated: Calibrated) -> tuple[float, float]:
    """Tokens a second and bubble of the simulated pipe while all requests decode.

    What lies between steps depends on whether all requests are in one plan, which the scheduler decides. So a
    run with the time of such plans comes first, and counts if the scheduler makes such plans.
    """
    count = measured.point.concurrency
    run, window = run_of(measured, calibrated, calibrated.turns.seconds(count, alone=True))
    rows = collections.Counter(trip.num_tokens for trip in run.replicas[0].flow.kept()).most_common(1)[0][0]
    if rows < count:
        run, window = run_of(measured, calibrated, calibrated.turns.seconds(rows, alone=False))
    idle_ns = sum(
        span.end_ns - span.start_ns
        for span in within(spans_of(timeline(run)), *window)
        if span.phase in BUBBLES
    )
    tokens_s = [
        (account.ended_s - account.first_token_s) / (account.num_tokens - 1) for account in run.accounts
    ]
    return sum(1.0 / seconds for seconds in tokens_s), idle_ns / (NUM_STAGES * (window[1] - window[0]))


def run_of(
    measured: Measured, calibrated: Calibrated, between_s: float
) -> tuple[FinishedRun, tuple[int, int]]:
    """Simulate a load; returns the run, and nanoseconds between which all requests decode.

    Args:
        between_s: seconds from a result to the plan that needs it.
    """
    count = measured.point.concurrency
    pipeline = SimulatedPipe(
        stages=calibrated.shared,
        alone=calibrated.alone,
        return_wire=Wire(latency_s=between_s),
        num_blocks=count * MAX_LEN // 16,
        max_model_len=MAX_LEN,
        has_known_costs=True,
        spread=calibrated.spread,
    )
    output_len = min(MAX_OUTPUT, 2 * measured.context - 2)
    requests = [
        BenchRequest(
            index=index,
            arrival_s=0.0,
            prompt_token_ids=[7] * (measured.context - output_len // 2),
            output_len=output_len,
        )
        for index in range(count)
    ]
    settings = EngineSettings(
        scheduler=scheduler_config(),
        cache=CacheConfig(enable_prefix_caching=False),
        async_depth=calibrated.plans_ahead,
    )
    run = Simulation(pipeline, settings, max_kept=KEPT_PLANS).run(requests)
    began_s = max(account.first_token_s for account in run.accounts)
    ended_s = min(account.ended_s for account in run.accounts)
    return run, (round(1e9 * began_s), round(1e9 * ended_s))


if __name__ == "__main__":
    sys.exit(main())
