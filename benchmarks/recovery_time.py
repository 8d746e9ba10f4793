"""How long running requests pause when a stage or the core is killed [R3], with the same tokens [R4].

    python benchmarks/recovery_time.py [MODEL] [--stages 2] [--requests 8] [--rounds 5] [--spare]

An engine of several processes decodes some requests; in the middle a stage or the core is killed, each in
turn. The pause is the longest time without a token of any request after the kill; what was on its way
still comes. It should be at most 3 s longer than the first start, from nothing to ready. With `--spare` a
stage is killed only once a spare process waits; then it should be at most 1.2 s, and what the first load of
the weights has taken. All ids are compared with those of an undisturbed run. Prints Markdown for
docs/perf-log.md; exit code 1 if the bar is missed or an id differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator

import psutil
from observed import run_observed
from peers.report import format_samples, markdown

from penstock import LLM, SamplingParams
from penstock.request import GenerationRequest, RequestUpdate

BAR_S, SPARE_BAR_S = 3.0, 1.2
LOOK_S = 1.5  # between two looks at a process; one that says that it lives does next to nothing in it
OUTPUT, KILL_AFTER = 192, 32  # tokens of a request

Ids = dict[str, list[int]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spare", action="store_true")
    parser.add_argument("--load-seconds", type=float, default=0.0, help="of a stage's weights, with --spare")
    options = parser.parse_args()
    began = time.perf_counter()
    with LLM(options.model, pipeline_parallel_size=options.stages, threads_per_rank=1) as llm:
        start_s = time.perf_counter() - began
        golden, _ = decode(llm, options.requests, None)
        victims = [*(f"stage {stage}" for stage in range(options.stages)), "core"]
        pauses: dict[str, list[float]] = {victim: [] for victim in victims}
        same = True
        for _ in range(options.rounds):
            for victim, found in pauses.items():
                if options.spare and victim != "core":
                    await_spare()
                ids, pause_s = decode(llm, options.requests, victim)
                same &= ids == golden
                found.append(pause_s)
    bar_s = SPARE_BAR_S + options.load_seconds if options.spare else start_s + BAR_S
    fine = same and max(map(statistics.median, pauses.values())) <= bar_s
    print(f"first start {start_s:.1f} s; ids {'are the same' if same else 'DIFFER'}\n")
    print(markdown(["killed", "pause, s"], [[victim, format_samples(p)] for victim, p in pauses.items()]))
    print(f"\nbar: {bar_s:.1f} s: {'met' if fine else 'missed'}")
    return 0 if fine else 1


def decode(llm: LLM, num_requests: int, victim: str | None) -> tuple[Ids, float]:
    """Ids of all requests, and the longest time without one after the kill, in seconds."""
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    ids: Ids = {str(number): [] for number in range(num_requests)}
    requests = [
        GenerationRequest(request_id=name, prompt_token_ids=[5 + number] * 16, sampling=sampling)
        for number, name in enumerate(ids)
    ]
    pause_s, before, is_killed = 0.0, 0.0, False

    def observe(update: RequestUpdate) -> None:
        nonlocal pause_s, before, is_killed
        ids[update.request_id] += update.token_ids
        now = time.perf_counter()
        if is_killed:
            pause_s, before = max(pause_s, now - before), now
        elif victim is not None and min(map(len, ids.values())) >= KILL_AFTER:
            named(victim).kill()
            is_killed, before = True, now

    run_observed(llm, requests, observe)
    return ids, pause_s


def await_spare() -> None:
    """Wait until a process waits for a stage that is lost: it has done what it does, and sleeps."""
    used_s = -1.0
    while True:
        spare = next((process for process in children() if process.cmdline()[0] == "penstock spare"), None)
        before_s, used_s = used_s, -1.0 if spare is None else sum(spare.cpu_times()[:2])
        if spare is not None and used_s == before_s:
            return
        time.sleep(LOOK_S)


def named(victim: str) -> psutil.Process:
    return next(p for p in children() if p.cmdline()[0].startswith(f"penstock {victim}"))


def children() -> Iterator[psutil.Process]:
    for process in psutil.Process().children(recursive=True):
        if process.status() != psutil.STATUS_ZOMBIE and process.cmdline():
            yield process


if __name__ == "__main__":
    sys.exit(main())
