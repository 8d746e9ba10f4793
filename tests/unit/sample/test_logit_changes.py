"""Penalties, biases, allowed ids and bad words (D6, G8) against plain loops, and against transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from head_requests import request
from kernel_builds import built
from penstock.batch import LogitChanges, RowSampling
from penstock.distributed.group import MemoryGroup, TensorGroup
from penstock.distributed.share import vocab_share
from penstock.kernels.candidate_shares import merged, request_of_share
from penstock.kernels.candidates import HeadOutput, HeadRequest, constrained, head_output_of
from penstock.kernels.cpu.abi import FLOAT32
from penstock.kernels.cpu.head import Head, dense_product
from penstock.sample.logit_changes import TokenHistory
from penstock.sample.sampler import Sampler
from penstock.sample.sampling_rows import SamplingBatch, SamplingRows
from tensor_ranks import joined, together

VOCAB, HIDDEN, WIDTH = 150, 8, 64


@dataclass
class Table:
    """The rows of a rank, as a test fills them."""

    token_ids: np.ndarray
    prompt_len: np.ndarray
    sampling: SamplingRows

    @classmethod
    def make(cls, num_rows: int) -> Table:
        token_ids = np.zeros((num_rows, WIDTH), dtype=np.int64)
        prompt_len = np.zeros(num_rows, dtype=np.int64)
        history = TokenHistory(token_ids=token_ids, prompt_len=prompt_len)
        return cls(token_ids, prompt_len, SamplingRows(history, VOCAB))

    def enter(self, row: int, prompt: list[int], output: list[int], sampling: RowSampling) -> None:
        known = [*prompt, *output]
        self.token_ids[row] = -7  # whatever was there before
        self.token_ids[row, : len(known)] = known
        self.prompt_len[row] = len(prompt)
        self.sampling.add(row, sampling)

    def append(self, row: int, index: int, token_id: int) -> None:
        self.token_ids[row, self.prompt_len[row] + index] = token_id

    def batch(self, rows: list[int], index: list[int]) -> SamplingBatch:
        return self.sampling.batch(np.array(rows), np.array(index))


def row_sampling(changes: LogitChanges | None, **others: object) -> RowSampling:
    values = {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "min_tokens": 0,
        "suppressed_ids": [], "num_logprobs": -1,
    }  # fmt: skip
    return RowSampling(**{**values, **others}, changes=changes)


def oracle(logits: list[float], prompt: list[int], output: list[int], sampling: RowSampling) -> list[float]:
    """The formula of the module's text, id by id."""
    changes, found = sampling.changes or LogitChanges(), []
    for token_id, value in enumerate(logits):
        logit, count = np.float32(value), output.count(token_id)
        if token_id in prompt or count:
            penalty = np.float32(changes.repetition_penalty)
            logit = logit / penalty if logit > 0 else logit * penalty
        added = changes.bias.get(token_id, 0.0) - changes.frequency_penalty * count
        logit = logit + np.float32(added - changes.presence_penalty * (count > 0))
        if len(output) < sampling.min_tokens and token_id in sampling.suppressed_ids:
            logit = -math.inf
        if any(output[len(output) - len(w) + 1 :] == w[:-1] for w in changes.bad_words if w[-1] == token_id):
            logit = -math.inf
        if changes.allowed_ids is not None and token_id not in changes.allowed_ids:
            logit = -math.inf
        found.append(float(logit))
    return found


def random_row(rng: np.random.Generator) -> tuple[list[int], list[int], RowSampling]:
    """A prompt, an output, and changes of which each may be absent. Few ids, so that they come again."""
    prompt, output = (rng.integers(0, 30, rng.integers(low, 20)).tolist() for low in (1, 0))
    penalty = lambda values: float(rng.choice(values))  # noqa: E731
    allowed = rng.choice(VOCAB, 40, replace=False).tolist() if rng.random() < 0.3 else None
    words = [rng.integers(0, 30, length).tolist() for length in (1, 1, 2, 2, 3)]
    words += [[*output[-length:], int(rng.integers(0, VOCAB))] for length in (1, 2, 3) if output]
    words.append([prompt[-1], *output, int(rng.integers(0, VOCAB))])  # begins in the prompt: is none
    bias = dict(zip(rng.integers(0, VOCAB, 6).tolist(), rng.uniform(-9, 9, 6).tolist(), strict=True))
    changes = LogitChanges(
        presence_penalty=penalty([0, 0, 0.3, -2]),
        frequency_penalty=penalty([0, 0, 0.7, -0.1]),
        repetition_penalty=penalty([1, 1, 1.3, 0.4]),
        bias=bias if rng.random() < 0.5 else {},
        allowed_ids=allowed,
        bad_words=words if rng.random() < 0.5 else [],
    )
    num_candidates = int(rng.choice([0, 1, 9, 200]))
    return prompt, output, row_sampling(
        changes if rng.random() < 0.8 else None,
        temperature=0.0 if num_candidates == 1 else 0.9,
        top_k=num_candidates,
        min_tokens=int(rng.integers(0, 25)),
        suppressed_ids=sorted(set(rng.integers(0, VOCAB, 4).tolist())),
        seed=int(rng.integers(1 << 40)),
    )  # fmt: skip


def hidden_and_weight(seed: int, num_rows: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, HIDDEN, generator=numbers), torch.randn(VOCAB, HIDDEN, generator=numbers)


def by_kernel(x: Tensor, weight: Tensor, wanted: HeadRequest) -> HeadOutput:
    packed = torch.zeros(-(-len(weight) // 32) * 32 * HIDDEN)
    built().penstock_pack(weight.data_ptr(), packed.data_ptr(), 0, len(weight), HIDDEN, 0, FLOAT32)
    return Head(built()).answer(x, dense_product(packed.data_ptr(), HIDDEN, len(weight), x.dtype), wanted)


def by_shares(logits: Tensor, wanted: HeadRequest) -> list[HeadOutput]:
    """Three ranks, each with its part of the vocabulary."""

    def answer(group: TensorGroup) -> HeadOutput:
        ids = vocab_share(VOCAB, group.rank, 3)
        own = head_output_of(logits[:, ids.start : ids.end].contiguous(), request_of_share(wanted, ids))
        return merged(own, wanted, ids, group)

    groups = [MemoryGroup(rank, 3, name="last", timeout_s=10) for rank in range(3)]
    return together(joined(groups), answer)


def assert_same(found: HeadOutput, expected: HeadOutput) -> None:
    for name in ("ids", "values", "is_finite"):
        assert np.array_equal(getattr(found.candidates, name), getattr(expected.candidates, name)), name


@pytest.mark.parametrize("seed", range(25))
def test_d6_g8_kernel_torch_and_shares_find_the_candidates_of_plain_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng) for _ in range(6)]
    table = Table.make(6)
    for row, (prompt, output, sampling) in enumerate(rows):
        table.enter(row, prompt, output, sampling)
    batch = table.batch(list(range(6)), [len(output) for _, output, _ in rows])
    x, weight = hidden_and_weight(seed, 6)
    whole = by_kernel(x, weight, _wanting_all(batch.head)).logits
    expected = head_output_of(whole, batch.head)
    assert_same(by_kernel(x, weight, batch.head), expected)
    for found in by_shares(whole, batch.head):
        assert_same(found, expected)
    changed = constrained(whole, batch.head, np.arange(6))
    for row, (prompt, output, sampling) in enumerate(rows):
        values = oracle(whole[row].tolist(), prompt, output, sampling)
        assert changed[row].tolist() == values
        best = sorted((i for i in range(VOCAB) if values[i] > -math.inf), key=lambda i: (-values[i], i))
        count = int(batch.head.num_candidates[row])
        ids = [i for i in expected.candidates.ids[row].tolist() if i >= 0]
        assert ids == best[:count]


def test_b7_of_equal_logits_of_several_ranks_the_lower_id_comes_first() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).integers(0, 4, (5, VOCAB)).astype(np.float32))
    wanted = request([1, 1, 2, 9, 60], bias={4: dict.fromkeys(range(120), -math.inf)})
    expected = head_output_of(logits, wanted)
    for found in by_shares(logits, wanted):
        assert_same(found, expected)


def _wanting_all(head: HeadRequest) -> HeadRequest:
    ones = np.ones(len(head), dtype=np.bool_)
    return HeadRequest(num_candidates=head.num_candidates, wants_logits=ones, bias=head.bias)


@pytest.mark.parametrize("seed", range(12))
def test_d6_counting_token_by_token_is_counting_all_at_once(seed: int) -> None:
    """As for a row that goes on, and for one that was preempted and came back with what it had."""
    rng = np.random.default_rng(100 + seed)
    prompt, _, sampling = random_row(rng)
    kept = Table.make(2)
    kept.enter(1, prompt, [], sampling)
    for index in range(WIDTH - len(prompt)):
        found = kept.batch([1], [index]).head
        anew = Table.make(2)
        anew.enter(0, prompt, kept.token_ids[1, len(prompt) : len(prompt) + index].tolist(), sampling)
        expected = anew.batch([0], [index]).head
        for name in ("starts", "ids", "values", "scales"):
            assert np.array_equal(getattr(found.bias, name), getattr(expected.bias, name)), name
        kept.append(1, index, int(rng.integers(0, 40)))


def test_d6_a_row_that_is_given_out_again_knows_nothing_of_before() -> None:
    table = Table.make(1)
    table.enter(0, [3, 4], [], row_sampling(LogitChanges(repetition_penalty=2.0, bias={9: 1.0})))
    assert table.batch([0], [0]).head.bias.ids.tolist() == [3, 4, 9]
    table.enter(0, [5], [6, 6], row_sampling(LogitChanges(frequency_penalty=0.5)))
    bias = table.batch([0], [2]).head.bias
    assert (bias.ids.tolist(), bias.values.tolist(), bias.scales.tolist()) == ([6], [-1.0], [1.0])
    table.enter(0, [5], [], row_sampling(None))
    head = table.batch([0], [0]).head
    assert (len(head.bias.ids), head.allowed) == (0, None)


def test_rows_without_changes_cost_nothing_and_keep_their_request() -> None:
    table = Table.make(2)
    for row in range(2):
        table.enter(row, [1], [], row_sampling(None))
    first = table.batch([0, 1], [0, 0])
    assert table.batch([0, 1], [1, 1]) is first
    assert first.head.bias.scales is None


def test_each_row_may_get_what_its_list_allows_and_nothing_suppressed() -> None:
    history = TokenHistory(token_ids=np.zeros((3, 9), dtype=np.int64), prompt_len=np.ones(3, dtype=np.int64))
    table = SamplingRows(history, VOCAB)
    for row, ids in enumerate([[7, 8, 149], [7, 8, 148], None]):
        table.add(row, row_sampling(LogitChanges(allowed_ids=ids), min_tokens=1, suppressed_ids=[8]))
    head = table.batch(np.array([0, 2, 1]), np.array([0, 0, 0])).head
    left = constrained(torch.zeros(3, VOCAB), head, np.arange(3)) == 0
    found = [row.nonzero()[:, 0].tolist() for row in left]
    assert found == [[7, 149], [i for i in range(VOCAB) if i != 8], [7, 148]]
    later = table.batch(np.array([1]), np.array([1])).head
    assert (constrained(torch.zeros(1, VOCAB), later, np.arange(1)) == 0).nonzero()[:, 1].tolist() == [
        7,
        8,
        148,
    ]


def test_g8_repetition_is_that_of_transformers() -> None:
    numbers = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(4, VOCAB, generator=numbers)
    known = torch.randint(0, VOCAB, (4, 20), generator=numbers)
    for penalty in (1.3, 0.6):
        table = Table.make(4)
        for row in range(4):
            ids = known[row].tolist()
            table.enter(row, ids[:12], ids[12:], row_sampling(LogitChanges(repetition_penalty=penalty)))
        head = table.batch([0, 1, 2, 3], [8] * 4).head
        expected = RepetitionPenaltyLogitsProcessor(penalty)(known, logits.clone())
        assert torch.equal(constrained(logits, head, np.arange(4)), expected)


def test_g8_presence_and_frequency_are_those_of_openai() -> None:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, c of the sampled tokens alone."""
    table = Table.make(1)
    changes = LogitChanges(presence_penalty=0.5, frequency_penalty=0.25)
    table.enter(0, [1, 1, 2], [2, 3, 3], row_sampling(changes))
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, -5.0]])
    found = constrained(logits, table.batch([0], [3]).head, np.arange(1))
    assert found.tolist() == [[1.0, 2.0, 3.0 - 0.25 - 0.5, 4.0 - 0.5 - 0.5, -5.0]]


@pytest.mark.parametrize("penalty", [1e-300, 1e-9])
def test_the_smallest_repetition_penalty_makes_no_row_fail(penalty: float) -> None:
    table = Table.make(1)
    table.enter(0, [3], [], row_sampling(LogitChanges(repetition_penalty=penalty), temperature=2.0))
    batch = table.batch([0], [0])
    drawn = Sampler().sample(head_output_of(torch.full((1, VOCAB), 30.0), batch.head), batch, np.array([0]))
    assert (drawn.token_ids, drawn.failed) == ([3], [])


def test_log_probabilities_stay_those_of_the_model() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    best = int(logits.argmax())
    table = Table.make(1)
    changes = LogitChanges(bias={best: -100.0}, allowed_ids=[best, 7])
    table.enter(0, [1], [], row_sampling(changes, num_logprobs=1))
    batch = table.batch([0], [0])
    drawn = Sampler().sample(head_output_of(logits, batch.head), batch, np.array([0]))
    assert drawn.token_ids == [7]
    entry, expected = drawn.logprobs[0], logits.log_softmax(-1)[0]
    assert (entry.top_ids, entry.top_logprobs) == ([best], [expected[best].item()])
    assert entry.logprob == expected[7].item()


@pytest.mark.parametrize("seed", range(10))
def test_d7_drafts_count_for_the_samples_behind_them_and_for_no_other(seed: int) -> None:
    """Windows whose drafts are right, wrong or half right change logits as the same tokens one by one do."""
    rng = np.random.default_rng(seed)
    rows = [random_row(rng) for _ in range(3)]
    table = Table.make(len(rows))
    for row, (prompt, output, sampling) in enumerate(rows):
        table.enter(row, prompt, output, sampling)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    for _ in range(6):
        drafts = [rng.integers(0, 30, rng.integers(0, 4)).tolist() for _ in rows]
        for row, (prompt, output, _) in enumerate(rows):
            start = len(prompt) + len(output)
            table.token_ids[row, start : start + len(drafts[row])] = drafts[row]
        places = [(row, depth) for row, own in enumerate(drafts) for depth in range(len(own) + 1)]
        batch = table.batch([row for row, _ in places], [len(rows[row][1]) + depth for row, depth in places])
        found = constrained(logits.expand(len(places), -1), batch.head, np.arange(len(places)))
        for place, (row, depth) in enumerate(places):
            prompt, output, sampling = rows[row]
            expected = oracle(logits[0].tolist(), prompt, [*output, *drafts[row][:depth]], sampling)
            assert found[place].tolist() == expected
        for row, (prompt, output, _) in enumerate(rows):
            accepted = [*drafts[row][: rng.integers(0, len(drafts[row]) + 1)], int(rng.integers(0, 30))]
            accepted = accepted[: WIDTH - 8 - len(prompt) - len(output)]
            for token_id in accepted:
                table.append(row, len(output), token_id)
                output.append(token_id)
