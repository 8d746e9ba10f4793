"""The cases that break pipelines, each with exact tokens, in every way to run a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from depth import sampled
from hf_reference import MODELS
from penstock import LLM, SamplingParams
from penstock.errors import PartitionError, UsageError

LAYERS = 4
NUM_REQUESTS = 7
Requests = list[tuple[list[int], SamplingParams]]


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def prompt(number: int, length: int) -> list[int]:
    return [(number * 31 + i * 7) % 60 + 1 for i in range(length)]


CASES: dict[str, Requests] = {
    "max_tokens is 1": [(prompt(i, 5 + i), greedy(1)) for i in range(NUM_REQUESTS)],
    "all end in the same step": [(prompt(i, 6), greedy(9)) for i in range(NUM_REQUESTS)],
    "one ends while the others of its micro-batch go on": [
        (prompt(i, 6), greedy(2 + 5 * (i % 3))) for i in range(NUM_REQUESTS)
    ],
    "a row is used again within P steps": [
        (prompt(i, 3), greedy(1 + i % 2)) for i in range(4 * NUM_REQUESTS)
    ],
    "a chunk ends just at the prompt's end": [(prompt(i, 8 * (1 + i % 2)), greedy(4)) for i in range(5)],
    "fewer requests than stages": [(prompt(1, 9), greedy(12))],
    "a long prompt among decodes": [
        *[(prompt(i, 4), greedy(20)) for i in range(4)],
        (prompt(9, 90), greedy(6)),
    ],
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one stage, two ahead": {"async_depth": 2},
    "two stages": {"pipeline_parallel_size": 2, "async_depth": 0},
    "two stages, unequal": {"pipeline_parallel_size": 2, "partition": "1,3", "async_depth": 1},
    "two stages, one micro-batch": {"pipeline_parallel_size": 2, "micro_batches": 1},
    "a layer a stage": {"pipeline_parallel_size": 4},
    "a layer a stage, two micro-batches": {"pipeline_parallel_size": 4, "micro_batches": 2, "async_depth": 1},
    "a deep pipe": {"pipeline_parallel_size": 3, "async_depth": 64},
    "no row to spare": {"pipeline_parallel_size": 3, "max_num_seqs": 2},
    "few blocks": {"pipeline_parallel_size": 2, "block_size": 4, "num_blocks": 26},
}


def engine(model: Path, **layout: Any) -> LLM:
    settings = {
        "dtype": "float32",
        "distributed_executor_backend": "inprocess",
        "num_blocks": 64,
        "block_size": 8,
        "threads_per_rank": 1,
        "prefill_chunk": 8,
        "max_num_seqs": 8,
        **layout,
    }
    return LLM(str(model), **settings)


def outcome(llm: LLM, requests: Requests) -> list[tuple[list[int], str | None]]:
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids, _ in requests], [sampling for _, sampling in requests]
    )
    return [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("edges")
    MODELS[1].make(directory)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[tuple[list[int], str | None]]]:
    """Each request alone, on one stage."""
    with engine(model, max_num_seqs=1, async_depth=0) as llm:
        return {
            name: [outcome(llm, [request])[0] for request in requests] for name, requests in CASES.items()
        }


@pytest.fixture(scope="module", params=LAYOUTS)
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    with engine(model, **LAYOUTS[request.param]) as made:
        yield made


@pytest.mark.parametrize("case", sampled(CASES, 11))
def test_edge_cases_give_the_tokens_of_each_request_alone(
    case: str, llm: LLM, expected: dict[str, list[tuple[list[int], str | None]]]
) -> None:
    assert outcome(llm, CASES[case]) == expected[case]


def test_a_stop_in_the_midst_of_a_cycle_ends_only_its_own_request(model: Path) -> None:
    """The stop id of one request is a token that it samples while two more of its steps are in flight."""
    requests = CASES["all end in the same step"]
    with engine(model, async_depth=0) as llm:
        plain = outcome(llm, requests)
    stop_at = 4
    stop_id = plain[2][0][stop_at]
    first = plain[2][0].index(stop_id)
    stopping = [
        (ids, greedy(9, stop_token_ids=[stop_id]) if i == 2 else sampling)
        for i, (ids, sampling) in enumerate(requests)
    ]
    for layout in ({"micro_batches": 1, "async_depth": 1}, {"micro_batches": 3}, {"async_depth": 5}):
        with engine(model, pipeline_parallel_size=3, **layout) as llm:
            found = outcome(llm, stopping)
        assert found[2] == (plain[2][0][: first + 1], "stop") or found[2] == (plain[2][0][:first], "stop")
        assert [one for i, one in enumerate(found) if i != 2] == [
            one for i, one in enumerate(plain) if i != 2
        ]


def test_a_stop_string_ends_a_text_alike_however_many_plans_run_ahead() -> None:
    """It is found in the text, by the front, when further tokens of the request are already on their way."""
    prompts = ["Once upon a time", "The river", "A small house", "In the morning"]

    def told(*, stops: list[list[str]], **layout: Any) -> list[tuple[str, str | None, int | str | None]]:
        with engine(Path("demo"), **layout) as llm:
            outputs = llm.generate(prompts, [greedy(40, stop=stop) for stop in stops])
        return [(one.text, one.finish_reason, one.stop_reason) for one in (out.outputs[0] for out in outputs)]

    texts = [text for text, _, _ in told(stops=[[], [], [], []])]
    ends = [texts[0][9:12], texts[1][20:25], "not there", texts[3][:2]]
    expected = [(text.partition(end)[0], "stop", end) for text, end in zip(texts, ends, strict=True)]
    expected[2] = (texts[2], "length", None)
    stops = [["not there", ends[0]], *([end] for end in ends[1:])]
    for layout in (
        {"async_depth": 0},
        {"pipeline_parallel_size": 2, "async_depth": 2},
        {"pipeline_parallel_size": 3, "async_depth": 64, "micro_batches": 2},
    ):
        assert told(stops=stops, **layout) == expected, layout


@pytest.mark.parametrize(
    "layout",
    [
        {"async_depth": -1},
        {"async_depth": 65},
        {"async_depth": "often"},
        {"micro_batches": 0},
        {"micro_batches": "some"},
        {"inter_token_target_ms": 0.0},
        {"inter_token_target_ms": float("nan")},
        {"inter_token_target_ms": float("inf")},
        {"pipeline_parallel_size": 2, "threads_per_rank": "1,1,1"},
    ],
    ids=str,
)
def test_settings_that_make_no_pipe_are_refused_by_name(layout: dict[str, Any], model: Path) -> None:
    with pytest.raises(UsageError, match=next(name for name in layout if name != "pipeline_parallel_size")):
        engine(model, **{"threads_per_rank": 1, **layout})


@pytest.mark.parametrize("partition", ["2,2,", "2,a", "4", "1,2", "2,3", "0,4", "2;2"])
def test_partitions_that_cut_no_model_are_refused(partition: str, model: Path) -> None:
    with pytest.raises(PartitionError):
        engine(model, pipeline_parallel_size=2, partition=partition)
