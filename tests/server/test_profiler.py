"""Profiles on request: begun and ended once, bounded in every way, and written where they belong."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine, Status, stats
from fakes import FakeClock
from live_server import LiveServer
from penstock.batch import StageSpans
from penstock.config.limits import Limits
from penstock.config.server import ServerConfig
from penstock.errors import InvalidRequestError, PenstockError, UnavailableError, WaitTimeoutError
from penstock.operations import Operation, OperationDone, StartProfile, StopProfile
from penstock.process.endpoints import Restarts
from penstock.server.routes.profile_folder import ProfileFolder
from penstock.server.routes.profiler import POLL_S, Profiler
from penstock.trace.phases import Phase

AS_ADMIN = {"Authorization": "Bearer an-admin"}
NAME = re.compile(r"profile-20010909-014640-[0-9a-f]{8}\.json")


class SteppingEngine(FakeEngine):
    """Two stages that run a step each 100 ms of a fake clock, and tell each second."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(state=Status(stats=stats()))
        self.clock = clock
        self.began = clock()
        self.late_ns = 0  # that stage 1 is behind with its reports
        self.trace_error: PenstockError | None = None
        self.num_traces = 0

    @property
    def step(self) -> int:
        return round((self.clock() - self.began) * 10)

    async def operate(self, operation: Operation, timeout_s: float) -> list[OperationDone]:
        await super().operate(operation, timeout_s)
        return [OperationDone(accepted_step=self.step, completed_step=self.step)]

    async def trace(self) -> list[StageSpans]:
        self.num_traces += 1
        if self.trace_error is not None:
            raise self.trace_error
        first = max(0, self.step - 100)
        return [self.report(stage, step) for stage in (0, 1) for step in range(first, self.step + 1)]

    def report(self, stage: int, step: int) -> StageSpans:
        return StageSpans(
            stage=stage,
            began_ns=step * 10**8,
            phases=bytes([Phase.FORWARD]),
            durations_ns=[10**8],
            steps=[(0, step, 1)],
        )


class Rig:
    def __init__(self, path: Path | None, **limits: Any) -> None:
        self.clock = FakeClock()
        self.engine = SteppingEngine(self.clock)
        self.path = path
        folder = ProfileFolder(
            None if path is None else str(path),
            limits.get("max_profiles", 16),
            now=lambda: time.gmtime(1_000_000_000),
        )
        bounds = Limits(**{"max_profile_s": 1e6, **limits})
        self.profiler = Profiler(
            self.engine, folder, bounds, num_stages=2, clock=self.clock, sleep=self.sleep
        )
        self.on_sleep: Callable[[float], None] = lambda seconds: None

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.clock.advance(seconds)
        self.on_sleep(seconds)

    async def turn(self, count: int = 200) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("it never came")

    async def until_ended(self) -> None:
        """The one that nobody stops has been written."""
        await self.until(lambda: self.profiler._ended is not None)

    def files(self) -> list[str]:
        assert self.path is not None
        return sorted(entry.name for entry in self.path.iterdir())

    def slices(self, name: str) -> dict[int, list[int]]:
        """Steps in a file, by stage."""
        assert self.path is not None
        trace = json.loads((self.path / name).read_text())
        steps: dict[int, list[int]] = {}
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                steps.setdefault(event["pid"], []).append(event["args"]["step"])
        return steps


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 20))


def test_g4_a_profile_has_the_steps_between_its_two_operations(tmp_path: Path) -> None:
    async def body() -> None:
        rig = Rig(tmp_path)
        rig.clock.advance(3.0)
        started = await rig.profiler.start(5.0)
        begin = started.replicas[0].accepted_step
        await rig.until(lambda: rig.clock() >= rig.engine.began + 25.0)  # longer than the core keeps spans
        stopped = await rig.profiler.stop(7.0)
        assert rig.engine.operations == [(StartProfile(), 5.0), (StopProfile(), 7.0)]
        assert stopped.stopped is not None
        end = stopped.stopped[0].accepted_step
        assert end - begin > 200
        assert (stopped.ended_by, stopped.complete) == ("stop", True)
        assert rig.files() == [stopped.file]
        assert NAME.fullmatch(stopped.file)
        assert rig.slices(stopped.file) == {0: [*range(begin, end)], 1: [*range(begin, end)]}
        assert (tmp_path / stopped.file).stat().st_size == stopped.bytes
        assert (tmp_path / stopped.file).stat().st_mode & 0o777 == 0o600
        assert "stage 1" in stopped.bubbles[1]
        with pytest.raises(InvalidRequestError) as raised:
            await rig.profiler.stop(1.0)
        assert raised.value.code == "no_profile"

    run(body())


def test_g4_a_profile_that_nobody_stops_ends_by_itself_and_waits(tmp_path: Path) -> None:
    async def body() -> None:
        rig = Rig(tmp_path, max_profile_s=9.0)
        await rig.profiler.start(5.0)
        await rig.until_ended()
        (name,) = rig.files()
        stopped = await rig.profiler.stop(1.0)
        assert (stopped.file, stopped.ended_by, stopped.complete) == (name, "time", True)
        assert 9.0 <= stopped.seconds < 9.0 + POLL_S
        assert [operation for operation, _ in rig.engine.operations] == [StartProfile(), StopProfile()]
        num_traces = rig.engine.num_traces
        await rig.turn()
        assert rig.engine.num_traces == num_traces, "nothing goes on"
        with pytest.raises(InvalidRequestError):
            await rig.profiler.stop(1.0)

    run(body())


def test_g4_a_profile_is_bounded_in_bytes(tmp_path: Path) -> None:
    async def body() -> None:
        rig = Rig(tmp_path, max_profile_s=1e6, max_profile_bytes=1 << 20)
        await rig.profiler.start(5.0)
        await rig.until_ended()
        stopped = await rig.profiler.stop(1.0)
        assert stopped.ended_by == "size"
        assert 500_000 < stopped.bytes <= 1 << 20

    run(body())


@pytest.mark.parametrize("how", ["restarted", "away"])
def test_g4_a_lost_core_ends_a_profile_with_what_there_is(tmp_path: Path, how: str) -> None:
    """The next core counts its steps anew: nothing of it may get into the file."""

    async def body() -> None:
        rig = Rig(tmp_path)

        def lose(_: float) -> None:
            if rig.clock() >= rig.engine.began + 7.0:
                if how == "away":
                    rig.engine.trace_error = UnavailableError("the engine core went away.")
                else:
                    rig.engine.state = Status(stats=stats(restarts=Restarts(core=1)))

        rig.on_sleep = lose
        await rig.profiler.start(5.0)
        await rig.until_ended()
        stopped = await rig.profiler.stop(1.0)
        assert (stopped.ended_by, stopped.complete, stopped.stopped) == ("core_lost", False, None)
        assert rig.slices(stopped.file)[0] == [*range(61)]

    run(body())


def test_g4_whoever_stops_it_right_after_a_core_was_lost_gets_what_there_is(tmp_path: Path) -> None:
    async def body() -> None:
        rig = Rig(tmp_path)
        await rig.profiler.start(5.0)
        await rig.until(lambda: rig.engine.num_traces >= 3)
        rig.engine.state = Status(stats=stats(restarts=Restarts(core=1)))
        stopped = await rig.profiler.stop(1.0)
        assert (stopped.ended_by, stopped.complete, stopped.stopped) == ("core_lost", False, None)
        assert rig.engine.operations == [(StartProfile(), 5.0)], "the next core knows of none"
        assert len(rig.slices(stopped.file)[1]) > 40

    run(body())


def test_a_lost_stage_is_said(tmp_path: Path) -> None:
    async def body() -> None:
        rig = Rig(tmp_path)
        await rig.profiler.start(5.0)
        rig.engine.state = Status(stats=stats(epoch=1))
        assert not (await rig.profiler.stop(1.0)).complete

    run(body())


@pytest.mark.parametrize(
    ("lost", "complete"), [({"epoch": 1}, False), ({"epoch": 1, "restarts": Restarts(core=1)}, True)], ids=str
)
def test_g4_a_loss_while_it_begins_leaves_out_what_a_stage_had_done_and_nothing_of_another_core(
    tmp_path: Path, lost: dict[str, Any], complete: bool
) -> None:
    async def body() -> None:
        rig = Rig(tmp_path)
        operate = rig.engine.operate

        async def operate_and_lose(operation: Operation, timeout_s: float) -> list[OperationDone]:
            done = await operate(operation, timeout_s)
            rig.engine.state = Status(stats=stats(**lost))
            return done

        rig.engine.operate = operate_and_lose  # type: ignore[method-assign]
        await rig.profiler.start(5.0)
        assert (await rig.profiler.stop(1.0)).complete is complete

    run(body())


def test_a_trace_that_is_late_ends_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        rig = Rig(tmp_path)
        await rig.profiler.start(5.0)
        rig.engine.trace_error = WaitTimeoutError("no trace in 10 s.")
        await rig.until(lambda: rig.engine.num_traces >= 3)
        rig.engine.trace_error = None
        assert (await rig.profiler.stop(1.0)).complete

    run(body())


def test_g4_an_end_that_not_all_ranks_reach_leaves_it_running(tmp_path: Path) -> None:
    async def body() -> None:
        rig = Rig(tmp_path)
        await rig.profiler.start(5.0)
        rig.engine.failure = WaitTimeoutError("the operation is not complete after 1 s.")
        with pytest.raises(WaitTimeoutError):
            await rig.profiler.stop(1.0)
        assert rig.files() == []
        rig.engine.failure = None
        assert (await rig.profiler.stop(1.0)).ended_by == "stop"

    run(body())


def test_one_profile_at_a_time_and_none_where_it_did_not_begin(tmp_path: Path) -> None:
    async def body() -> None:
        rig = Rig(tmp_path)
        rig.engine.failure = WaitTimeoutError("the operation is not complete after 1 s.")
        with pytest.raises(WaitTimeoutError):
            await rig.profiler.start(1.0)
        rig.engine.failure = None
        found = await asyncio.gather(*(rig.profiler.start(1.0) for _ in range(3)), return_exceptions=True)
        refused = [one for one in found if isinstance(one, InvalidRequestError)]
        assert [error.code for error in refused] == ["profile_running"] * 2
        both = await asyncio.gather(rig.profiler.stop(1.0), rig.profiler.stop(1.0), return_exceptions=True)
        assert sum(isinstance(one, InvalidRequestError) for one in both) == 1
        assert len(rig.files()) == 1

    run(body())


def test_rule_8_the_directory_is_bounded_and_must_be_there(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "notes.json").touch()
        for number in range(2):
            (tmp_path / f"profile-20200101-000000-0000000{number}.json").touch()
        rig = Rig(tmp_path, max_profiles=2)
        with pytest.raises(PenstockError) as raised:
            await rig.profiler.start(1.0)
        assert (raised.value.code, raised.value.http_status) == ("too_many_profiles", 429)
        assert rig.engine.operations == []
        for path, code in ((None, "no_profile_dir"), (tmp_path / "gone", "profile_not_written")):
            with pytest.raises(PenstockError) as raised:
                await Rig(path).profiler.start(1.0)
            assert raised.value.code == code
            assert "--profile-dir" in str(raised.value)

    run(body())


def test_nothing_is_left_of_a_profile_that_cannot_be_written(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * 100
        raise OSError(28, "No space left on device")

    with pytest.raises(UnavailableError, match="No space left"):
        ProfileFolder(str(tmp_path), 16).write(pieces())
    assert [*tmp_path.iterdir()] == []

    async def body() -> None:
        rig = Rig(tmp_path / "profiles")
        assert rig.path is not None
        rig.path.mkdir()
        await rig.profiler.start(1.0)
        rig.path.rmdir()
        with pytest.raises(UnavailableError):
            await rig.profiler.stop(1.0)
        rig.path.mkdir()
        await rig.profiler.start(1.0)
        assert (await rig.profiler.stop(1.0)).complete, "the next one is as good as any"

    run(body())


def test_g4_profiles_over_http(tmp_path: Path) -> None:
    config = ServerConfig(admin_keys=["an-admin"], profile_dir=str(tmp_path))
    with LiveServer(FakeEngine(), config=config) as server:
        assert server.request("POST", "/start_profile")[0].status == 401
        response, _ = server.request("POST", "/start_profile?name=../../x&timeout_s=3", None, AS_ADMIN)
        assert response.status == 400, "nobody but the server names the file"
        response, raw = server.request("POST", "/start_profile?timeout_s=3", None, AS_ADMIN)
        assert response.status == 200
        assert json.loads(raw)["max_seconds"] == 60.0
        assert server.request("POST", "/start_profile", None, AS_ADMIN)[0].status == 400
        # Nothing runs between two operations at the same step.
        server.engine.spans = [SteppingEngine(FakeClock()).report(0, 5)]
        response, raw = server.request("POST", "/stop_profile", None, AS_ADMIN)
        assert response.status == 200
        answer = json.loads(raw)
        assert [entry.name for entry in tmp_path.iterdir()] == [answer["file"]]
        assert (answer["complete"], answer["bubbles"]) == (True, [])
        assert server.engine.operations == [(StartProfile(), 3.0), (StopProfile(), 60.0)]
        assert server.request("POST", "/stop_profile", None, AS_ADMIN)[0].status == 400


def test_without_a_directory_profiles_are_refused_with_the_remedy() -> None:
    with LiveServer(config=ServerConfig(admin_keys=["an-admin"])) as server:
        response, raw = server.request("POST", "/start_profile", None, AS_ADMIN)
        assert response.status == 400
        error = json.loads(raw)["error"]
        assert error["code"] == "no_profile_dir"
        assert "--profile-dir" in error["message"]
        assert server.engine.operations == []
