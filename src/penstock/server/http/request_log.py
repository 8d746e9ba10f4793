"""The server's log: one line per event, with time, level, process, text and `key=value`, or the same as JSON.

No line has a prompt, an output or a key. Text that a client chose is escaped, so that it cannot forge a line.
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import Literal, Protocol, TextIO

import msgspec

from penstock.server.http.access import OPEN_PATHS
from penstock.server.http.request_record import RequestRecord

Value = str | int | float | None
MAX_VALUE_CHARACTERS = 256

_SCRAPED_PATH = "/metrics"


class LogFormat(Protocol):
    def __call__(self, level: str, text: str, values: dict[str, Value]) -> str: ...


def _timestamp() -> str:
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now * 1000) % 1000:03d}Z"


def escape(text: str) -> str:
    """Return a text of printable ASCII without blanks, quotes, `\\` and `=` as it is, any other in quotes.

    In quotes, a character beyond printable ASCII becomes `\\u{…}` with its hexadecimal number. A text longer
    than `MAX_VALUE_CHARACTERS` is cut.
    """
    cut = text if len(text) <= MAX_VALUE_CHARACTERS else text[:MAX_VALUE_CHARACTERS] + "..."
    if cut and all("!" <= char <= "~" and char not in '"\\=' for char in cut):
        return cut
    return '"' + "".join(_escape_char(char) for char in cut) + '"'


def _escape_char(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if " " <= char <= "~" else f"\\u{{{ord(char):x}}}"


def _shown(value: Value) -> str:
    return escape(value) if isinstance(value, str) else str(value)


def text_line(level: str, text: str, values: dict[str, Value]) -> str:
    pairs = "".join(f" {key}={_shown(value)}" for key, value in values.items())
    return f"{_timestamp()} {level} api {text}{pairs}\n"


def json_line(level: str, text: str, values: dict[str, Value]) -> str:
    fields = {"time": _timestamp(), "level": level, "process": "api", "text": text}
    shown = {k: escape(v) if isinstance(v, str) else v for k, v in values.items()}
    return msgspec.json.encode(fields | shown).decode() + "\n"


LogForm = Literal["text", "json"]
FORMATS: dict[LogForm, LogFormat] = {"text": text_line, "json": json_line}


class RequestLog:
    def __init__(self, form: LogForm = "text", out: TextIO = sys.stderr) -> None:
        self._line = FORMATS[form]
        self._out = out

    def event(self, text: str, **values: Value) -> None:
        self._write("INFO", text, values)

    def warning(self, text: str, **values: Value) -> None:
        self._write("WARNING", text, values)

    def bug(self, record: RequestRecord, error: BaseException) -> None:
        """Log an exception that is a bug of the server, with the end of its trace, in one line."""
        trace = "".join(traceback.format_exception(error, limit=-8))
        pieces = [line.strip() for line in trace.splitlines() if line.strip()]
        values = {f"trace{i}": piece for i, piece in enumerate(pieces[-12:])}
        self._write("ERROR", "bug", {"id": record.request_id, **values})

    def request_end(self, record: RequestRecord, now: float) -> None:
        """Log the line of a request, except for health probes, and for scrapes of metrics with status 200."""
        if record.path in OPEN_PATHS or (record.path == _SCRAPED_PATH and record.status == 200):
            return
        values: dict[str, Value] = {
            "id": record.request_id,
            "method": record.method,
            "path": record.path,
            "status": record.status,
            "seconds": round(now - record.started_at, 4),
        }
        self._write("INFO", "request", values | _generation_values(record))

    def _write(self, level: str, text: str, values: dict[str, Value]) -> None:
        try:
            self._out.write(self._line(level, text, values))
            self._out.flush()
        except OSError:
            pass  # a full disk or a closed terminal must not stop the service


def _generation_values(record: RequestRecord) -> dict[str, Value]:
    """Return the numbers of a request that generated, and the error code of one that failed."""
    values: dict[str, Value] = {}
    if record.generated:
        values = {
            "prompt": record.prompt_tokens,
            "cached": record.cached_tokens,
            "output": record.output_tokens,
            "queue": _rounded(record.queue_seconds),
            "ttft": _rounded(record.ttft_seconds()),
            "tpot": _rounded(record.tpot_seconds()),
            "finish": record.finish_reason,
        }
    values["error"] = record.error_code
    return {key: value for key, value in values.items() if value is not None}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
