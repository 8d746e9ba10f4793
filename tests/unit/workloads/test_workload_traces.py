"""Trace files of each kind: read, told apart, and refused with what they need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.workloads.requests import from_trace
from penstock.workloads.traces import TraceKind, TraceRow, read_trace


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_mooncake_prompts_begin_alike_where_their_blocks_are_the_same(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "mooncake.jsonl",
        {"timestamp": 2000, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 3500, "input_length": 1100, "output_length": 6, "hash_ids": [7, 8, 10]},
    )
    rows = read_trace(trace)
    assert [(row.arrival_s, row.input_len, row.output_len) for row in rows] == [
        (0.0, 1200, 5),
        (1.5, 1100, 6),
    ]
    one, other = from_trace(rows, length_scale=1, time_scale=1, vocab_size=1 << 15, seed=0)
    assert (len(one.prompt_token_ids), len(other.prompt_token_ids)) == (1200, 1100)
    assert one.prompt_token_ids[:1024] == other.prompt_token_ids[:1024]
    assert one.prompt_token_ids[1024:1100] != other.prompt_token_ids[1024:]


def test_sharegpt_counts_the_first_two_turns(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    turns = [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four"}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    rows = read_trace(path, count_tokens=lambda text: len(text.split()))
    assert rows == [TraceRow(arrival_s=0.0, input_len=3, output_len=1)]


def test_custom_rows_may_have_lengths_or_texts(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "own.jsonl",
        {"input_len": 12, "output_len": 3, "arrival_s": 5.0},
        {"prompt": "12345678", "output_len": 4, "arrival_s": 5.5},
    )
    assert read_trace(trace) == [
        TraceRow(arrival_s=0.0, input_len=12, output_len=3),
        TraceRow(arrival_s=0.5, input_len=2, output_len=4),
    ]


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("mooncake", '{"timestamp": 1}\n', "'input_length' is missing"),
        ("custom", '{"input_len": 1}\n', "'output_len' is missing"),
        ("custom", "[1]\n", "not a trace of kind custom"),
        ("custom", "no json\n", "not a trace of kind custom"),
        ("sharegpt", "{}", "has 0 requests"),
        ("custom", '{"input_len": 1, "output_len": 1, "arrival_s": NaN}\n', "goes back in time"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, kind: TraceKind, text: str, why: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UsageError, match=why):
        read_trace(path, kind=kind)


def test_all_rows_are_read_where_no_number_is_given(tmp_path: Path) -> None:
    trace = write(tmp_path / "own.jsonl", *[{"input_len": 1, "output_len": 1}] * 3)
    assert len(read_trace(trace)) == 3
    with pytest.raises(UsageError, match="at least 1"):
        read_trace(trace, 0)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("latin.jsonl", b'{"input_len": 5, "output_len": 5, "by": "\xfc"}\n', "is not a trace: 'utf-8'"),
        ("packed.gz", b"\x1f\x8b\x08\x00", "is not a trace: 'utf-8'"),
        ("chats.csv", b'[{"value": "' + 200_000 * b"x" + b'"}]', "field larger than"),
        ("deep.json", 100_000 * b"[", "recursion"),
        ("endless.jsonl", b'{"input_len": 5, "output_len": 1e999}\n', "infinity"),
        ("long.jsonl", b'{"input_len": 1000000000000, "output_len": 5}\n', "a length above"),
        (
            "never.jsonl",
            b'{"input_len": 5, "output_len": 5}\n{"input_len": 5, "output_len": 5, "arrival_s": Infinity}\n',
            "line 2 has a negative length, goes back in time or never comes",
        ),
    ],
)
def test_a_file_that_is_no_trace_at_all_is_refused(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=why) as refused:
        read_trace(path)
    assert refused.value.remedy


def test_a_trace_that_windows_has_written_is_read(tmp_path: Path) -> None:
    table, lines = tmp_path / "azure.csv", tmp_path / "own.jsonl"
    table.write_bytes(
        b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,30,10\r\n"
    )
    lines.write_bytes(b'\xef\xbb\xbf{"input_len": 30, "output_len": 10}\r\n')
    row = TraceRow(arrival_s=0.0, input_len=30, output_len=10)
    assert read_trace(table) == read_trace(lines) == [row]


def test_a_scale_that_makes_prompts_endless_is_refused() -> None:
    row = TraceRow(arrival_s=0.0, input_len=30, output_len=10)
    with pytest.raises(UsageError, match="--length-scale 1e-300"):
        from_trace([row], length_scale=1e-300, time_scale=1, vocab_size=9, seed=0)
