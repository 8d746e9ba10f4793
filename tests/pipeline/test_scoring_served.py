"""Scores over HTTP from a running server of two stages; `transformers` judges (row G8).

The requests are those that lm-evaluation-harness's `local-completions` makes: token ids of context and
continuation, `echo`, `logprobs: 1`, one token that it throws away, several prompts in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from depth import sampled
from hf_reference import reference_logits
from penstock.tokenizer.tokenizer import load_tokenizer
from served import Served, title_of

DEMO = Path(__file__).resolve().parents[2] / "src" / "penstock" / "assets" / "demo"
FLAGS = ("demo", "--pp", "2", "--threads-per-rank", "1", "--dtype", "float32", "--prefill-chunk", "2")
PAIRS = [
    ("ROMEO:\nBut soft, what light", " through yonder window breaks?"),
    ("KING HENRY:\nOnce more unto the breach,", " dear friends, once more;"),
    ("To be, or", " not to be: that is the question."),
    ("My kingdom for", " a horse!"),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*FLAGS) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def token_ids() -> tuple[list[list[int]], list[int]]:
    """Context and continuation of each pair, and how long the contexts are."""
    encode = load_tokenizer(DEMO).encode
    contexts = [encode(context) for context, _ in PAIRS]
    continuations = [encode(text, add_special_tokens=False) for _, text in PAIRS]
    both = [a + b for a, b in zip(contexts, continuations, strict=True)]
    return both, [len(context) for context in contexts]


def reference(ids: list[int], begin: int) -> tuple[float, bool]:
    """Log-likelihood of the ids from `begin` on, and whether each is the likeliest."""
    rows = reference_logits(DEMO, ids).log_softmax(-1)[begin - 1 : -1]
    wanted = torch.tensor(ids[begin:])
    value = rows.gather(1, wanted[:, None]).sum().item()
    return value, bool((rows.argmax(-1) == wanted).all())


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_g8_loglikelihoods_of_a_batch_equal_transformers(client: openai.OpenAI, max_tokens: int) -> None:
    prompts, begins = token_ids()
    answer = client.completions.create(
        model="demo",
        prompt=prompts,
        echo=True,
        logprobs=1,
        max_tokens=max_tokens,
        temperature=0,
        seed=1234,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens * len(prompts)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    for ids, begin, choice in zip(prompts, begins, answer.choices, strict=True):
        assert choice.logprobs is not None
        values, tokens = choice.logprobs.token_logprobs or [], choice.logprobs.tokens or []
        tops = choice.logprobs.top_logprobs or []
        assert (values[0], tops[0], len(values)) == (None, None, len(ids) + max_tokens)
        expected, is_greedy = reference(ids, begin)
        assert sum(values[begin : len(ids)]) == pytest.approx(expected, abs=1e-4)
        found = [max(top, key=lambda name: top[name]) for top in tops[begin : len(ids)]]
        assert (found == tokens[begin : len(ids)]) == is_greedy


def test_g8_text_and_ids_are_echoed_alike_and_offsets_lead_into_the_text(client: openai.OpenAI) -> None:
    text = "O, speak again, bright angel! é世"
    ids = load_tokenizer(DEMO).encode(text)
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 4, "echo": True, "logprobs": 0, "temperature": 0}
    first = client.completions.create(prompt=text, **asked).choices[0]
    second = client.completions.create(prompt=ids, **asked).choices[0]
    assert first.text == second.text
    assert first.text.startswith(text)
    assert first.logprobs == second.logprobs
    assert first.logprobs is not None
    tokens, offsets = first.logprobs.tokens or [], first.logprobs.text_offset or []
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith(("bytes:", "<")) or first.text[offset : offset + len(token)] == token
    streamed = list(client.completions.create(prompt=text, stream=True, **asked))
    assert "".join(chunk.choices[0].text for chunk in streamed) == first.text


def test_g8_scoring_fills_the_prefix_cache_and_takes_nothing_from_it(served: Served) -> None:
    prompt = [(7 * index) % 300 for index in range(100)]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    scored = [served.post("/v1/completions", **body, prompt_logprobs=0) for _ in range(2)]
    assert scored[0]["choices"] == scored[1]["choices"]
    assert all(one["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 for one in scored)
    assert served.post("/v1/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


@pytest.mark.parametrize(
    "victim", sampled(["penstock core", "penstock stage 1 tp 0", "penstock stage 0 tp 0"], 1)
)
def test_g8_r4_scores_outlive_a_killed_child(client: openai.OpenAI, served: Served, victim: str) -> None:
    """Killed when the first scores of a long prompt have come; all come once, with the same values."""
    prompt = [(11 * index + 5) % 300 for index in range(900)]
    asked: dict[str, Any] = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": 2,
        "logprobs": 1,
        "temperature": 0,
    }
    whole = client.completions.create(echo=True, **asked).choices[0]
    found: list[float | None] = []
    text = ""
    before, interrupted = served.num_recoveries, served.metric("penstock_recovered_requests_total")
    for chunk in client.completions.create(echo=True, stream=True, **asked):
        if not found:
            (process,) = [one for one in served.family() if title_of(one) == victim]
            process.kill()
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs is not None:
            found += chunk.choices[0].logprobs.token_logprobs or []
    assert served.num_recoveries == before + 1, "before the stream ended"
    if "stage" in victim:
        assert served.metric("penstock_recovered_requests_total") == interrupted + 1
    assert whole.logprobs is not None
    assert found == whole.logprobs.token_logprobs
    assert text == whole.text
