"""ggml's RPC servers, which hold the stages of llama.cpp's pipeline, and their devices as llama.cpp has them.

As a program it is one server, of the library that comes with `llama-cpp-python`:

    python llama_rpc.py CORES ENDPOINT THREADS
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peer_protocol import die_with_parent

START_S = 60.0


def library(name: str) -> ctypes.CDLL:
    found = find_spec("llama_cpp")
    assert found is not None
    assert found.origin is not None
    return ctypes.CDLL(str(Path(found.origin).parent / "lib" / f"lib{name}.so"))


def serve(endpoint: str, threads: int) -> None:
    """Be a server, with the CPU as its device. Does not return."""
    base, cpu, rpc = library("ggml-base"), library("ggml-cpu"), library("ggml-rpc")
    cpu.ggml_backend_cpu_reg.restype = ctypes.c_void_p
    base.ggml_backend_reg_dev_get.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    base.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
    device = (ctypes.c_void_p * 1)(base.ggml_backend_reg_dev_get(cpu.ggml_backend_cpu_reg(), 0))
    start = rpc.ggml_backend_rpc_start_server
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    start(endpoint.encode(), None, threads, 1, device)


def devices(endpoints: list[str]) -> Any:
    """The servers' devices as the parameters of a model want them: an array that ends with a null."""
    rpc, base = library("ggml-rpc"), library("ggml-base")
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    base.ggml_backend_reg_dev_count.argtypes = [ctypes.c_void_p]
    base.ggml_backend_reg_dev_count.restype = ctypes.c_size_t
    base.ggml_backend_reg_dev_get.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    base.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
    found = []
    for endpoint in endpoints:
        registry = rpc.ggml_backend_rpc_add_server(endpoint.encode())
        count = base.ggml_backend_reg_dev_count(registry)
        found += [base.ggml_backend_reg_dev_get(registry, index) for index in range(count)]
    return (ctypes.c_void_p * (len(found) + 1))(*found, None)


class RpcServers:
    """One server for each stage, each on cores of its own; they end with the body of a `with`."""

    def __init__(self, stages: int, threads: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.endpoints = [f"127.0.0.1:{free_port()}" for _ in range(stages)]
        self._processes = []
        for stage, endpoint in enumerate(self.endpoints):
            own = ",".join(map(str, cores[stage * threads :][:threads]))
            command = [sys.executable, __file__, own, endpoint, str(threads)]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        for endpoint in self.endpoints:
            wait_for(endpoint)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class ServersElsewhere:
    """Servers that whoever runs the benchmark has started, such as on other hosts."""

    def __init__(self, endpoints: list[str]) -> None:
        self.endpoints = endpoints
        for endpoint in endpoints:
            wait_for(endpoint)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def wait_for(endpoint: str) -> None:
    """Return when the server listens."""
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((host, int(port))).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    die_with_parent()
    os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
    serve(sys.argv[2], int(sys.argv[3]))
