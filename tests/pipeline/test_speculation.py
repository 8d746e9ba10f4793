"""Speculation changes no token and no log-probability, whatever the layout and however good the guesses are.

The reference is an engine without speculation. A drafter that knows its outputs guesses right as often as a
case says, so that windows of every outcome pass through every layout; the suffix drafter has cases, too,
and so has a draft model: the same one, with weights of four bits.
`./run test` takes some of a seeded pairwise draw, `./run soak` all of it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from random import Random
from typing import Any

import pytest

from depth import sampled
from drafters import wait_for_guesses, without_costs
from pairwise import Case, drawn
from paths import shared_data
from penstock import LLM, SamplingParams
from penstock.engine.core import core_assembly
from penstock.rank import loading
from penstock.request import StructuredOutputs
from penstock.runner.request_rows import RequestRows
from penstock.runner.row_state import RowState
from penstock.speculation.drafter import NO_DRAFT, Draft, LocalDrafter, Question
from penstock.speculation.suffix import SuffixDrafter

VOCAB_SIZE = 512
METHODS = ("suffix", "draft_model")  # that take part with their own guesses: a new drafter is a new entry
AXES = {
    "num_stages": (1, 2, 3, 4),
    "async_depth": (0, 1, 2),
    "chunk": (1, 7, 512),
    "num_drafts": (1, 2, 3, 5, 8),
    "chance": (*METHODS, 0.0, 0.5, 0.9, 1.0),
    "tensor_parallel": (1, 2),
    "block_size": (4, 32),
    "prefix_hits": (False, True),
    "max_num_seqs": (1, 3, 16),
}
CASES = drawn(AXES, least=20)
REPEATING = [1, *[403, 407, 261, 378] * 6]
PROMPTS = [[1, 403 + 7 * index, 407, 261 + 3 * index, *([378, 400] * index)] for index in range(9)] + [
    REPEATING
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "logprobs": 2},
    {"temperature": 1.0, "seed": 4, "top_p": 0.8, "min_tokens": 9},
    {
        "temperature": 0.7,
        "seed": 5,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 0, "logit_bias": {400: 1.5, 261: -2.0}},
    {"temperature": 1.0, "seed": 6, "top_k": 20, "bad_words": ["the", "and"], "stop_token_ids": [419, 264]},
    {"temperature": 1.0, "seed": 7, "min_p": 0.05, "allowed_token_ids": list(range(259, 460))},
    {"temperature": 0.0, "logprobs": 1},
    {
        "temperature": 0.9,
        "seed": 8,
        "structured_outputs": StructuredOutputs(regex="(Once|One) [a-z ,.]{1,80}!"),
    },
    {
        "temperature": 0.0,
        "logprobs": 0,
        "structured_outputs": StructuredOutputs(choice=["the cat sat on the mat"]),
    },
]


class Answers(LocalDrafter):
    """Knows the outputs of every prompt, and is right as often as it is told to be."""

    name = "answers"

    def __init__(self, outputs: Sequence[Sequence[int]], chance: float) -> None:
        self._texts = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, outputs, strict=True)]
        self._chance = chance

    def propose(self, question: Question) -> Draft:
        request, token_ids, most, *_ = question
        texts = [text for text in self._texts if text[: len(token_ids)] == token_ids]
        if not texts:
            return NO_DRAFT
        random = Random(f"{request} {len(token_ids)}")
        following = texts[0][len(token_ids) : len(token_ids) + most]
        right = [random.random() < self._chance for _ in following]
        guess = [
            (token + 1 - is_right) % VOCAB_SIZE for token, is_right in zip(following, right, strict=True)
        ]
        return Draft(guess, max(self._chance, 0.6))

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted

    def forget(self, request: int) -> None:
        """Nothing is kept."""


@contextmanager
def engine(**given: Any) -> Iterator[LLM]:
    options = {"dtype": "float32", "num_blocks": 400, "threads_per_rank": 1} | given
    with LLM(
        str(shared_data("models", "stories260K")), distributed_executor_backend="inprocess", **options
    ) as llm:
        yield llm


def generate(llm: LLM) -> list[tuple[list[int], object, str | None]]:
    sampling = [SamplingParams(max_tokens=24 + index, **given) for index, given in enumerate(SAMPLINGS)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling)
    return [
        (
            output.outputs[0].token_ids,
            [
                {token_id: entry.logprob for token_id, entry in position.items()}
                for position in output.outputs[0].logprobs or ()
            ],
            output.outputs[0].finish_reason,
        )
        for output in outputs
    ]


@cache
def reference(block_size: int, tensor_parallel: int) -> list[tuple[list[int], object, str | None]]:
    """Without speculation; these two change the last bits of log-probabilities, with it or without."""
    with engine(block_size=block_size, tensor_parallel_size=tensor_parallel) as llm:
        return generate(llm)


@pytest.mark.deep
@pytest.mark.parametrize("case", sampled(CASES, 10), ids=str)
def test_d5_d7_speculation_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, monkeypatch)


@pytest.mark.parametrize("method", METHODS)
def test_each_drafter_changes_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draw above may leave a drafter to the soak."""
    check_case((2, 1, 7, 5, method, 1, 4, False, 3), monkeypatch)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "draft_model"])
def test_each_drafter_guesses_where_a_text_repeats(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts above are short: in some layouts nothing in them is worth a guess.

    `test_draft_models` shows the same of a draft model, which needs a while to load.
    """
    wait_for_guesses(monkeypatch)
    prompt = {"prompt_token_ids": REPEATING}
    sampling = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    with engine() as llm:
        (plain,) = llm.generate([prompt], sampling)
    with engine(**chosen(method)) as llm:
        (output,) = llm.generate([prompt], sampling)
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        stats = llm.stats()
    assert stats is not None
    assert stats.scheduler.speculation.drafter == method
    assert stats.scheduler.speculation.num_drafted > 0


def chosen(method: str) -> dict[str, Any]:
    """The options of an engine with a method of `METHODS`."""
    if method != "draft_model":
        return {"speculative_method": method}
    model = str(shared_data("models", "stories260K"))
    return {"speculative_config": {"model": model, "quantization": "int4"}}


def check_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(zip(AXES, case, strict=True))
    expected = reference(given["block_size"], given["tensor_parallel"])
    is_own = given["chance"] in METHODS
    method = chosen(given["chance"] if is_own else "suffix")
    if not is_own:
        drafter = Answers([ids for ids, _, _ in expected], given["chance"])
        monkeypatch.setattr(core_assembly, "SuffixDrafter", lambda: drafter)
        monkeypatch.setattr(core_assembly, "DraftWindows", without_costs)
    with engine(
        pipeline_parallel_size=given["num_stages"],
        tensor_parallel_size=given["tensor_parallel"],
        async_depth=given["async_depth"],
        prefill_chunk=given["chunk"],
        block_size=given["block_size"],
        enable_prefix_caching=given["prefix_hits"],
        max_num_seqs=given["max_num_seqs"],
        num_speculative_tokens=given["num_drafts"],
        **method,
    ) as llm:
        rounds = [generate(llm) for _ in range(1 + given["prefix_hits"])]
        stats = llm.stats()
    assert all(outputs == expected for outputs in rounds)
    assert stats is not None
    told = stats.scheduler.speculation
    if is_own:
        assert told.drafter == given["chance"]
        return
    # Prompts that go token by token may be there all the time, and then nobody drafts.
    assert told.num_drafted > 0 or given["chunk"] == 1, "nobody drafted: the case shows nothing"
    if given["chance"] == 0.0 and given["tensor_parallel"] > 1:  # else what grammars force is right
        assert told.num_accepted == 0
    if 0.0 < given["chance"] < 1.0 and given["max_num_seqs"] == 1 and given["num_stages"] > 2:
        assert told.num_cancelled > 0, "windows of one stream follow each other, and some are void"
    if given["chance"] == 1.0:
        assert told.num_accepted > 0.9 * told.num_drafted


def test_suffix_drafts_are_used_where_a_text_repeats() -> None:
    with engine(speculative_method="suffix") as llm:
        prompt = {"prompt_token_ids": REPEATING}
        (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
        stats = llm.stats()
    with engine() as llm:
        (plain,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert stats is not None
    assert stats.scheduler.speculation.num_drafted > 0


class Silent(LocalDrafter):
    """Has no idea."""

    name = "silent"

    def propose(self, question: Question) -> Draft:
        return NO_DRAFT

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """What grammars force."""

    def forget(self, request: int) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("num_stages", [1, 3])
def test_what_a_grammar_forces_is_guessed_and_always_right(
    num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled texts of one schema, of which nobody guesses anything else."""
    monkeypatch.setattr(core_assembly, "SuffixDrafter", Silent)
    properties = {
        "name": {"enum": ["Ann", "Bob"]},
        "description": {"type": "string", "maxLength": 8},
        "available": {"type": "boolean"},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    structured = StructuredOutputs(json=json.dumps(schema))
    sampling = [
        SamplingParams(temperature=heat, seed=3, max_tokens=100, logprobs=1, structured_outputs=structured)
        for heat in (0.0, 1.0)
    ]
    prompts = [{"prompt_token_ids": [1, 403]}] * 2
    answers, told = [], []
    for method in ("off", "suffix"):
        with engine(speculative_method=method, pipeline_parallel_size=num_stages) as llm:
            outputs = llm.generate(prompts, sampling)
            stats = llm.stats()
        assert stats is not None
        told.append(stats.scheduler.speculation)
        answers.append([(output.outputs[0].text, output.outputs[0].logprobs) for output in outputs])
    assert answers[0] == answers[1]
    assert set(json.loads(answers[1][1][0])) == set(properties)
    num_tokens = sum(len(logprobs or ()) for _, logprobs in answers[1])
    assert told[1].num_accepted == told[1].num_drafted > num_tokens // 3
    forced = told[1].num_drafted, told[1].num_accepted
    assert told[1].by_drafter() == {"silent": (0, 0), "grammar": forced}


def test_the_drafter_of_the_core_is_the_suffix_drafter() -> None:
    assert core_assembly.SuffixDrafter is SuffixDrafter


class Coded(LocalDrafter):
    """Guesses the outputs of short prompts, right as often as the prompt's number says.

    Args:
        texts: prompt and output, by the prompt.
    """

    name = "coded"
    prompt_len = 4
    chances = (0.0, 0.5, 0.9, 1.0)

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        self._texts = texts
        self._chances = {prompt: self.chances[number % 4] for number, prompt in enumerate(texts)}

    def propose(self, question: Question) -> Draft:
        token_ids, most = question.token_ids, question.most
        prompt, known = tuple(token_ids[: self.prompt_len]), len(token_ids)
        text, chance = self._texts[prompt], self._chances[prompt]
        guess = []
        for position in range(known, min(known + most, len(text))):
            is_right = Random(f"{prompt} {position}").random() < chance
            guess.append((text[position] + 1 - is_right) % VOCAB_SIZE)
        return Draft(guess, max(chance, 0.6))

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted

    def forget(self, request: int) -> None:
        """Nothing is kept."""


def in_groups(llm: LLM, prompts: Sequence[tuple[int, ...]], seed: int) -> list[list[int]]:
    """Outputs of many short requests, of which some come alone and some together."""
    random, outputs = Random(seed), []
    while len(outputs) < len(prompts):
        group = prompts[len(outputs) : len(outputs) + random.choice([1, 1, 2, 3, 20, 40])]
        sampling = [
            SamplingParams(
                temperature=random.choice([0.0, 1.0]),
                seed=random.randrange(9),
                max_tokens=random.randint(1, 14),
            )
            for _ in group
        ]
        found = llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in group], sampling, use_tqdm=False
        )
        outputs += [output.outputs[0].token_ids for output in found]
    return outputs


def check_short_requests(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [(1, 259 + number // 200, 259 + number % 200, 403) for number in range(count)]
    with engine(max_num_seqs=16) as llm:
        expected = in_groups(llm, prompts, seed=1)
    texts = {prompt: [*prompt, *ids] for prompt, ids in zip(prompts, expected, strict=True)}
    monkeypatch.setattr(core_assembly, "SuffixDrafter", lambda: Coded(texts))
    monkeypatch.setattr(core_assembly, "DraftWindows", without_costs)
    with engine(
        max_num_seqs=16, pipeline_parallel_size=3, speculative_method="suffix", num_speculative_tokens=3
    ) as llm:
        found = in_groups(llm, prompts, seed=1)
        stats = llm.stats()
    assert found == expected
    assert stats is not None
    told = stats.scheduler.speculation
    assert 0 < told.num_accepted < told.num_drafted
    assert told.num_cancelled > 0
    assert stats.scheduler.num_running == 0


def test_many_short_requests_get_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    check_short_requests(300, monkeypatch)


@pytest.mark.soak
def test_ten_thousand_short_requests_get_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    check_short_requests(10_000, monkeypatch)


class Walk(RowState):
    """A machine that goes through each row's text token by token, and can go back to where it is told to.

    Attributes:
        certain: of each row, the positions that stay.
        ended: of the requests that have gone, how far they went, what was not told of included.
    """

    def __init__(self) -> None:
        self.certain: dict[int, int] = {}
        self.ended: list[int] = []
        self.num_back = 0
        self._open: dict[int, deque[tuple[int, int]]] = {}  # steps that were sampled and not told of

    def begin(self, row: int) -> None:
        self.drop(row)
        self._open[row] = deque()

    def step(
        self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int], are_sampled: Sequence[bool]
    ) -> None:
        for row, start, end, is_sampled in zip(rows, starts, ends, are_sampled, strict=True):
            steps = self._open[row]
            reached = steps[-1][1] if steps else self.certain.get(row, start)
            assert start == reached, "each position is run once, in order"
            if is_sampled:
                steps.append((start, end))
            else:
                self.certain[row] = end

    def commit(self, row: int, num_rejected: int) -> None:
        start, end = self._open[row].popleft()
        assert self.certain.get(row, start) == start, "steps are told of in order"
        assert 0 <= num_rejected <= end - start
        self.certain[row] = end - num_rejected
        self.num_back += num_rejected
        # What follows was run behind positions that were taken back.
        self._open[row] = deque(
            (first - num_rejected, last - num_rejected) for first, last in self._open[row]
        )

    def rewind(self, row: int, length: int) -> None:
        assert length >= self.certain[row], "what stays is not taken back"
        self.num_back += len(self._open[row])
        self._open[row].clear()
        self.certain[row] = length

    def drop(self, row: int) -> None:
        if row in self.certain:
            steps, certain = self._open[row], self.certain.pop(row)
            self.ended.append(steps[-1][1] if steps else certain)


@pytest.mark.parametrize(("num_stages", "max_num_seqs"), [(1, 4), (3, 1), (3, 4), (4, 2)])
def test_e11_a_state_sees_each_token_once(
    num_stages: int, max_num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every stage, with drafts of which half are wrong."""
    expected = reference(32, 1)
    walks: list[Walk] = []

    def rows_with_state(*given: Any, **more: Any) -> RequestRows:
        walks.append(Walk())
        return RequestRows(*given, **more, state=walks[-1])

    drafter = Answers([ids for ids, _, _ in expected], 0.5)
    monkeypatch.setattr(core_assembly, "SuffixDrafter", lambda: drafter)
    monkeypatch.setattr(core_assembly, "DraftWindows", without_costs)
    monkeypatch.setattr(loading, "RequestRows", rows_with_state)
    with engine(
        pipeline_parallel_size=num_stages,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
        speculative_method="suffix",
    ) as llm:
        assert generate(llm) == expected
        stats = llm.stats()
        llm.generate(
            [{"prompt_token_ids": [1]}] * max_num_seqs, SamplingParams(max_tokens=2)
        )  # rows are freed
    assert len(walks) == num_stages
    assert stats is not None
    lengths = [len(prompt) + len(ids) - 1 for prompt, (ids, _, _) in zip(PROMPTS, expected, strict=True)]
    for walk in walks:
        assert walk.num_back > 0
        assert all(any(length <= ended for ended in walk.ended) for length in lengths)
    first = walks[0]
    assert len(first.ended) >= len(PROMPTS)
