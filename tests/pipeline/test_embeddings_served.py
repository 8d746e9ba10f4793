"""A running server of two stages gives vectors: to the `openai` client, and through the loss of a stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from threading import Thread
from typing import Any

import openai
import pytest

from served import Served, wait_until

FLAGS = ("demo", "--pp", "2", "--threads-per-rank", "1", "--dtype", "float32", "--prefill-chunk", "8")
TEXTS = ["ROMEO:", "But, soft! what light through yonder window breaks? It is the east. " * 3, "x"]
POOLINGS = ("last", "mean", "cls")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served(*FLAGS, "--pooling", "mean") as served:
        yield served


def vectors(served: Served, pooling: str) -> Any:
    answer = served.post("/v1/embeddings", input=TEXTS, pooling=pooling, normalize=False)
    return [entry["embedding"] for entry in answer["data"]]


@pytest.fixture(scope="module")
def golden(server: Served) -> dict[str, Any]:
    return {pooling: vectors(server, pooling) for pooling in POOLINGS}


def test_the_openai_client_gets_vectors_of_length_one(server: Served, golden: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="demo", input=TEXTS)
        plain = client.embeddings.create(model="demo", input=TEXTS, encoding_format="float")
        size = len(answer.data[0].embedding)
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="demo", input="x", dimensions=size // 2)
        assert (refused.value.param, refused.value.code) == ("dimensions", "unsupported_parameter")
        assert client.embeddings.create(model="demo", input="x", dimensions=size).data
    assert [one.embedding for one in plain.data] == [one.embedding for one in answer.data]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 90
    for one, raw in zip(answer.data, golden["mean"], strict=True):
        length = math.sqrt(sum(number * number for number in raw))
        assert one.embedding == pytest.approx([number / length for number in raw], abs=1e-6)


def test_similar_texts_are_nearer(server: Served) -> None:
    """What embeddings are for; of this model little can be asked."""
    texts = ["O Romeo, Romeo! wherefore art thou Romeo?", "Romeo, where art thou, Romeo?", "12 3 45 67"]
    answer = server.post("/v1/embeddings", input=texts)
    first, second, third = (entry["embedding"] for entry in answer["data"])

    def nearness(one: list[float], other: list[float]) -> float:
        return sum(x * y for x, y in zip(one, other, strict=True))

    assert nearness(first, second) > nearness(first, third)


def test_generating_beside_it_changes_nothing(server: Served, golden: dict[str, Any]) -> None:
    asked = {"model": "demo", "prompt": TEXTS, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = server.post("/v1/completions", **asked)["choices"]
    answers: list[Any] = []
    generating = Thread(target=lambda: answers.append(server.post("/v1/completions", **asked)["choices"]))
    generating.start()
    found = {pooling: vectors(server, pooling) for pooling in POOLINGS}
    generating.join()
    assert answers == [alone]
    assert found == golden


@pytest.mark.soak
@pytest.mark.parametrize(
    "fault",
    [
        "stage.forward@1:4=kill",
        pytest.param("stage.put@0:3=kill", marks=pytest.mark.soak),
        pytest.param("stage.put@1:9=kill", marks=pytest.mark.soak),
    ],
)
def test_r4_a_stage_that_is_lost_in_the_middle_of_a_prompt_costs_no_vector(
    golden: dict[str, Any], fault: str
) -> None:
    with Served(*FLAGS, env={"PENSTOCK_FAULTS": fault}) as served:
        assert vectors(served, "mean") == golden["mean"]
        wait_until(lambda: "recovered in" in served.output, 30)
        assert vectors(served, "last") == golden["last"]


@pytest.mark.soak
@pytest.mark.soak
def test_i4_replicas_share_the_inputs(golden: dict[str, Any]) -> None:
    with Served(*FLAGS, "--dp", "2") as served:
        assert {pooling: vectors(served, pooling) for pooling in POOLINGS} == golden
