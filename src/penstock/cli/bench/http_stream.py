"""A light HTTP/1.1 client for event streams: one socket per request, parsed as bytes arrive.

Used by `cli.bench.online`, where hundreds of streams share one thread: a piece of an answer is parsed in
microseconds, without a step of a coroutine. The client supports what a streaming inference server needs: POST
with a body, chunked or plain answers, server-sent events, and TLS. It follows no redirects and asks for no
compression. Commands that send one request at a time use `cli.http_client`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from penstock.cli.client_tls import client_context, connection_error
from penstock.errors import LinkClosedError, ProtocolError, UsageError, WaitTimeoutError

MAX_HEAD_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The address of a server, and what every request to it needs.

    Attributes:
        prefix: part of the path before `/v1`, usually "".
        api_key: key that is sent with every request; "": none.
        context: TLS context of HTTPS; None: plain HTTP.
    """

    host: str
    port: int
    prefix: str  # path before /v1, usually ""
    api_key: str = ""
    context: ssl.SSLContext | None = field(default=None, repr=False, compare=False)

    @classmethod
    def parse(cls, url: str, api_key: str = "", ca_file: Path | None = None) -> Target:
        """Return the target of `http://host:port` or `https://...`, with or without `/v1` at the end.

        Args:
            api_key: as in the attributes.
            ca_file: file of certificates to trust besides the system's.

        Raises:
            UsageError: the URL or the file cannot be used.
        """
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise UsageError(f"{url!r} is not a URL: {error}.", remedy="Use http://HOST:PORT.") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{url!r} is not an HTTP address.",
                remedy="Use http://HOST:PORT or https://HOST:PORT.",
            )
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        _require_sendable(parts.hostname, prefix, api_key)
        context = client_context(ca_file) if parts.scheme == "https" else None
        return cls(host=parts.hostname, port=port, prefix=prefix, api_key=api_key, context=context)

    @property
    def url(self) -> str:
        scheme = "http" if self.context is None else "https"
        return f"{scheme}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of every request. A key never goes into a URL or a log."""
        common = {"Host": self.authority, "Content-Type": "application/json"}
        return common | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})

    def request_bytes(self, path: str, body: bytes, extra: Mapping[str, str]) -> bytes:
        fields = self.headers | {"Content-Length": str(len(body)), "Connection": "close"} | dict(extra)
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {self.prefix}{path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def _require_sendable(host: str, path: str, api_key: str) -> None:
    """Refuse what the head of a request cannot hold, before anything is sent."""
    if not (_is_plain(host) and all(0 < len(label) < 64 for label in host.removesuffix(".").split("."))):
        raise UsageError(
            f"the host {host!r} of the URL is not a name that can be looked up.",
            remedy="Write an address, or the name in ASCII as DNS has it (xn--...).",
        )
    if not _is_plain(path):
        raise UsageError(
            f"the path {path!r} of the URL has characters that a URL cannot have.",
            remedy="Write them as %20 and the like.",
        )
    if not (api_key.isascii() and api_key.isprintable()):
        raise UsageError(
            "the API key has characters that cannot be sent: it must be printable ASCII.",
            remedy="Give the key as the server has it, with --api-key or in PENSTOCK_API_KEY.",
            param="api_key",
        )


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


class ResponseParser:
    """An HTTP/1.1 response, as far as it has arrived.

    `feed` takes new data, and returns the bytes of the body that can be read with it. It raises
    `ProtocolError` if the data is not such a response.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.finished = False
        self._buffer = bytearray()
        self._left: int | None = (
            None  # bytes to come of the chunk or body; None = until the connection closes
        )
        self._chunked = False

    def feed(self, data: bytes) -> bytes:
        self._buffer += data
        if not self.status and not self._read_head():
            return b""
        return self._read_chunks() if self._chunked else self._read_plain()

    def end_of_input(self) -> bool:
        """Note that the connection has closed; return whether the response is complete."""
        if self.status and not self._chunked and self._left is None:
            self.finished = True
        return self.finished

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ProtocolError(f"the server's header is longer than {MAX_HEAD_BYTES} bytes.")
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ProtocolError(f"the server does not speak HTTP/1.1: {lines[0][:80]!r}.")
        self.status = int(rest[:3])
        pairs = (line.partition(":") for line in lines[1:])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length")
        self._left = int(length) if length is not None and length.isdigit() else None
        return True

    def _read_plain(self) -> bytes:
        wanted = len(self._buffer) if self._left is None else min(self._left, len(self._buffer))
        body = bytes(self._buffer[:wanted])
        del self._buffer[:wanted]
        if self._left is not None:
            self._left -= wanted
            self.finished = self._left == 0
        return body

    def _read_chunks(self) -> bytes:
        pieces = []
        while not self.finished:
            size_end = self._buffer.find(b"\r\n")
            if size_end < 0:
                break
            size = self._chunk_size(size_end)
            chunk_end = size_end + 2 + size
            if len(self._buffer) < chunk_end + 2:
                break
            pieces.append(bytes(self._buffer[size_end + 2 : chunk_end]))
            del self._buffer[: chunk_end + 2]
            self.finished = size == 0
        return b"".join(pieces)

    def _chunk_size(self, end: int) -> int:
        try:
            return int(self._buffer[:end].split(b";")[0], 16)
        except ValueError as error:
            raise ProtocolError(f"bad chunk size {bytes(self._buffer[: min(end, 20)])!r}.") from error


class EventParser:
    """A parser of server-sent events: `feed` returns the data of the events that the new bytes complete."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        *blocks, self._buffer = (self._buffer + data).replace(b"\r\n", b"\n").split(b"\n\n")
        events = []
        for block in blocks:
            lines = [line[5:].lstrip(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                events.append(b"\n".join(lines))
        return events


class _StreamProtocol(asyncio.Protocol):
    """A connection that sends one request and parses the answer. `done` has a result when the answer ends."""

    def __init__(self, request: bytes, on_body: Callable[[bytes], None]) -> None:
        self.parser = ResponseParser()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.progress = 0  # grows with every piece that arrives
        self._request = request
        self._on_body = on_body
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.progress += 1
        try:
            body = self.parser.feed(data)
            if body:
                self._on_body(body)
        except Exception as error:
            self._finish(error)
            return
        if self.parser.finished:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        whole = self.parser.end_of_input()
        cut = LinkClosedError(f"the server closed the connection early{f': {exc}' if exc else ''}.")
        self._finish(None if whole else cut)

    def _finish(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
        self.close()

    def close(self) -> None:
        """Abort the connection: the closing handshake of TLS could outlive the event loop of a short run."""
        if self._transport is not None:
            self._transport.abort()


async def post_stream(
    target: Target,
    path: str,
    body: bytes,
    on_body: Callable[[int, bytes], None],
    *,
    stall_s: float,
    headers: Mapping[str, str] | None = None,
) -> int:
    """Send one POST, and return the status of the answer when all of it has come.

    Args:
        path: path behind the target's prefix.
        on_body: gets the status and each piece of the body as it arrives.
        stall_s: most seconds to connect, and of silence.
        headers: further headers.

    Raises:
        LinkClosedError: there was no connection, or it was closed before the answer was complete.
        WaitTimeoutError: nothing came for `stall_s` seconds.
        ProtocolError: the answer is not HTTP/1.1.
    """
    loop = asyncio.get_running_loop()
    request = target.request_bytes(path, body, headers or {})
    protocol = _StreamProtocol(request, lambda piece: on_body(protocol.parser.status, piece))
    try:
        await asyncio.wait_for(
            loop.create_connection(lambda: protocol, target.host, target.port, ssl=target.context), stall_s
        )
        await _until_done(protocol, target, stall_s)
    except TimeoutError as error:
        if isinstance(error, WaitTimeoutError):
            raise
        raise WaitTimeoutError(f"{target.authority} did not accept within {stall_s:g} s.") from error
    except ssl.SSLError as error:
        raise connection_error(target.url, error) from error
    except OSError as error:
        raise LinkClosedError(f"no connection to {target.authority}: {error.strerror or error}.") from error
    finally:
        protocol.done.cancel()
        protocol.close()
    return protocol.parser.status


async def _until_done(protocol: _StreamProtocol, target: Target, stall_s: float) -> None:
    """Wait for the end of the answer. Raises `WaitTimeoutError` if no piece came for `stall_s` seconds."""
    while True:
        seen = protocol.progress
        done, _ = await asyncio.wait([protocol.done], timeout=stall_s)
        if done:
            return protocol.done.result()
        if protocol.progress == seen:
            raise WaitTimeoutError(f"{target.authority} sent nothing for {stall_s:g} s.")
