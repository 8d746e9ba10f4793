"""Row R1 on the client's side: the ledger finds every way to lose, double or cut a token."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fake_completions_server import completion_events
from penstock.cli.bench.ledger import DONE, StreamAccount, audit, faults
from penstock.workloads.requests import BenchRequest


def request(index: int = 0, output_len: int = 4) -> BenchRequest:
    return BenchRequest(index=index, arrival_s=0.0, prompt_token_ids=[5, 6, 7], output_len=output_len)


def good_events(index: int = 0, output_len: int = 4, per_chunk: int = 1) -> list[bytes]:
    body = {"max_tokens": output_len, "prompt": [5, 6, 7]}
    return [event for event in completion_events(body, index, per_chunk) if event is not None]


def account_of(events: list[bytes], index: int = 0) -> StreamAccount:
    account = StreamAccount(index=index)
    for moment, event in enumerate(events):
        account.event(event, float(moment))
    return account


def changed(event: bytes, **fields: Any) -> bytes:
    return json.dumps(json.loads(event) | fields).encode()


@pytest.mark.parametrize("per_chunk", [1, 3, 4])
def test_r1_a_stream_in_order_has_no_fault(per_chunk: int) -> None:
    account = account_of(good_events(per_chunk=per_chunk))
    assert faults(request(), account) == []
    assert account.ok
    assert account.token_ids == [0, 1, 2, 3]


def test_r1_a_lost_token_is_found() -> None:
    events = good_events()
    del events[2]
    assert any("1 tokens lost" in fault for fault in faults(request(), account_of(events)))


def test_r1_a_doubled_token_is_found() -> None:
    events = good_events()
    events.insert(2, events[1])
    assert any("1 tokens too many" in fault for fault in faults(request(), account_of(events)))


def test_r1_a_wrong_usage_is_found() -> None:
    events = good_events()
    usage = {"prompt_tokens": 3, "completion_tokens": 5}
    events[-2] = changed(events[-2], usage=usage)
    assert faults(request(), account_of(events)) == [
        "usage says (3, 5) prompt and output tokens, counted (3, 4)"
    ]
    del events[-2]
    assert faults(request(), account_of(events)) == ["no usage"]


def test_r1_a_second_finish_and_a_missing_one_are_found() -> None:
    events = good_events()
    finish = events[4]
    assert any(
        "finish reasons" in fault
        for fault in faults(request(), account_of([*events[:5], finish, *events[5:]]))
    )
    assert any("finish reasons" in fault for fault in faults(request(), account_of(events[:4] + events[5:])))


def test_r1_done_must_come_once_and_last() -> None:
    events = good_events()
    assert any("0 [DONE]" in fault for fault in faults(request(), account_of(events[:-1])))
    assert any("2 [DONE]" in fault for fault in faults(request(), account_of([*events, DONE])))
    after = [*events[:-2], DONE, events[-2]]
    assert "1 events after [DONE]" in faults(request(), account_of(after))


def test_r1_chunks_of_another_stream_are_found() -> None:
    events = good_events()
    events[1] = changed(events[1], id="cmpl-other")
    assert "chunks of 2 streams in one answer" in faults(request(), account_of(events))


def test_r1_an_early_stop_is_found() -> None:
    events = good_events(output_len=3)
    events[3] = json.dumps({"id": "cmpl-0", "choices": [{"index": 0, "finish_reason": "stop"}]}).encode()
    found = faults(request(), account_of(events))
    assert any("1 tokens lost" in fault for fault in found)
    assert any("finish reasons ['stop']" in fault for fault in found)


def test_r1_a_changed_prompt_is_found() -> None:
    events = good_events()
    choice = {"index": 0, "text": "", "prompt_token_ids": [5, 6, 8]}
    events.insert(0, json.dumps({"id": "cmpl-0", "choices": [choice]}).encode())
    assert faults(request(), account_of(events)) == ["the server returned other token ids for the prompt"]


def test_r1_a_typed_error_is_accounted_for_but_not_when_done_follows() -> None:
    error = json.dumps({"error": {"message": "stage lost", "type": "x", "param": None, "code": "y"}}).encode()
    account = account_of([*good_events()[:2], error])
    assert faults(request(), account) == []
    assert account.error is not None
    assert account.error.message == "stage lost"
    assert not account.ok
    assert faults(request(), account_of([error, DONE])) == ["an error event is followed by [DONE]"]


def test_r1_a_refusal_needs_an_error_object() -> None:
    account = StreamAccount(index=0)
    account.refused(
        429, b'{"error":{"message":"full","type":"rate_limit_error","param":null,"code":"queue_full"}}'
    )
    assert faults(request(), account) == []
    bare = StreamAccount(index=0)
    bare.refused(500, b"oops")
    assert faults(request(), bare) == ["HTTP 500 without an error object: b'oops'"]


def test_r1_two_requests_with_one_stream_id_are_found() -> None:
    requests = [request(0), request(1)]
    result = audit(requests, [account_of(good_events(0), 0), account_of(good_events(0), 1)])
    assert result.violations == ["requests 0 and 1 got the same stream 'cmpl-0'"]


def test_r1_a_request_without_answer_and_one_with_two_are_found() -> None:
    requests = [request(0), request(1)]
    assert audit(requests, [account_of(good_events(0), 0)]).violations == ["request 1: 0 answers"]
    twice = [account_of(good_events(0), 0), account_of(good_events(0), 0), account_of(good_events(1), 1)]
    assert audit(requests, twice).violations == ["request 0: 2 answers"]
    swapped = [account_of(good_events(0), 0), account_of(good_events(0), 0)]
    assert audit(requests, swapped).violations == ["request 0: 2 answers", "request 1: 0 answers"]


def test_audit_counts_tokens_and_errors() -> None:
    failed = StreamAccount(index=1)
    failed.refused(503, b'{"error":{"message":"draining"}}')
    result = audit([request(0), request(1)], [account_of(good_events(0), 0), failed])
    assert (result.num_requests, result.num_tokens, result.num_errors, result.violations) == (2, 4, 1, [])


def test_gaps_are_between_chunks_that_carry_tokens() -> None:
    account = account_of(good_events(output_len=4, per_chunk=2))
    assert (account.first_token_s, account.last_token_s, account.chunk_gaps_s) == (0.0, 1.0, [1.0])


def test_data_that_is_no_chunk_is_an_error() -> None:
    with pytest.raises(msgspec.MsgspecError):
        StreamAccount(index=0).event(b"{not json", 0.0)
