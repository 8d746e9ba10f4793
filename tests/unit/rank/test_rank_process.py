"""Ranks as real processes: shared memory, zmq, inherited descriptors; every process is reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from checkpoints import make_checkpoint
from hand_core import HandCore, Wanted, make_plan
from penstock.batch import AllocateKV
from penstock.errors import StageLostError
from penstock.executor.inprocess import InprocessExecutor
from penstock.executor.mp import MpExecutor
from penstock.families.registry import load_spec
from penstock.hosts.local_socket import LocalSocket
from penstock.kvstore.names import model_identity
from penstock.pipeline.links.frame import frame_bytes
from penstock.pipeline.links.ring_channel import create_channel_ring
from penstock.pipeline.links.ring_memory import close_handle, create_ring, end_ring
from penstock.process.child import (
    Abandoned,
    Alive,
    ChildFailed,
    LoadProgressed,
    Ready,
    StatusEvent,
    TensorsRead,
    WeightsLoaded,
    decode_status,
    encode_config,
)
from penstock.process.config import RankConfig, RankProcessConfig
from penstock.process.control import ControlSocket
from penstock.process.endpoints import CoreEndpoints, RankEndpoints, RingHandle, SocketHandle, SocketListener
from rank_configs import make_rank_configs


class Fleet:
    """Worker processes and the executor that talks to them."""

    def __init__(self, configs: Sequence[RankConfig]) -> None:
        width = load_spec(Path(configs[0].model_path)).hidden_size
        size = frame_bytes(max_num_tokens=configs[0].max_num_batched_tokens, width=width, itemsize=4)
        self._frame_bytes = size
        self.configs = list(configs)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.status_fds: list[int] = []
        self.controls: list[ControlSocket] = []
        for config in configs:
            self.spawn(RankProcessConfig(rank=config, parent_pid=os.getpid()))
        self.rings: list[RingHandle] = []
        self.executor = self.join(0)

    def join(self, epoch: int, start: AllocateKV | None = None) -> MpExecutor:
        """Tell all ranks where they meet in this epoch; the core's side of it."""
        links = [create_ring(self._frame_bytes, self.configs[0].link_frames) for _ in self.configs[1:]]
        tokens = [create_channel_ring(8, 16) for _ in links]
        results = create_channel_ring(8, 16)
        self.rings += [*links, *tokens, results]
        endpoints = [LocalSocket() for _ in self.configs]
        for stage, control in enumerate(self.controls):
            is_last = stage == len(links)
            control.send(
                RankEndpoints(
                    epoch=epoch,
                    plans=SocketHandle(handle_fd=endpoints[stage].handle_fd),
                    tokens=tokens if is_last else [tokens[stage]],
                    results=results if is_last else None,
                    incoming=links[stage - 1] if stage else None,
                    outgoing=[] if is_last else [links[stage]],
                )
            )
        plans = [SocketListener(listen_fd=os.dup(endpoint.listen_fd)) for endpoint in endpoints]
        for endpoint in endpoints:
            endpoint.close()
        own = msgspec.structs.replace(
            results,
            **{f"{name}_fd": os.dup(getattr(results, f"{name}_fd")) for name in ("memory", "data", "space")},
        )
        ends = CoreEndpoints(epoch=epoch, plans=plans, stages=list(range(len(plans))), results=own)
        self.executor = MpExecutor(ends, start, load_timeout_s=60.0)
        return self.executor

    def end_epoch(self) -> None:
        """As the supervisor and the core do when a stage is lost."""
        for ring in self.rings:
            end_ring(ring)
        self.executor.abandon()

    def spawn(self, config: RankProcessConfig, stage: int | None = None) -> None:
        """Start a rank; `stage` if it takes the place of one."""
        config_read, config_write = os.pipe()
        status_read, status_write = os.pipe()
        control = ControlSocket()
        fds = [config_read, status_write, control.child_fd]
        command = [sys.executable, "-m", "penstock.rank.process"]
        for name, fd in zip(("config", "status", "control"), fds, strict=True):
            command += [f"--{name}-fd", str(fd)]
        process = subprocess.Popen(command, pass_fds=fds)
        os.close(config_read)
        os.close(status_write)
        control.close_child_end()
        with os.fdopen(config_write, "wb") as pipe:
            pipe.write(encode_config(config))
        if stage is None:
            self.processes.append(process)
            self.status_fds.append(status_read)
            self.controls.append(control)
        else:
            self.processes[stage].wait(timeout=60)
            os.close(self.status_fds[stage])
            self.controls[stage].close()
            self.processes[stage], self.status_fds[stage] = process, status_read
            self.controls[stage] = control

    def exit_codes(self) -> list[int]:
        return [process.wait(timeout=60) for process in self.processes]

    def events(self, stage: int) -> list[StatusEvent]:
        """All that a rank has said, but for being alive; it must have ended."""
        with os.fdopen(os.dup(self.status_fds[stage]), "rb") as pipe:
            told = [decode_status(line) for line in pipe.read().splitlines()]
        return [event for event in told if not isinstance(event, Alive)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.executor.shutdown()
        for fd in self.status_fds:
            os.close(fd)
        for control in self.controls:
            control.close()
        for ring in self.rings:
            close_handle(ring)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, tied=True)


@pytest.fixture
def fleet(model: Path) -> Iterator[Fleet]:
    made = Fleet(make_rank_configs(model, 2, async_depth=1))
    yield made
    made.close()


def hand_core(num_stages: int, start: AllocateKV | None = None) -> HandCore:
    return HandCore(
        num_stages=num_stages,
        depth=num_stages + 1,
        num_rows=4,
        num_blocks=64,
        block_size=16,
        chunk=9,
        epoch=0 if start is None else start.epoch,
        first_step=0 if start is None else start.first_step,
    )


def requests() -> list[Wanted]:
    return [Wanted([(5 * i + j) % 90 for j in range(4 + 9 * i)], 10) for i in range(5)]


def test_two_processes_give_the_tokens_of_one_thread_and_leave_in_order(fleet: Fleet, model: Path) -> None:
    plan = fleet.executor.start()
    assert plan.num_blocks == 64
    titles = [Path(f"/proc/{p.pid}/cmdline").read_bytes().rstrip(b"\0") for p in fleet.processes]
    assert titles == [b"penstock stage 0 tp 0", b"penstock stage 1 tp 0"]
    found = requests()
    hand_core(2).generate(fleet.executor, found)
    fleet.executor.shutdown()
    assert fleet.exit_codes() == [0, 0]

    alone = InprocessExecutor(make_rank_configs(model, 1))
    alone.start()
    expected = requests()
    hand_core(1).generate(alone, expected)
    alone.shutdown()
    assert [request.output for request in found] == [request.output for request in expected]

    for stage, rank in enumerate(plan.ranks):
        *progress, loaded, ready = fleet.events(stage)
        digests = [event for event in progress if isinstance(event, TensorsRead)]
        progress = [event for event in progress if event not in digests]
        assert digests
        assert progress
        assert all(isinstance(event, LoadProgressed) for event in progress)
        assert progress[-1] == LoadProgressed(done=rank.bytes_read, total=rank.bytes_read)
        assert loaded == WeightsLoaded(
            bytes_read=rank.bytes_read, seconds=rank.load_seconds, identity=model_identity(model)
        )
        assert ready == Ready(rank=rank)


def test_a_killed_rank_is_lost_at_once_and_the_other_leaves(fleet: Fleet) -> None:
    fleet.executor.start()
    fleet.processes[0].send_signal(signal.SIGKILL)
    fleet.executor.submit_plan(make_plan(0))  # stage 1 may now be waiting for a frame that never comes
    with pytest.raises(StageLostError, match="stage 0") as caught:
        fleet.executor.poll_results(60.0)
    assert caught.value.stage == 0


@pytest.mark.soak
def test_r3_r4_the_others_keep_process_and_weights_when_a_rank_is_lost(fleet: Fleet, model: Path) -> None:
    plan = fleet.executor.start()
    expected, found, again = requests(), requests(), requests()
    hand_core(2).generate(fleet.executor, expected)
    pid = fleet.processes[0].pid
    for epoch in (1, 2):
        fleet.processes[1].kill()
        fleet.end_epoch()
        fleet.spawn(RankProcessConfig(rank=fleet.configs[1], parent_pid=os.getpid()), stage=1)
        start = AllocateKV(num_blocks=plan.num_blocks, epoch=epoch, first_step=100 * epoch)
        assert fleet.join(epoch, start).start().ranks[0] == plan.ranks[0]
        hand_core(2, start).generate(fleet.executor, found if epoch == 1 else again)
    fleet.executor.shutdown()
    assert fleet.exit_codes() == [0, 0]
    assert fleet.processes[0].pid == pid
    for other in (found, again):
        assert [request.output for request in other] == [request.output for request in expected]
    events = [event for event in fleet.events(0) if not isinstance(event, LoadProgressed | TensorsRead)]
    assert [type(event) for event in events] == [WeightsLoaded, Ready, Abandoned, Ready, Abandoned, Ready]
    assert [event.epoch for event in events[1:]] == [0, 0, 1, 1, 2]


def test_a_bad_checkpoint_ends_with_its_kind_and_exit_code(tmp_path: Path) -> None:
    broken = make_checkpoint(tmp_path / "broken", layers=3)
    file = next(broken.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    fleet = Fleet(make_rank_configs(broken, 2))
    try:
        assert fleet.exit_codes() == [3, 3]
        for stage in range(2):
            (failed,) = fleet.events(stage)
            assert isinstance(failed, ChildFailed)
            assert failed.error.kind == "CheckpointError"
            assert file.name in failed.error.message
    finally:
        fleet.close()


@pytest.mark.parametrize("config", [b"", b"\x81\xa1x\x01"])
def test_a_bad_config_is_reported_on_the_status_pipe(config: bytes) -> None:
    config_read, config_write = os.pipe()
    status_read, status_write = os.pipe()
    os.write(config_write, config)
    os.close(config_write)
    command = [sys.executable, "-m", "penstock.rank.process", "--config-fd", str(config_read)]
    command += ["--status-fd", str(status_write), "--control-fd", "0"]
    done = subprocess.run(command, pass_fds=[config_read, status_write], capture_output=True, timeout=60)
    os.close(config_read)
    os.close(status_write)
    with os.fdopen(status_read, "rb") as pipe:
        (event,) = [decode_status(line) for line in pipe]
    assert done.returncode == 2
    assert isinstance(event, ChildFailed)
    assert event.error.kind == "UsageError"
    assert done.stderr == b""
