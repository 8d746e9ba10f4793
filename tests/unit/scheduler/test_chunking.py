"""Tokens per plan: the arithmetic of chunks, quotas and masks (rows D4, E3)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.engine import SchedulerConfig
from penstock.scheduler.chunking import TokenBudget, yields_sample


def budget(*, tokens: int = 2048, chunk: int = 512, seqs: int = 64, num_stages: int = 1) -> TokenBudget:
    config = SchedulerConfig(max_num_batched_tokens=tokens, prefill_chunk=chunk, max_num_seqs=seqs)
    return TokenBudget.from_config(config, num_stages)


@pytest.mark.parametrize(
    ("tokens", "chunk", "seqs", "expected_chunk", "expected_decodes"),
    [
        (2048, 512, 64, 512, 1536),  # room for all: as configured
        (512, 512, 64, 448, 64),  # the chunk gives way to the rows that there may be
        (100, 64, 64, 50, 50),  # but to half of the plan at most
        (2, 512, 64, 1, 1),
        (1, 512, 64, 1, 1),  # a plan of one token cannot be shared
        (16, 1, 4, 1, 15),
    ],
)
def test_d4_a_plan_always_has_room_for_a_chunk_and_for_decodes(
    tokens: int, chunk: int, seqs: int, expected_chunk: int, expected_decodes: int
) -> None:
    found = budget(tokens=tokens, chunk=chunk, seqs=seqs)
    assert (found.chunk, found.max_decodes_beside_prefill) == (expected_chunk, expected_decodes)


@settings(derandomize=True, deadline=None)
@given(st.integers(2, 300), st.integers(1, 300), st.integers(1, 100), st.integers(1, 5))
def test_d4_neither_prefill_nor_decode_can_be_shut_out(
    tokens: int, chunk: int, seqs: int, num_stages: int
) -> None:
    found = budget(tokens=tokens, chunk=chunk, seqs=seqs, num_stages=num_stages)
    assert 1 <= found.chunk <= chunk
    quota = found.decode_quota(seqs, prefill_tokens=1)
    assert 1 <= quota <= seqs
    assert quota + found.chunk <= tokens


@pytest.mark.parametrize(
    ("num_decoding", "num_stages", "quota"),
    [(0, 2, 0), (1, 2, 1), (2, 2, 1), (3, 2, 2), (32, 2, 16), (33, 4, 9), (5, 1, 5)],
)
def test_e8_a_plan_takes_its_share_of_the_decodes(num_decoding: int, num_stages: int, quota: int) -> None:
    assert budget(num_stages=num_stages).decode_quota(num_decoding, prefill_tokens=0) == quota
    assert budget(num_stages=num_stages).decode_quota(num_decoding, prefill_tokens=9) == quota


def test_d4_decodes_make_room_only_while_prompts_are_to_run() -> None:
    small = budget(tokens=8, chunk=8, seqs=64)
    assert small.decode_quota(20, prefill_tokens=0) == 8
    assert small.decode_quota(20, prefill_tokens=1) == 4


@pytest.mark.parametrize(
    ("backlog", "num_stages", "share"),
    [(10, 2, 1), (1024, 2, 1), (1025, 2, 2), (4096, 4, 2), (4096, 2, 4), (8000, 1, 4)],
)
def test_a_burst_of_prompts_is_spread_over_the_stages(backlog: int, num_stages: int, share: int) -> None:
    prompts = budget(num_stages=num_stages).for_prompts(0, backlog)
    taken = [prompts.take(0, 512) for _ in range(6)]
    assert taken == [512] * share + [0] * (6 - share)


def test_d4_a_chunk_is_not_cut_to_what_is_left_of_a_plan() -> None:
    prompts = budget(tokens=2048, chunk=512).for_prompts(1500, 4096)
    assert [prompts.take(0, 600), prompts.take(0, 30), prompts.take(512, 40)] == [512, 30, 0]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 512])
@pytest.mark.parametrize("length", [1, 6, 7, 8, 14, 129])
def test_d4_chunks_are_cut_at_multiples_of_the_chunk_size(chunk: int, length: int) -> None:
    found = budget(chunk=chunk)
    start, sizes = 0, []
    while start < length:
        sizes.append(found.for_prompts(0, length - start).take(start, length - start))
        start += sizes[-1]
    assert sum(sizes) == length
    assert set(sizes[:-1]) <= {chunk}
    assert 1 <= sizes[-1] <= chunk


@pytest.mark.parametrize(
    ("end", "known_len", "max_len", "expected"),
    [
        (4, 5, 20, False),  # one token short of the prompt's end
        (5, 5, 20, True),  # the chunk ends exactly at the prompt's end
        (6, 5, 20, True),  # a decode
        (5, 5, 6, True),  # max_tokens = 1
        (5, 5, 5, False),  # max_tokens = 0: the final chunk meets the cap
        (4, 5, 5, False),
        (5, 5, 64, True),  # max_tokens = None: the model's length is the cap
    ],
)
def test_e3_truth_table_of_the_need_sampled_mask(
    end: int, known_len: int, max_len: int, expected: bool
) -> None:
    assert yields_sample(end, known_len, max_len) is expected
