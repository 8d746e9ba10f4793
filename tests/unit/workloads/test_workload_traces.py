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
