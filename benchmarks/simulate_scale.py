"""How long simulations of many stages take: seconds of one core, against the bars.

    python benchmarks/simulate_scale.py --trace azure_llm_2023_conv.csv [--profile]

80 stages and 2,000 requests, and 1,000 stages and the first 1,000 requests, of a trace with 256 at once: each
in less than 60 s. Stages are A100s with a layer each of a model of Llama-3-70B's width, in hosts of eight
that are taken for one, so that no wires are measured. CPU time counts, since the machine may be shared.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers.report import markdown

from penstock.config.engine import CacheConfig, ModelConfig, SchedulerConfig
from penstock.layouts.device_text import parse_devices
from penstock.layouts.model_sizes import read_sizes
from penstock.layouts.prediction import Load
from penstock.planner.mix import Mix
from penstock.simulator.pipe import SimulatedPipe
from penstock.simulator.planned_pipe import fixed_layout, planned_pipe
from penstock.simulator.replica import EngineSettings
from penstock.simulator.report import as_json
from penstock.simulator.simulation import Simulation
from penstock.workloads.requests import from_trace
from penstock.workloads.traces import read_trace

CASES = ((80, 2000), (1000, 1000))  # stages and requests
AT_ONCE = 256
BAR_S = 60.0
MAX_LEN = 16384
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    options = parser.parse_args()
    rows, fine = [], True
    for num_stages, count in CASES:
        seconds, numbers = measure(num_stages, count, options)
        met = seconds < BAR_S
        fine &= met
        steps = numbers["replicas"][0]["steps"]
        rows.append(
            [
                str(num_stages),
                str(count),
                f"{seconds:.1f}",
                "met" if met else "missed",
                str(steps),
                f"{1e6 * seconds / steps:.0f}",
                f"{numbers['output_throughput']:.0f}",
                f"{numbers['bubble']:.1%}",
            ]
        )
    heads = [
        "stages",
        "requests",
        "CPU s",
        f"below {BAR_S:.0f} s",
        "plans",
        "us a plan",
        "tokens/s",
        "bubble",
    ]
    print(markdown(heads, rows))
    return 0 if fine else 1


def measure(num_stages: int, count: int, options: argparse.Namespace) -> tuple[float, dict[str, Any]]:
    """Seconds of CPU for a run, and its report."""
    requests = from_trace(
        read_trace(options.trace, count), length_scale=1, time_scale=0, vocab_size=32000, seed=0
    )
    scheduler = SchedulerConfig(max_num_seqs=AT_ONCE)
    simulation = Simulation(
        pipe_of(num_stages, scheduler), EngineSettings(scheduler=scheduler), max_concurrency=AT_ONCE
    )
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    began = time.process_time()
    run = simulation.run(requests)
    seconds = time.process_time() - began
    if options.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    assert all(account.is_done for account in run.accounts)
    return seconds, as_json(run)


def pipe_of(num_stages: int, scheduler: SchedulerConfig) -> SimulatedPipe:
    """A stage for each layer."""
    devices = parse_devices(f"a100-80g:{num_stages}")
    with tempfile.TemporaryDirectory(prefix="simulate-scale-") as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_stages}))
        sizes = read_sizes(ModelConfig(model=folder))
    load = Load(
        concurrency=AT_ONCE,
        mix=Mix.parse("1020:129"),
        max_model_len=MAX_LEN,
        scheduler=scheduler,
        cache=CacheConfig(),
    )
    layout = fixed_layout(devices, sizes.spec, pp=num_stages, tp=1, dp=1, expert_parallel=False)
    return planned_pipe(layout, sizes, devices, load)


if __name__ == "__main__":
    sys.exit(main())
