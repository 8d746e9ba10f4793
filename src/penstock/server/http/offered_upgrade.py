"""The parser of a connection whose client may offer another protocol (`Upgrade`); no offer is accepted.

A server may answer such a request as any other (RFC 9110, section 7.8). httptools' parser takes it to have no
body, and leaves what follows to the other protocol. Java's own client offers HTTP/2 so in its first request;
the body of that request would be lost, or be read as a request of its own. So it is parsed
behind a short head of ours. Used by `http_protocol`.
"""

from __future__ import annotations

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")  # headers that say how long a body is


class HttpOnlyParser:
    """A parser of requests, one after the other, in place of httptools' own.

    Args:
        protocol: gets each request, by the callbacks of httptools; its `headers` are those of the last one.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._parser = _new_parser(protocol)

    @property
    def is_body_due(self) -> bool:
        """Whether the request whose end is told now has a body still, which httptools has passed over."""
        return self._parser.should_upgrade() and bool(self._framing())

    def feed_data(self, data: bytes) -> None:
        """Parse what has come. Raises `HttpParserError`."""
        while data:
            try:
                self._parser.feed_data(data)
                return
            except HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                if self.is_body_due:
                    self._go_on_behind_head()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Return that what a client offers is not taken."""
        return False

    def _framing(self) -> list[bytes]:
        return [b"%b: %b\r\n" % (name, value) for name, value in self._protocol.headers if name in _FRAMING]

    def _go_on_behind_head(self) -> None:
        head = (f"POST / HTTP/{self.get_http_version()}\r\n".encode(), *self._framing(), b"\r\n")
        self._parser = _new_parser(_BehindHead(self._protocol))
        self._parser.feed_data(b"".join(head))


class _BehindHead:
    """Gives a protocol what a parser tells, but for the head of the first request."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._is_behind = False
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if self._is_behind:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_behind:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_behind:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_behind:
            self._protocol.on_headers_complete()
        self._is_behind = True


def _new_parser(callbacks: object) -> HttpRequestParser:
    parser = HttpRequestParser(callbacks)
    # As uvicorn has it: a request that comes behind the last one of a connection does not spoil that answer.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
