"""The program with real processes: `serve` through two stages, a replayed trace, a drain, and a kill -9."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from paths import shared_data
from penstock.cli.bench.http_stream import Target
from penstock.cli.program import run
from penstock.cli.terminal import Invocation

PENSTOCK = str(Path(sys.executable).parent / "penstock")
START_S = 120  # a deadline against hanging, not a measurement
END_S = 30


class Server:
    """A running `penstock serve demo --pp 2`, with a temporary directory of its own."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        with (directory / "log").open("w") as log:
            self.process = subprocess.Popen(
                [PENSTOCK, "serve", "demo", "--pp", "2", "--port", "0", *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"TMPDIR": str(directory)},
            )
        try:
            self.lines = self._read_until("ready in")
        except BaseException:
            self.close()
            raise
        self.url = self.lines[-1].split("   ")[1]

    def _read_until(self, word: str) -> list[str]:
        """The lines of standard output up to the one with `word`."""
        assert self.process.stdout is not None
        said = b""
        while word.encode() not in said.rpartition(b"\n")[0]:
            readable, _, _ = select.select([self.process.stdout], [], [], START_S)
            news = os.read(self.process.stdout.fileno(), 65536) if readable else b""
            assert news, f"no {word!r} after {said!r}: {(self.directory / 'log').read_text()}"
            said += news
        lines = said.decode().splitlines()
        return lines[: next(at for at, line in enumerate(lines) if word in line) + 1]

    def children(self) -> dict[int, str]:
        """Title by pid of the processes that the supervisor has started."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return {int(pid): Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ") for pid in listed}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def serving(directory: Path, *flags: str) -> Iterator[Server]:
    server = Server(directory, *flags)
    try:
        yield server
    finally:
        server.close()


def penstock(*words: str) -> tuple[int, str]:
    out = StringIO()
    invocation = Invocation(stdout=out, stderr=out, stdin=StringIO(), environ={})
    return run(words, invocation), out.getvalue()


def replay_trace(url: str, count: int, time_scale: str) -> tuple[int, str]:
    trace = shared_data("traces", "azure_llm_2023_conv.csv")
    return penstock(
        *("bench", "serve", "--url", url, "--dataset-name", "azure", "--dataset-path", str(trace)),
        *("--num-prompts", str(count), "--length-scale", "16", "--time-scale", time_scale),
    )


def test_r1_r7_a_trace_comes_back_whole_and_a_kill_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        titles = sorted(server.children().values())
        assert titles == ["penstock api", "penstock core", "penstock stage 0 tp 0", "penstock stage 1 tp 0"]
        stages = [line.split()[:2] for line in server.lines if " pid " in line]
        assert stages == [["stage", "0"], ["stage", "1"]]
        code, out = replay_trace(server.url, 40, "0")
        assert code == 0, out
        assert "Ledger: 40 requests" in out
        assert "each exactly once" in out
        assert penstock("complete", "ROMEO:", "--url", server.url, "--max-tokens", "4")[0] == 0
        kill_and_check_that_nothing_is_left(server)


def kill_and_check_that_nothing_is_left(server: Server) -> None:
    pidfds = [os.pidfd_open(pid) for pid in server.children()]
    server.process.kill()
    server.process.wait()
    try:
        waiting = set(pidfds)
        while waiting:
            ended, _, _ = select.select(waiting, [], [], END_S)
            assert ended, f"{len(waiting)} processes have outlived the supervisor"
            waiting -= set(ended)
    finally:
        for fd in pidfds:
            os.close(fd)
    assert [path.name for path in server.directory.iterdir()] == ["log"]  # no socket, no directory
    assert not [name for name in os.listdir("/dev/shm") if "penstock" in name]
    target = Target.parse(server.url)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((target.host, target.port))


@pytest.mark.soak
def test_r1_r7_five_hundred_requests_of_the_trace(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        code, out = replay_trace(server.url, 500, "0.5")
        assert code == 0, out
        assert "Ledger: 500 requests" in out
        kill_and_check_that_nothing_is_left(server)


def test_sigterm_is_exit_0_and_a_port_in_use_is_exit_5(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        port = Target.parse(server.url).port
        command = [PENSTOCK, "serve", "demo", "--port", str(port)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
        assert second.returncode == 5
        assert f"error: port {port} is used by pid" in second.stderr
        assert "Use --port or stop it." in second.stderr
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0


def test_more_stages_than_layers_is_exit_2_before_anything_starts() -> None:
    command = [PENSTOCK, "serve", "demo", "--pp", "99", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 2
    assert "`--pp 99` is more than the model's 6 layers." in done.stderr
    assert "Use at most 6." in done.stderr
    assert "Traceback" not in done.stderr
