"""The sampler against a plain oracle that sorts everything, and against statistics."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernel_builds import built
from penstock.batch import RowSampling
from penstock.kernels.candidates import head_output_of
from penstock.kernels.cpu.abi import BFLOAT16
from penstock.kernels.cpu.head import Head, dense_product
from penstock.sample.logit_changes import TokenHistory
from penstock.sample.sampler import NO_TOKEN, SampleOutput, Sampler
from penstock.sample.sampling_rows import MAX_CANDIDATES, SamplingBatch, SamplingRows
from penstock.sample.truncation import SORTED_WIDTHS
from penstock.sample.uniform import uniform

torch.set_num_threads(1)


def sampling(**changes: object) -> RowSampling:
    values = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "min_tokens": 0,
        "suppressed_ids": [],
        "num_logprobs": -1,
    }
    return RowSampling(**{**values, **changes})


def table_of(num_rows: int, vocab_size: int = 0) -> SamplingRows:
    """Of rows in which nothing was asked nor generated."""
    nothing = TokenHistory(
        token_ids=np.zeros((num_rows, 9), dtype=np.int64), prompt_len=np.zeros(num_rows, dtype=np.int64)
    )
    return SamplingRows(nothing, vocab_size)


def params(rows: list[RowSampling], index: list[int] | None = None) -> SamplingBatch:
    table = table_of(len(rows))
    for row, entry in enumerate(rows):
        table.add(row, entry)
    return table.batch(np.arange(len(rows)), indices(rows, index))


def indices(rows: list[RowSampling], index: list[int] | None = None) -> np.ndarray:
    return np.array(index or [0] * len(rows))


def sample(logits: torch.Tensor, rows: list[RowSampling], index: list[int] | None = None) -> SampleOutput:
    given = params(rows, index)
    return Sampler().sample(head_output_of(logits, given.head), given, indices(rows, index))


def random_logits(num_rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


def oracle_kept(logits: torch.Tensor, entry: RowSampling) -> dict[int, float]:
    """Ids that may be drawn, in falling order, with their probabilities: loops and a full sort."""
    scaled = [x / np.float32(entry.temperature) for x in logits.tolist()]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    total = sum(weights)
    order = sorted(range(len(scaled)), key=lambda i: -weights[i])
    probs = {i: weights[i] / total for i in order}
    likeliest = probs[order[0]]
    probs = {i: p for i, p in probs.items() if p >= entry.min_p * likeliest}
    if entry.top_k > 0:
        probs = dict(list(probs.items())[: entry.top_k])
    if entry.top_p < 1.0:
        mass, before, kept = sum(probs.values()), 0.0, {}
        for i, p in probs.items():
            if before < entry.top_p * mass:
                kept[i] = p
            before += p
        probs = kept
    return probs


def oracle_draw(logits: torch.Tensor, entry: RowSampling, index: int) -> int:
    kept = oracle_kept(logits, entry)
    seed = np.array([entry.seed % 2**64], dtype=np.uint64)
    target = uniform(seed, np.array([index]))[0] * sum(kept.values())
    sofar = 0.0
    for token_id, p in kept.items():
        sofar += p
        if sofar > target:
            return token_id
    return token_id


CUTS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 0.7},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"top_p": 0.999, "temperature": 1.9},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("vocab", [37, 512])
def test_truncated_draws_equal_the_oracle(cut: dict[str, float], vocab: int) -> None:
    logits = random_logits(40, vocab)
    rows = [sampling(seed=row, **cut) for row in range(40)]
    index = list(range(40))
    expected = [oracle_draw(logits[row], rows[row], row) for row in range(40)]
    assert sample(logits, rows, index).token_ids == expected


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": 2000},
        {"top_k": 3000},
        {"top_p": 0.97},
        {"top_p": 0.5},
        {"min_p": 1e-6, "top_p": 0.9},
        {"min_p": 0.3},
    ],
    ids=str,
)
def test_a_wide_vocabulary_is_cut_exactly_where_a_full_sort_cuts(cut: dict[str, float]) -> None:
    logits = 0.5 * random_logits(
        6, 2 * SORTED_WIDTHS[-1]
    )  # flat: more tokens are kept than are sorted at first
    rows = [sampling(seed=100 + row, **cut) for row in range(6)]
    expected = [oracle_draw(logits[row], rows[row], 0) for row in range(6)]
    assert sample(logits, rows).token_ids == expected


def test_draws_from_the_whole_distribution_have_its_frequencies() -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    count = 8000
    rows = [sampling(seed=5)] * count
    drawn = sample(probs.log().repeat(count, 1), rows, list(range(count))).token_ids
    found = np.bincount(drawn, minlength=5) / count
    assert np.allclose(found, probs.numpy(), atol=0.02)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 50, "temperature": 0.8}], ids=str)
def test_a_token_does_not_depend_on_its_company(cut: dict[str, float]) -> None:
    logits = random_logits(24, SORTED_WIDTHS[-1])
    rows = [sampling(seed=row, **cut) for row in range(24)]
    rows[3] = sampling(temperature=0.0)
    rows[7] = sampling(top_k=1500, seed=9)
    together = sample(logits, rows, list(range(24))).token_ids
    alone = [sample(logits[i : i + 1], rows[i : i + 1], [i]).token_ids[0] for i in range(24)]
    assert together == alone


@pytest.mark.parametrize(
    "cut",
    [
        {"temperature": 0.0},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": MAX_CANDIDATES},
        {"top_k": MAX_CANDIDATES + 1},
        {"min_p": 0.01},
        {},
    ],
    ids=str,
)
def test_logprobs_never_change_a_token(cut: dict[str, float]) -> None:
    logits = random_logits(12, 600).bfloat16().float()  # coarse: many are equal
    without = [sampling(seed=row, **cut) for row in range(12)]
    with_logprobs = [sampling(seed=row, num_logprobs=row % 3, **cut) for row in range(12)]
    assert sample(logits, with_logprobs).token_ids == sample(logits, without).token_ids


def test_whole_logits_are_asked_for_only_where_needed() -> None:
    rows = [
        sampling(temperature=0.0),
        sampling(temperature=0.0, top_k=900, top_p=0.1),
        sampling(top_k=50, top_p=0.9, min_p=0.1),
        sampling(top_k=MAX_CANDIDATES + 1),
        sampling(top_p=0.9),
        sampling(temperature=0.0, num_logprobs=0),
    ]
    head = params(rows).head
    assert head.num_candidates.tolist() == [1, 1, 50, 0, 0, 1]
    assert head.wants_logits.tolist() == [False, False, False, True, True, True]


def test_equal_candidates_are_drawn_in_the_order_of_their_ids() -> None:
    logits = torch.zeros(200, 60)
    rows = [sampling(top_k=4, seed=seed) for seed in range(200)]
    assert set(sample(logits, rows).token_ids) == {0, 1, 2, 3}


def test_the_kernel_leads_to_the_same_tokens_as_whole_logits() -> None:
    numbers = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(size, 24, generator=numbers).bfloat16() for size in (10, 700))
    packed = torch.zeros(22 * 32 * 24, dtype=torch.bfloat16)
    built().penstock_pack(weight.data_ptr(), packed.data_ptr(), 0, 700, 24, 0, BFLOAT16)
    cuts = [
        {"temperature": 0.0},
        {"top_k": 50, "top_p": 0.9},
        {},
        {"top_k": 300},
        {"top_k": 7, "num_logprobs": 2},
    ]
    rows = [
        sampling(seed=i, suppressed_ids=[3, 500], min_tokens=i % 2, **cut) for i, cut in enumerate(cuts * 2)
    ]
    given = params(rows)
    found = Head(built()).answer(x, dense_product(packed.data_ptr(), x.shape[1], 700, x.dtype), given.head)
    every = replace(given.head, wants_logits=np.ones(10, dtype=np.bool_))
    logits = Head(built()).answer(x, dense_product(packed.data_ptr(), x.shape[1], 700, x.dtype), every).logits
    expected = Sampler().sample(head_output_of(logits, given.head), given, indices(rows))
    assert Sampler().sample(found, given, indices(rows)) == expected
    assert expected.failed == []


@pytest.mark.parametrize(
    "cut", [{"temperature": 0.0}, {"top_k": 9}, {}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str
)
def test_a_row_with_nothing_left_to_draw_fails_alone(cut: dict[str, float]) -> None:
    logits = random_logits(3, 40)
    rows = [sampling(seed=row, min_tokens=1, suppressed_ids=list(range(40)), **cut) for row in range(3)]
    found = sample(logits, rows, [1, 0, 1])
    assert found.failed == [1]
    assert found.token_ids[1] == NO_TOKEN
    assert found.token_ids[::2] == sample(logits[::2], rows[::2], [1, 1]).token_ids


def test_seed_and_output_index_alone_decide() -> None:
    logits = random_logits(1, 512).repeat(4, 1) / 3
    same = sample(logits, [sampling(seed=1)] * 4, [3, 3, 3, 3]).token_ids
    assert len(set(same)) == 1
    by_index = sample(logits.repeat(16, 1), [sampling(seed=1)] * 64, list(range(64))).token_ids
    by_seed = sample(logits.repeat(16, 1), [sampling(seed=s) for s in range(64)]).token_ids
    assert len(set(by_index)) > 10
    assert len(set(by_seed)) > 10
    assert (
        sample(logits[:1], [sampling(seed=-1)]).token_ids
        == sample(logits[:1], [sampling(seed=2**64 - 1)]).token_ids
    )


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = random_logits(3, 64)
    logits[1, [9, 40]] = 50.0
    expected = [int(logits[0].argmax()), 9, int(logits[2].argmax())]
    assert sample(logits, [sampling(temperature=0.0)] * 3).token_ids == expected
    mixed = [sampling(temperature=0.0), sampling(temperature=1e-6), sampling(temperature=2.0)]
    assert sample(logits, mixed).token_ids[:2] == expected[:2]


def test_ids_are_suppressed_before_min_tokens_only() -> None:
    logits = torch.tensor([[0.0, 9.0, 5.0, 1.0]]).repeat(4, 1)
    greedy = sampling(temperature=0.0, min_tokens=3, suppressed_ids=[1, 3])
    drawn = sampling(temperature=1.0, top_k=1, min_tokens=3, suppressed_ids=[1, 2])
    rows = [greedy, greedy, drawn, drawn]
    assert sample(logits, rows, [2, 3, 2, 3]).token_ids == [2, 1, 3, 1]


def test_suppressed_ids_are_never_drawn() -> None:
    logits = torch.zeros(400, 4)
    entry = sampling(min_tokens=1, suppressed_ids=[0, 3], top_p=0.999999)
    rows = [sampling(seed=s, min_tokens=1, suppressed_ids=[0, 3]) for s in range(200)] + [entry] * 200
    assert set(sample(logits, rows).token_ids) == {1, 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = random_logits(4, 128)
    rows = [sampling(temperature=t, num_logprobs=2) for t in (0.0, 0.0, 1.0, 1.0)]
    expected = sample(logits, rows)
    logits[1, 17] = bad
    logits[2, 5] = bad
    found = sample(logits, rows)
    assert found.failed == [1, 2]
    assert found.token_ids == [expected.token_ids[0], NO_TOKEN, NO_TOKEN, expected.token_ids[3]]
    assert found.logprobs[1:3] == [None, None]
    assert found.logprobs[0] == expected.logprobs[0]


def test_logprobs_are_raw_whatever_temperature_and_suppression() -> None:
    logits = random_logits(3, 64)
    best = int(logits[1].argmax())
    rows = [
        sampling(temperature=0.0),
        sampling(temperature=0.0, min_tokens=1, suppressed_ids=[best], num_logprobs=3),
        sampling(temperature=0.3, seed=4, num_logprobs=0),
    ]
    output = sample(logits, rows)
    assert output.logprobs[0] is None
    expected = torch.log_softmax(logits.double(), dim=-1)
    second = output.logprobs[1]
    assert second is not None
    assert second.rank == 2
    assert second.logprob == pytest.approx(expected[1, output.token_ids[1]].item(), abs=1e-5)
    top = expected[1].topk(3)
    assert second.top_ids == top.indices.tolist()
    assert second.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)
    third = output.logprobs[2]
    assert third is not None
    assert third.top_ids == []
    assert third.logprob == pytest.approx(expected[2, output.token_ids[2]].item(), abs=1e-5)
    assert third.rank == 1 + int((logits[2] > logits[2, output.token_ids[2]]).sum())


def test_parameters_of_the_same_rows_are_gathered_once_until_a_row_changes() -> None:
    table, rows, index = table_of(4), np.array([2, 0]), np.array([0, 5])
    table.add(0, sampling(temperature=0.0))
    table.add(2, sampling(temperature=0.0, min_tokens=2, suppressed_ids=[7]))
    assert table.batch(rows, index).head.bias.ids.tolist() == [7]
    later = table.batch(rows, index + 2)
    assert later.head.bias.ids.tolist() == []
    assert table.batch(rows, index + 3).head is later.head
    table.add(0, sampling(temperature=0.5))
    assert table.batch(rows, index + 4).temperature.tolist() == [0.0, 0.5]
    assert table.batch(rows[::-1].copy(), index + 4).temperature.tolist() == [0.5, 0.0]
