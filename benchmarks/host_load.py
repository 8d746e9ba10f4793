"""Load on a server of a test network, and what it brings: decode rate, busy shares, time per token, pauses.

A part of `two_hosts.py`. Decode is counted as in `cpu_peers.py`: batch * (output - 1) tokens in the time of a
run to the last token less that of a run to the first. All prompts of a run are in one request, so that the
client costs next to nothing.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from served_hosts import HostClient

IDS = range(10, 256)  # that every model of ours knows
LOOK_S = 1.0
EDGE_S = 2.0  # of a run, in which stages have told nothing of it yet

Ids = list[list[int]]


class StageSum(NamedTuple):
    """What a stage has told of its time so far, in seconds."""

    busy_s: float
    wall_s: float
    num_steps: int


class Look(NamedTuple):
    """The pipeline at an instant of `time.monotonic`."""

    at: float
    stages: dict[int, StageSum]
    in_flight: int


class PipelineWatch:
    """Looks at the pipeline while the body of a `with` runs.

    Attributes:
        looks: in order.
    """

    def __init__(self, client: HostClient) -> None:
        self.looks: list[Look] = []
        self._client = client
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PipelineWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S):
            (replica,) = self._client.get("/debug/pipeline")["replicas"]
            stages = {
                stage["stage"]: StageSum(stage["busy_s"], stage["wall_s"], stage["num_steps"])
                for stage in replica["stages"]
            }
            self.looks.append(Look(time.monotonic(), stages, replica["inflight"] or 0))


class StageUse(NamedTuple):
    """What a stage did between two looks.

    Attributes:
        busy: share of the time in which it computed; not a number where the run was too short.
        step_s: that it computed for one step.
    """

    busy: float
    step_s: float


def stage_use(looks: Sequence[Look], began: float) -> dict[int, StageUse]:
    """Return what each stage did, from the first look that is `EDGE_S` into the run to the last one."""
    inside = [look for look in looks if look.at >= began + EDGE_S]
    if len(inside) < 2:
        return {}
    first, last = inside[0].stages, inside[-1].stages
    return {stage: _use(first[stage], last[stage]) for stage in last if stage in first}


def _use(first: StageSum, last: StageSum) -> StageUse:
    wall_s, busy_s = last.wall_s - first.wall_s, last.busy_s - first.busy_s
    steps = last.num_steps - first.num_steps
    if wall_s <= 0 or steps <= 0:
        return StageUse(math.nan, math.nan)
    return StageUse(busy_s / wall_s, busy_s / steps)


class Decoded(NamedTuple):
    """What one run has brought.

    Attributes:
        token_s: between two tokens of a sequence.
        stages: what each did, where the run was long enough to see it.
        in_flight: the most plans that were seen.
    """

    tokens_per_s: float
    token_s: float
    ids: Ids
    stages: dict[int, StageUse]
    in_flight: int

    @property
    def slowest_busy(self) -> float:
        """The busy share of the stage that has the most to do; not a number where none was seen."""
        return max((use.busy for use in self.stages.values()), default=math.nan)


def decode(client: HostClient, batch: int, num_input: int, num_output: int, seed: int) -> Decoded:
    """Decode a batch of random prompts, the same for the same seed."""
    began = time.monotonic()
    client.complete(prompts(batch, num_input, 2 * seed), 1)
    first_s = time.monotonic() - began
    began = time.monotonic()
    with PipelineWatch(client) as watch:
        ids = client.complete(prompts(batch, num_input, 2 * seed + 1), num_output)
        all_s = time.monotonic() - began
    token_s = max(all_s - first_s, 1e-9) / (num_output - 1)
    in_flight = max((look.in_flight for look in watch.looks), default=0)
    return Decoded(batch / token_s, token_s, ids, stage_use(watch.looks, began), in_flight)


def prompts(batch: int, length: int, seed: int) -> Ids:
    """Return random prompts, the same for the same seed."""
    chosen = random.Random(seed)
    return [chosen.choices(IDS, k=length) for _ in range(batch)]


def median_gap_s(client: HostClient, num_input: int, num_output: int, seed: int) -> float:
    """Return the median of the seconds between two tokens of one streamed answer."""
    arrivals = client.stream(prompts(1, num_input, seed), num_output)
    came_at = [arrival.at for arrival in arrivals if arrival.ids]
    return statistics.median(later - earlier for earlier, later in pairwise(came_at))


class Paused(NamedTuple):
    """Requests in whose midst something was done.

    Attributes:
        pause_s: the longest time that one of them waited for a token from then on.
    """

    ids: Ids
    pause_s: float


def decode_disturbed(
    client: HostClient, asked: Ids, num_output: int, disturb: Callable[[], None], after: int
) -> Paused:
    """Stream the answers of prompts, and disturb the server in the midst.

    Args:
        disturb: is called, in a thread of its own, once each of them has `after` ids; what it raises is
            raised here in the end.
    """
    ids: Ids = [[] for _ in asked]
    came_at = dict.fromkeys(range(len(asked)), time.monotonic())
    disturbing: Future[None] | None = None
    pause_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        for arrival in client.stream(asked, num_output):
            ids[arrival.prompt] += arrival.ids
            if disturbing and arrival.ids:
                pause_s = max(pause_s, arrival.at - came_at[arrival.prompt])
            came_at[arrival.prompt] = arrival.at
            if not disturbing and min(map(len, ids)) >= after:
                disturbing = pool.submit(disturb)
        assert disturbing is not None, "the answers were too short to be disturbed"
        disturbing.result()
    return Paused(ids, pause_s)


def median_of(runs: Sequence[Decoded], value: Callable[[Decoded], float]) -> float:
    """Return the median over those runs whose value is a number."""
    numbers = [number for number in map(value, runs) if math.isfinite(number)]
    return statistics.median(numbers) if numbers else math.nan


def differing(of_subjects: Sequence[Decoded]) -> int:
    """Return how many sequences differ between subjects that were asked the same."""
    first = of_subjects[0].ids
    return sum(one != other for run in of_subjects[1:] for one, other in zip(first, run.ids, strict=True))


def plans_to_fill(stage_s: Mapping[int, float], ways_s: float) -> int:
    """Return how many plans keep the slowest stage busy.

    Args:
        stage_s: of one step of each stage.
        ways_s: of all hops of a plan, and of the return of what it has sampled.
    """
    return math.ceil((sum(stage_s.values()) + ways_s) / max(stage_s.values()))
