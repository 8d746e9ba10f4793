"""Times the steps of a stage that has a core for itself, without an engine, a link or neighbours.

A part of `two_hosts.py`, and the program that it starts for each stage. The program loads the layers of its
stage once and then times steps of one decode row whenever it is asked; between two steps it sleeps for as
long as the other stage would compute. A stage of a pipe with a single request has this rhythm, too: after the
sleep it finds colder caches than in a row of steps. All steps are reported, so that medians are compared with
medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from penstock.process.child import bound_thread_pools
from penstock.process.config import MeasureConfig, RankConfig

WARM_UP = 4  # steps that do not count: they find cold caches


class AskedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """What the program is asked for, as one line of JSON.

    Attributes:
        rest_s: of sleep before each step.
    """

    num_steps: int
    rest_s: float


class StageAlone:
    """A stage in a process of its own, bound to one core; idle until it is asked.

    Args:
        context: tokens that the row has behind it.
    """

    def __init__(self, rank: RankConfig, core: int, context: int) -> None:
        config = MeasureConfig(
            rank=msgspec.structs.replace(rank, cpus=(core,)),
            num_rows=[1],
            context=context,
            prefill_tokens=1,
            case_s=0.0,
        )
        command = [sys.executable, __file__, msgspec.json.encode(config).decode()]
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()  # it has loaded

    def step_s(self, num_steps: int, rest_s: float) -> float:
        """Return the median of the seconds that a step takes."""
        assert self._program.stdin is not None
        asked = AskedSteps(num_steps=num_steps, rest_s=rest_s)
        self._program.stdin.write(msgspec.json.encode(asked).decode() + "\n")
        self._program.stdin.flush()
        return statistics.median(msgspec.json.decode(self._read(), type=list[float]))

    def close(self) -> None:
        """End the process."""
        self._program.communicate(timeout=60)

    def _read(self) -> str:
        assert self._program.stdout is not None
        line = self._program.stdout.readline()
        if not line:
            raise SystemExit(f"a stage that was to be timed has ended with {self._program.wait()}")
        return line


def stages_step_s(stages: Sequence[StageAlone], num_steps: int, rests_s: Sequence[float]) -> list[float]:
    """Return what a step of each stage takes, measured one after the other.

    Args:
        rests_s: how long each rests before a step.
    """
    return [stage.step_s(num_steps, rest_s) for stage, rest_s in zip(stages, rests_s, strict=True)]


def run_program(told: str) -> None:
    """Be the program: load, say so, and answer each line until there are no more."""
    config = msgspec.json.decode(told, type=MeasureConfig)
    os.sched_setaffinity(0, set(config.rank.cpus))
    bound_thread_pools(config.rank.threads)
    # Here and not above: torch reads its environment when it is imported.
    import time

    import torch

    from penstock.planner.step_timing import TimedRank

    with torch.inference_mode():
        timed = TimedRank(config)
        print(flush=True)
        for line in sys.stdin:
            asked = msgspec.json.decode(line, type=AskedSteps)
            seconds = []
            for _ in range(WARM_UP + asked.num_steps):
                time.sleep(asked.rest_s)
                seconds.append(timed.decode_step_s())
            print(msgspec.json.encode(seconds[WARM_UP:]).decode(), flush=True)


if __name__ == "__main__":
    run_program(sys.argv[1])
