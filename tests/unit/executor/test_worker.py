"""Ranks as real processes: shared memory, zmq, inherited descriptors; every process is reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from hand_core import HandCore, Wanted, make_plan
from penstock.config import RankConfig, RankProcessConfig
from penstock.errors import CheckpointError, StageLostError
from penstock.executor.child import Failed, Loaded, Progress, Ready, StatusEvent, decode_status, encode_config
from penstock.executor.inprocess import InprocessExecutor
from penstock.executor.mp import MpExecutor
from penstock.models.registry import load_spec
from penstock.pipeline.frame import frame_bytes
from penstock.pipeline.ring_channel import create_channel_ring
from penstock.pipeline.ring_memory import close_handle, create_ring
from rank_configs import make_rank_configs


class Fleet:
    """Worker processes and the executor that talks to them."""

    def __init__(self, directory: Path, configs: Sequence[RankConfig]) -> None:
        def addresses(kind: str, count: int) -> list[str]:
            return [f"ipc://{directory}/{kind}{i}" for i in range(count)]

        width = load_spec(Path(configs[0].model_path)).hidden_size
        size = frame_bytes(max_num_tokens=configs[0].max_num_batched_tokens, width=width, itemsize=4)
        self.rings = [create_ring(size, configs[0].link_frames) for _ in configs[1:]]
        plan_addresses = addresses("plan", len(configs))
        tokens = [create_channel_ring(8, 16) for _ in configs[1:]]
        results = create_channel_ring(8, 16)
        self.rings += [*tokens, results]
        self.executor = MpExecutor(plan_addresses, results, load_timeout_s=60.0)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.status_fds: list[int] = []
        for config in configs:
            process_config = RankProcessConfig(
                rank=config,
                parent_pid=os.getpid(),
                plan_address=plan_addresses[config.stage],
                tokens=tokens if config.is_last else [tokens[config.stage]],
                results=results if config.is_last else None,
                incoming=None if config.is_first else self.rings[config.stage - 1],
                outgoing=None if config.is_last else self.rings[config.stage],
            )
            self._spawn(process_config)

    def _spawn(self, config: RankProcessConfig) -> None:
        config_read, config_write = os.pipe()
        status_read, status_write = os.pipe()
        rings = (config.incoming, config.outgoing, config.results, *config.tokens)
        fds = [fd for handle in rings if handle is not None for fd in handle.fds]
        command = [sys.executable, "-m", "penstock.executor.worker"]
        command += ["--config-fd", str(config_read), "--status-fd", str(status_write)]
        self.processes.append(subprocess.Popen(command, pass_fds=[config_read, status_write, *fds]))
        os.close(config_read)
        os.close(status_write)
        with os.fdopen(config_write, "wb") as pipe:
            pipe.write(encode_config(config))
        self.status_fds.append(status_read)

    def exit_codes(self) -> list[int]:
        return [process.wait(timeout=60) for process in self.processes]

    def events(self, stage: int) -> list[StatusEvent]:
        """All that a rank has said; it must have ended."""
        with os.fdopen(os.dup(self.status_fds[stage]), "rb") as pipe:
            return [decode_status(line) for line in pipe.read().splitlines()]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.executor.shutdown()
        for fd in self.status_fds:
            os.close(fd)
        for ring in self.rings:
            close_handle(ring)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=3, tied=True)


@pytest.fixture
def fleet(tmp_path: Path, model: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, make_rank_configs(model, 2, async_depth=1))
    yield made
    made.close()


def hand_core(num_stages: int) -> HandCore:
    return HandCore(
        num_stages=num_stages, depth=num_stages + 1, num_rows=4, num_blocks=64, block_size=16, chunk=9
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
        assert progress
        assert all(isinstance(event, Progress) for event in progress)
        assert progress[-1] == Progress(done=rank.bytes_read, total=rank.bytes_read)
        assert loaded == Loaded(rank=rank)
        assert ready == Ready()


def test_a_killed_rank_is_lost_at_once_and_the_other_leaves(fleet: Fleet) -> None:
    fleet.executor.start()
    fleet.processes[0].send_signal(signal.SIGKILL)
    fleet.executor.submit(make_plan(0))  # stage 1 may now be waiting for a frame that never comes
    with pytest.raises(StageLostError, match="stage 0") as caught:
        fleet.executor.poll(60.0)
    assert caught.value.stage == 0


def test_a_bad_checkpoint_ends_with_its_kind_and_exit_code(tmp_path: Path) -> None:
    broken = make_checkpoint(tmp_path / "broken", layers=3)
    file = next(broken.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    fleet = Fleet(tmp_path, make_rank_configs(broken, 2))
    try:
        with pytest.raises(CheckpointError, match=file.name):
            fleet.executor.start()
        fleet.executor.shutdown()
        assert fleet.exit_codes() == [3, 3]
        (failed,) = fleet.events(1)
        assert isinstance(failed, Failed)
        assert failed.error.kind == "CheckpointError"
    finally:
        fleet.close()


@pytest.mark.parametrize("config", [b"", b"\x81\xa1x\x01"])
def test_a_bad_config_is_reported_on_the_status_pipe(config: bytes) -> None:
    config_read, config_write = os.pipe()
    status_read, status_write = os.pipe()
    os.write(config_write, config)
    os.close(config_write)
    command = [sys.executable, "-m", "penstock.executor.worker", "--config-fd", str(config_read)]
    command += ["--status-fd", str(status_write)]
    done = subprocess.run(command, pass_fds=[config_read, status_write], capture_output=True, timeout=60)
    os.close(config_read)
    os.close(status_write)
    with os.fdopen(status_read, "rb") as pipe:
        (event,) = [decode_status(line) for line in pipe]
    assert done.returncode == 2
    assert isinstance(event, Failed)
    assert event.error.kind == "UsageError"
    assert done.stderr == b""
