"""The readers of traces of requests: files of recorded loads become lists of arrival times and lengths.

| kind | file | its lines |
|---|---|---|
| `azure` | CSV | TIMESTAMP, ContextTokens, GeneratedTokens, as Azure publishes LLM inference traces |
| `mooncake` | JSONL | timestamp (ms), input_length, output_length, hash_ids (of blocks of 512 tokens) |
| `sharegpt` | JSON | lists of turns with `from` and `value`: first the prompt, then the output |
| `custom` | JSONL | input_len or prompt, output_len, and arrival_s unless all requests come at once |

Rows say how long prompts are, and in a Mooncake trace also which prompts begin alike. No prompt is kept: the
tokens of a text are counted by a function that the caller gives. `workloads.requests` makes requests of rows.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO

from penstock.errors import UsageError

TraceKind = Literal["auto", "azure", "mooncake", "sharegpt", "custom"]
MAX_LENGTH = 1 << 24  # tokens of a prompt or an output: each becomes an id in memory
MOONCAKE_BLOCK = 512  # tokens that a hash id of a Mooncake trace stands for

# What a file of another kind makes the readers raise, besides what the system does.
_UNREADABLE = (AttributeError, KeyError, TypeError, ValueError, csv.Error, OverflowError, RecursionError)
_BYTES_PER_TOKEN = 4  # roughly, of English text; for callers without a tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace file, as recorded.

    Attributes:
        arrival_s: seconds after the first row.
        input_len: tokens of the prompt.
        output_len: tokens of the output.
        blocks: a number for each block of `MOONCAKE_BLOCK` tokens of the prompt. Two blocks with the same
            number have the same tokens. Empty if the trace does not name blocks.
    """

    arrival_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


def roughly_counted(text: str) -> int:
    """Return roughly how many tokens a text has, by its bytes."""
    return max(1, len(text.encode()) // _BYTES_PER_TOKEN)


def read_trace(
    path: Path,
    limit: int | None = None,
    *,
    kind: TraceKind = "auto",
    count_tokens: Callable[[str], int] = roughly_counted,
) -> list[TraceRow]:
    """Return the first rows of a trace.

    Args:
        limit: number of rows; None: all.
        kind: the form of the file; `auto` finds it by the file's name and first line.
        count_tokens: counts the tokens of a text, if the trace has texts in place of lengths.

    Raises:
        UsageError: the file cannot be read, is not a trace of that kind, or has fewer rows than `limit`.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"{limit} requests of a trace were requested; it must be at least 1.")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # Windows marks UTF-8 at the beginning
            kind = _kind_of(path, file) if kind == "auto" else kind
            rows = list(islice(_READERS[kind](file, count_tokens), limit))
    except OSError as error:
        raise UsageError(
            f"the trace {path} cannot be read: {error.strerror}.", remedy="Give a readable trace file."
        ) from error
    except _UNREADABLE as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        of_kind = "" if kind == "auto" else f" of kind {kind}"
        raise UsageError(f"{path} is not a trace{of_kind}: {what}.", remedy=_NEEDS[kind]) from error
    if not rows or (limit is not None and len(rows) < limit):
        raise UsageError(
            f"the trace {path} has {len(rows)} requests, fewer than the {limit or 1} asked for.",
            remedy="Ask for fewer, or give a longer trace.",
        )
    return rows


def _kind_of(path: Path, file: TextIO) -> TraceKind:
    """Return the kind of a trace by its name and first line. The file is at its beginning afterwards."""
    if path.suffix == ".csv":
        return "azure"
    if path.suffix == ".json":
        return "sharegpt"
    first = file.readline()
    file.seek(0)
    return "mooncake" if '"input_length"' in first else "custom"


def _azure_rows(file: TextIO, _: Callable[[str], int]) -> Iterator[TraceRow]:
    first = None
    for number, row in enumerate(csv.DictReader(file), 2):
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26])  # the seventh digit is below a microsecond
        first = first or moment
        arrival_s = (moment - first).total_seconds()
        yield _row(number, arrival_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake_rows(file: TextIO, _: Callable[[str], int]) -> Iterator[TraceRow]:
    first_ms = None
    for number, row in _json_lines(file):
        first_ms = row["timestamp"] if first_ms is None else first_ms
        arrival_s = (row["timestamp"] - first_ms) / 1000
        blocks = tuple(map(int, row.get("hash_ids", ())))
        yield _row(number, arrival_s, int(row["input_length"]), int(row["output_length"]), blocks)


def _sharegpt_rows(file: TextIO, count_tokens: Callable[[str], int]) -> Iterator[TraceRow]:
    for number, conversation in enumerate(json.load(file), 1):
        turns = conversation.get("conversations") or conversation.get("conversation") or []
        texts = [turn["value"] for turn in turns[:2]]
        if len(texts) == 2 and all(texts):
            prompt, answer = texts
            yield _row(number, 0.0, count_tokens(prompt), count_tokens(answer))


def _custom_rows(file: TextIO, count_tokens: Callable[[str], int]) -> Iterator[TraceRow]:
    first_s = None
    for number, row in _json_lines(file):
        moment = float(row.get("arrival_s", 0.0))
        first_s = moment if first_s is None else first_s
        input_len = int(row["input_len"]) if "input_len" in row else count_tokens(row["prompt"])
        yield _row(number, moment - first_s, input_len, int(row["output_len"]))


def _json_lines(file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, json.loads(line)


def _row(
    number: int, arrival_s: float, input_len: int, output_len: int, blocks: tuple[int, ...] = ()
) -> TraceRow:
    if max(input_len, output_len) > MAX_LENGTH:
        raise ValueError(f"line {number} has a length above {MAX_LENGTH} tokens")
    if min(input_len, output_len) < 0 or not 0 <= arrival_s < math.inf:
        raise ValueError(f"line {number} has a negative length, goes back in time or never comes")
    return TraceRow(arrival_s=arrival_s, input_len=input_len, output_len=output_len, blocks=blocks)


_READERS = {
    "azure": _azure_rows,
    "mooncake": _mooncake_rows,
    "sharegpt": _sharegpt_rows,
    "custom": _custom_rows,
}
_NEEDS = {
    "auto": "Give a text file in UTF-8, unpacked: CSV of Azure, or JSON lines.",
    "azure": "The file needs the columns TIMESTAMP, ContextTokens and GeneratedTokens.",
    "mooncake": "Each line needs timestamp (ms), input_length and output_length, and may have hash_ids.",
    "sharegpt": "The file needs a list of objects with conversations, each a list of from and value.",
    "custom": "Each line needs input_len or prompt, and output_len, and may have arrival_s.",
}
