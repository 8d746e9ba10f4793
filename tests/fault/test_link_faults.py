"""Links that lose, repeat, exchange, change and hold up frames, close and throw, under load (R14, d1, d4).

Whatever happens, every wait ends, every request gets the tokens of an undisturbed run or ends with a typed
error after a right beginning, the pipe works again, and nothing is left. A run that fails says its seed; the
faults follow from it.
"""

from __future__ import annotations

import gc
import random
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from checkpoints import make_checkpoint
from depth import sampled, soaked
from faulty_links import Faults, Kind, is_plan
from faulty_pipe import TYPED, Chains, FaultyPipe, check_told
from penstock.batch import ScheduledBatch, decode_to_rank, encode, plan_digest
from penstock.pipeline.decision_log import DecisionLog
from penstock.pipeline.links.channel import MessageChannel
from penstock.process.child import ChildFailed
from penstock.process.config import RankConfig
from penstock.rank import rank as rank_module
from penstock.rank.loading import LoadedRank, load_rank
from penstock.rank.rank import RankConnections
from penstock.request import SamplingParams
from penstock.residency import MISMATCH, Residency
from rank_configs import make_rank_configs

WAIT_S = 0.06  # of every wait at a link; long enough for a step, short enough for many lost frames
ALIVE = 6  # requests at any time, of which four have a row
RATE = 1 / 40  # of frames, over the number of stages: three or four in a step of each
Layout = tuple[int, str, int, int]  # stages, carrier of the hidden states, async depth, plans on a wire
LAYOUTS: list[Layout] = [
    (2, "memory", 0, 0),
    (3, "shared memory", 1, 0),
    (3, "memory", 0, 0),
    (2, "shared memory", 1, 0),
    (2, "memory", 1, 5),
    (3, "shared memory", 0, 4),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, tied=True)


@pytest.fixture(autouse=True)
def weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that starts again takes the weights that it had: reading them is not what is tested here."""
    loaded: dict[tuple[int, int], LoadedRank] = {}

    def load(config: RankConfig, progress: object) -> LoadedRank:
        key = (config.num_stages, config.stage)
        if key not in loaded:
            loaded[key] = load_rank(config, lambda done, total: None)
        return loaded[key]

    monkeypatch.setattr(rank_module, "load_rank", load)


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> Chains:
    made = Chains()
    monkeypatch.setattr(rank_module, "DecisionLog", made.log_class())
    return made


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    threads, descriptors = set(threading.enumerate()), num_descriptors()
    yield
    if num_descriptors() > descriptors:
        gc.collect()  # rings and views of their frames hold each other
    assert set(threading.enumerate()) <= threads
    assert num_descriptors() <= descriptors


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of all lengths, greedy and seeded."""
    chosen = random.Random(5)
    requests = []
    for index in range(12):
        prompt = [chosen.randrange(3, 96) for _ in range(chosen.choice([1, 3, 9, 17, 40]))]
        params = SamplingParams(
            temperature=float(index % 2),
            seed=index,
            max_tokens=chosen.randint(3, 14),
            ignore_eos=index % 3 > 0,
        )
        requests.append((prompt, params))
    return requests


REQUESTS = workload()


def configs(model: Path, layout: Layout, wait_timeout_s: float = WAIT_S) -> list[RankConfig]:
    num_stages, _, async_depth, wire_plans = layout
    depth = num_stages + async_depth + wire_plans
    return make_rank_configs(model, num_stages, async_depth, depth=depth, wait_timeout_s=wait_timeout_s)


@pytest.fixture(scope="module")
def golden(model: Path) -> list[list[int]]:
    """What each request yields while nobody disturbs it."""
    pipe = FaultyPipe(make_rank_configs(model, 1), Faults(0, 0.0), Chains())
    for index, (prompt, params) in enumerate(REQUESTS):
        pipe.add(str(index), prompt, params)
    pipe.run_until_idle()
    pipe.close()
    return [pipe.tokens(str(index)) for index in range(len(REQUESTS))]


class Load:
    """Requests one after the other, and what became of them."""

    def __init__(self, pipe: FaultyPipe, expected: Sequence[Sequence[int]]) -> None:
        self.num_good = self.num_failed = 0
        self._pipe = pipe
        self._expected = expected
        self._alive: dict[str, int] = {}
        self._count = 0

    def step(self, *, refill: bool = True) -> None:
        while refill and len(self._alive) < ALIVE:
            name, index = f"request-{self._count}", self._count % len(REQUESTS)
            self._pipe.add(name, *REQUESTS[index])
            self._alive[name] = index
            self._count += 1
        self._pipe.step()
        for name in list(self._alive):
            self._check(name)

    def _check(self, name: str) -> None:
        expected = self._expected[self._alive[name]]
        found, end = self._pipe.tokens(name), self._pipe.end_of(name)
        assert found == expected[: len(found)], f"{name} has wrong tokens"
        if end is None:
            return
        del self._alive[name]
        self._pipe.updates.pop(name)
        if end.finish_reason == "error":
            self.num_failed += 1
            assert end.error is not None
            assert end.error.code == "quarantined", end
        else:
            self.num_good += 1
            assert found == expected

    def finish(self) -> None:
        """No more requests: step until all have ended and the pipe is idle."""
        while self._alive:
            self.step(refill=False)
        self._pipe.run_until_idle()


def run_under_faults(
    model: Path, golden: list[list[int]], chains: Chains, *, seed: int, num_faults: int, layout: Layout
) -> None:
    num_stages, carrier, async_depth, wire_plans = layout
    faults = Faults(seed, RATE / num_stages, limit=num_faults)
    pipe = FaultyPipe(
        configs(model, layout),
        faults,
        chains,
        carrier=carrier,
        async_depth=async_depth,
        wire_plans=wire_plans,
    )
    load = Load(pipe, golden)
    try:
        while not faults.is_over:
            load.step()
        load.finish()
        chains.check()
        for told in pipe.ranks.told:
            check_told(told)
        assert {loss.kind for loss in pipe.losses} <= TYPED
        assert pipe.allocator.num_free_blocks == pipe.allocator.num_blocks
        assert load.num_good > num_faults / 10, "hardly any request came through"
        assert {fault.kind for fault in faults.happened} == set(Kind)
    except BaseException as error:
        error.add_note(f"layout {layout}, {faults}")
        raise
    finally:
        pipe.close()


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS[:1], *soaked(*LAYOUTS[1:])],
    ids=str,
)
def test_r14_d1_a_hundred_faults_under_load(
    model: Path, golden: list[list[int]], chains: Chains, layout: Layout
) -> None:
    run_under_faults(model, golden, chains, seed=14, num_faults=100, layout=layout)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_r14_d1_ten_thousand_faults_under_load(
    model: Path, golden: list[list[int]], chains: Chains, layout: Layout, seed: int
) -> None:
    run_under_faults(model, golden, chains, seed=seed, num_faults=1250, layout=layout)


@pytest.mark.parametrize("layout", sampled(LAYOUTS, 3), ids=str)
def test_r14_whatever_is_delayed_all_stages_have_one_history(
    model: Path, golden: list[list[int]], chains: Chains, layout: Layout
) -> None:
    num_stages, carrier, async_depth, wire_plans = layout
    faults = Faults(3, 0.4, kinds=[Kind.DELAY], limit=600)
    patient = configs(model, layout, 30.0)
    pipe = FaultyPipe(
        patient, faults, chains, carrier=carrier, async_depth=async_depth, wire_plans=wire_plans
    )
    load = Load(pipe, golden)
    most = 0
    while not faults.is_over:
        load.step()
        most = max(most, pipe.core.num_inflight)
        chains.check()
    load.finish()
    pipe.close()
    chains.check()
    assert {len(digests) for digests in chains.of_ranks.values()} == {num_stages}
    assert chains.of_ranks.keys() == chains.of_core.keys()
    assert (load.num_failed, pipe.losses, pipe.ranks.told) == (0, [], [])
    assert most > num_stages + async_depth or not wire_plans, "as many as on one host"


class DivergingChannel:
    """Brings another plan than the core's in one step of the first epoch.

    Args:
        is_sealed: the other plan is sealed as the core would have done it, so that its receiver cannot tell.
    """

    def __init__(self, inner: MessageChannel, step_id: int, *, is_sealed: bool) -> None:
        self._inner = inner
        self._step_id = step_id
        self._is_sealed = is_sealed
        self._before = DecisionLog().digest
        self.send, self.close = inner.send, inner.close

    def recv(self, timeout_s: float | None) -> bytes | None:
        frame = self._inner.recv(timeout_s)
        if frame is None or not is_plan(frame):
            return frame
        plan = decode_to_rank(frame)
        assert isinstance(plan, ScheduledBatch)
        if plan.step_id == self._step_id:
            meta = msgspec.structs.replace(plan.meta, held=not plan.meta.held)
            changed = msgspec.structs.replace(plan, meta=meta, digest=0)
            digest = plan_digest(changed, self._before) if self._is_sealed else plan.digest
            frame = encode(msgspec.structs.replace(changed, digest=digest))
        self._before = plan.digest
        return frame


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize(("num_stages", "diverging"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_r14_who_diverges_is_caught_in_that_very_step(
    model: Path, golden: list[list[int]], chains: Chains, num_stages: int, diverging: int, is_sealed: bool
) -> None:
    step_id = 11

    def wrap(epoch: int, stage: int, ends: RankConnections) -> RankConnections:
        if (epoch, stage) != (0, diverging):
            return ends
        return replace(ends, plans=DivergingChannel(ends.plans, step_id, is_sealed=is_sealed))

    pipe = FaultyPipe(make_rank_configs(model, num_stages), Faults(0, 0.0), chains, wrap=wrap)
    load = Load(pipe, golden)
    while not pipe.losses:
        load.step()
    load.finish()
    pipe.close()
    assert load.num_failed == 0
    assert len(pipe.losses) == 1
    errors = [*pipe.losses, *(told.error for told in pipe.ranks.told)]
    says_so = rf"step {step_id}\b.*digest.*Requests of the step: request-\d"
    (caught,) = [e for e in errors if e.kind == "ProtocolError" and re.search(says_so, e.message)]
    # A later stage has a frame to compare with; the first is found out by the second, or by the core.
    assert caught.stage == (diverging or min(1, num_stages - 1) if is_sealed else diverging)
    histories = {step: set(digests) for step, digests in chains.of_ranks.items() if step[1] < step_id}
    assert all(digests == {chains.of_core[step]} for step, digests in histories.items())


class ForgetfulResidency(Residency):
    """Of one stage, in the first epoch: forgets a token of every row before step 11."""

    def __init__(self, block_size: int, forgetful: int) -> None:
        super().__init__(block_size)
        self._forgetful = forgetful

    def replay(self, plan: ScheduledBatch) -> None:
        is_meant = threading.current_thread().name.startswith(f"stage {self._forgetful} ")
        if is_meant and (plan.epoch, plan.step_id) == (0, 11):
            for resident in self.rows.values():
                self.reach(resident, resident.length - 1)
        super().replay(plan)


@pytest.mark.parametrize(("num_stages", "forgetful"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_h15_a_stage_that_believes_something_else_says_what_and_everything_goes_on(
    model: Path,
    golden: list[list[int]],
    chains: Chains,
    monkeypatch: pytest.MonkeyPatch,
    num_stages: int,
    forgetful: int,
) -> None:
    """The plans are all as they should be."""
    monkeypatch.setattr(rank_module, "Residency", lambda size: ForgetfulResidency(size, forgetful))
    pipe = FaultyPipe(make_rank_configs(model, num_stages), Faults(0, 0.0), chains)
    load = Load(pipe, golden)
    while not pipe.losses:
        load.step()
    load.finish()
    pipe.close()
    assert (load.num_failed, len(pipe.losses)) == (0, 1)
    (error,) = [told.error for told in pipe.ranks.told if isinstance(told, ChildFailed)]
    assert (error.kind, error.code, error.stage) == ("ProtocolError", MISMATCH, forgetful)
    found = re.fullmatch(
        r"step 11: row \d of request 'request-\d+' starts at a wrong position: the core has planned (\d+) "
        r"tokens of it, this stage has (\d+)\. Residency of the core (0x\w{16}), of this stage 0x\w{16}\.",
        error.message,
    )
    assert found, error.message
    assert int(found[1]) == int(found[2]) + 1
    assert pipe.losses[0].message.startswith(f"stage {forgetful} is lost: {error.message}")


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_r4_s2_a_tied_head_that_comes_down_the_pipe_does_so_in_every_epoch(
    model: Path,
    golden: list[list[int]],
    chains: Chains,
    monkeypatch: pytest.MonkeyPatch,
    num_stages: int,
    kernels: str,
) -> None:
    """Whichever stage has started anew, and has no head or nobody to send it to."""
    monkeypatch.setattr(rank_module, "load_rank", load_rank)
    ranks = make_rank_configs(model, num_stages, tied_head="transfer", kernels=kernels)
    faults = Faults(1, 0.05, kinds=[Kind.THROW], limit=6)
    pipe = FaultyPipe(ranks, faults, chains)
    load = Load(pipe, golden)
    while not faults.is_over:
        load.step()
    load.finish()
    pipe.close()
    assert {told.error.stage for told in pipe.ranks.told if isinstance(told, ChildFailed)} >= {
        0,
        num_stages - 1,
    }
    assert load.num_good > 0
