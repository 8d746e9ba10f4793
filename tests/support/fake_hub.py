"""A hub on 127.0.0.1: models in memory, by the routes that huggingface_hub and Penstock use, with faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

LARGE = (".safetensors", ".gguf")
_INFO = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/(?P<route>revision|tree)/(?P<revision>[^/?]+)")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_STORED = re.compile(r"/stored/(?P<name>[^/]+/[^/]+)/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that has come."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class FakeHub:
    """Models by name and commit, and what goes wrong.

    Attributes:
        models: name -> commit -> path -> bytes.
        branches: name -> branch -> commit.
        needs_token: the only token that a model is given to; others are refused as for a gated model.
        refusals: part of a path -> status and error code, for every request with it.
        cuts: for each content in turn, after how many bytes the connection ends; None sends all.
        held: a connection that is cut stays open until this is set; None ends it at once.
        sends_other: path -> bytes that are sent in place of those that were announced.
        knows_ranges: answers a range with that part, and else with all.
        stalled: contents wait for this before they are sent; None sends at once.
        store: base address of the place to which requests for large files are sent on; "" sends them itself.
    """

    url: str = ""
    models: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    needs_token: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    cuts: list[int | None] = field(default_factory=list)
    held: threading.Event | None = None
    sends_other: dict[str, bytes] = field(default_factory=dict)
    knows_ranges: bool = True
    stalled: threading.Event | None = None
    store: str = ""
    asked: list[Asked] = field(default_factory=list)

    def add(self, name: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Let a branch of a model have these files; return the commit."""
        commit = hashlib.sha1(repr((name, sorted(files.items()))).encode()).hexdigest()
        self.models.setdefault(name, {})[commit] = dict(files)
        self.branches.setdefault(name, {})[branch] = commit
        return commit

    def contents_asked(self) -> list[tuple[str, str]]:
        """Return path and range of each content that was asked for."""
        return [
            (unquote(match["path"]), asked.headers.get("range", ""))
            for asked in self.asked
            if asked.method == "GET" and (match := _FILE.fullmatch(asked.path))
        ]


def blob_of(path: str, content: bytes) -> str:
    """Return the hash that names a file: SHA-256 of a large one, else Git's."""
    if path.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        self._serve()

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that was interrupted
            super().handle()

    def do_HEAD(self) -> None:
        self._serve()

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.asked.append(Asked(self.command, path, headers))
        for part, (status, code) in self.hub.refusals.items():
            if part in path:
                self._refuse(status, code)
                return
        if match := _INFO.fullmatch(path):
            self._info(match["name"], unquote(match["revision"]), match["route"])
        elif match := _STORED.fullmatch(path) or _FILE.fullmatch(path):
            self._file(match["name"], unquote(match["revision"]), unquote(match["path"]), path)
        else:
            self._refuse(404, "")

    def _files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = self.hub.branches.get(name, {}).get(revision, revision)
        if name not in self.hub.models:
            self._refuse(401, "RepoNotFound")
        elif commit not in self.hub.models[name]:
            self._refuse(404, "RevisionNotFound")
        else:
            return commit, self.hub.models[name][commit]
        return None

    def _info(self, name: str, revision: str, route: str) -> None:
        known = self._files(name, revision)
        if known is None:
            return
        commit, files = known
        siblings = [_sibling(path, content) for path, content in files.items()]
        if route == "revision":
            self._send(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode(), {})
            return
        tree = [
            {"type": "file", "path": each.pop("rfilename"), "oid": each.pop("blobId"), **each}
            for each in siblings
        ]
        for each in tree:
            if lfs := each.get("lfs"):
                each["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": 100}
        self._send(200, json.dumps(tree).encode(), {})

    def _file(self, name: str, revision: str, path: str, asked: str) -> None:
        known = self._files(name, revision)
        if known is None:
            return
        commit, files = known
        token = self.hub.needs_token.get(name)
        if token and self.headers.get("authorization") != f"Bearer {token}":
            self._refuse(403, "GatedRepo")
            return
        if path not in files:
            self._refuse(404, "EntryNotFound")
            return
        blob, size = blob_of(path, files[path]), len(files[path])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob}"', "Accept-Ranges": "bytes"}
        if self.hub.store and path.endswith(LARGE):
            place = f"{self.hub.store}/stored/{name}/{commit}/{path}"
            headers |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{blob}"', "Location": place}
            self._send(302, b"", headers)
            return
        self._content(self.hub.sends_other.get(path, files[path]), headers)

    def _content(self, content: bytes, headers: dict[str, str]) -> None:
        first, status = 0, 200
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        if wanted and self.hub.knows_ranges:
            first, status = int(wanted[1]), 206
            if first >= len(content):
                self._refuse(416, "")
                return
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if self.hub.stalled is not None:
            self.hub.stalled.wait()
        end = self.hub.cuts.pop(0) if self.hub.cuts and self.command == "GET" else None
        self._send(status, content[first:], headers, end)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b'{"error":"no"}', {"X-Error-Code": code} if code else {})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:cut])
        if cut is not None:
            if self.hub.held is not None:
                self.hub.held.wait()
            self.close_connection = True


def _sibling(path: str, content: bytes) -> dict[str, object]:
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    sibling: dict[str, object] = {"rfilename": path, "size": len(content), "blobId": git}
    if path.endswith(LARGE):
        sibling["lfs"] = {"sha256": blob_of(path, content), "size": len(content), "pointerSize": 100}
    return sibling


def own_model_folders(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let this test find models, and a token of the hub, below a folder of its own alone.

    Connections to a hub then load no certificates, which takes longer than all else.
    """
    monkeypatch.setattr(_http, "_GLOBAL_CLIENT_FACTORY", _plain_client)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HOME", "HF_ENDPOINT", "PENSTOCK_HUB_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(folder / "tokens"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(folder / "ollama"))
    monkeypatch.setenv("HOME", str(folder / "home"))


def _plain_client() -> object:
    http = getattr(_http, "httpx2", None) or getattr(_http, "httpx")  # noqa: B009 - as its version has it
    return http.Client(
        verify=False,
        follow_redirects=True,
        timeout=None,
        event_hooks={"request": [_http.hf_request_event_hook]},
    )


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve a hub until the end of the block."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        for waited_for in (hub.stalled, hub.held):
            if waited_for is not None:
                waited_for.set()
        server.shutdown()
        thread.join()
        server.server_close()
