"""`AsyncLLM` over two stages that are processes: streams, aborts, the loss of a stage, the end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from disturbed import started_processes
from penstock import (
    LLM,
    AsyncLLM,
    EmbeddingRequestOutput,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
)
from penstock.errors import (
    AbortedError,
    InvalidRequestError,
    ModelError,
    StageLostError,
    UnavailableError,
    UsageError,
)
from served import is_alive, title_of

SMALL: dict[str, Any] = {"pipeline_parallel_size": 2, "threads_per_rank": 1, "dtype": "float32"}
PROMPTS = ["ROMEO:\n", "JULIET:\n", {"prompt_token_ids": [5, 6, 7]}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
THREE = SamplingParams(n=3, seed=5, max_tokens=24, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2)
CHOICE = SamplingParams(
    n=2, temperature=1.0, seed=1, structured_outputs=StructuredOutputs(choice=["Verona", "Mantua"])
)

BAD_WORDS = SamplingParams(temperature=0.0, max_tokens=40, bad_words=["the", "to", "I", "my"])
SPECIAL = [THREE, SCORED, CHOICE, BAD_WORDS]


async def collect(llm: AsyncLLM, prompt: Any, sampling: SamplingParams = GREEDY) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, sampling)]


async def _is_quiet(llm: AsyncLLM) -> bool:
    stats = (await llm.status()).stats
    return stats is not None and not (stats.scheduler.num_running or stats.scheduler.num_waiting)


async def until_idle(llm: AsyncLLM) -> None:
    """Nothing of what was aborted runs on."""
    async with asyncio.timeout(30):
        while not (await _is_quiet(llm)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Golden:
    """What `LLM` says, with one stage, which is a thread."""

    ids: list[list[int]]
    texts: list[str]
    vectors: list[list[float]]
    special: list[RequestOutput]  # of `SPECIAL`


@pytest.fixture(scope="module")
def golden() -> Golden:
    settings = SMALL | {"pipeline_parallel_size": 1, "distributed_executor_backend": "inprocess"}
    with LLM("demo", **settings) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, LONG)]
        vectors = [output.outputs.embedding for output in llm.embed(PROMPTS)]
        special = llm.generate(PROMPTS[:1] * 4, SPECIAL)
    return Golden(
        [output.token_ids for output in outputs], [output.text for output in outputs], vectors, special
    )


async def streams_say_what_llm_says(llm: AsyncLLM, golden: Golden) -> None:
    streams = await asyncio.gather(*(collect(llm, prompt) for prompt in PROMPTS))
    for outputs, ids, prompt in zip(streams, golden.ids, PROMPTS, strict=True):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].token_ids == ids[: GREEDY.max_tokens]
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert outputs[-1].prompt == (prompt if isinstance(prompt, str) else None)
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(set(lengths)), "each has more than the one before"
        for earlier, later in pairwise(outputs):
            assert later.outputs[0].text.startswith(earlier.outputs[0].text)
    assert len({outputs[0].request_id for outputs in streams}) == 3


async def choices_scores_and_grammars_are_those_of_llm(llm: AsyncLLM, golden: Golden) -> None:
    streams = await asyncio.gather(*(collect(llm, PROMPTS[0], one) for one in SPECIAL))
    for outputs, expected in zip(streams, golden.special, strict=True):
        last = outputs[-1]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for found, wanted in zip(last.outputs, expected.outputs, strict=True):
            assert (found.index, found.text, found.token_ids) == (wanted.index, wanted.text, wanted.token_ids)
            assert found.finish_reason == wanted.finish_reason
    three, scored, choice, banned = (outputs[-1] for outputs in streams)
    assert len({tuple(one.token_ids) for one in three.outputs}) == 3
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == len(scored.prompt_token_ids)
    assert scored.prompt_logprobs[0] is None
    expected_scores = golden.special[1].prompt_logprobs
    assert expected_scores is not None
    for place, wanted_entry in list(zip(scored.prompt_logprobs, expected_scores, strict=True))[1:]:
        assert place is not None
        assert wanted_entry is not None
        assert list(place) == list(wanted_entry)
    assert {one.text for one in choice.outputs} <= {"Verona", "Mantua"}
    assert banned.outputs[0].token_ids != golden.ids[0][: len(banned.outputs[0].token_ids)]


async def leaving_the_loop_aborts_all_choices(llm: AsyncLLM, golden: Golden) -> None:
    async with aclosing(llm.generate("HAMLET:\n", SamplingParams(n=3, max_tokens=400), "many")) as outputs:
        async for output in outputs:
            assert len(output.outputs) == 3
            break
        with pytest.raises(InvalidRequestError, match="in use"):
            await anext(llm.generate("x", GREEDY, "many/2"))


async def vectors_are_those_of_llm(llm: AsyncLLM, golden: Golden) -> None:
    found = await asyncio.gather(*(llm.embed(prompt) for prompt in PROMPTS))
    assert all(isinstance(output, EmbeddingRequestOutput) for output in found)
    assert [output.outputs.embedding for output in found] == golden.vectors
    raw = await llm.encode(PROMPTS[0], pooling="mean")
    same = await llm.encode(PROMPTS[0], PoolingParams(pooling="mean", normalize=False))
    assert (raw.outputs.data == same.outputs.data).all()


async def leaving_the_loop_aborts(llm: AsyncLLM, golden: Golden) -> None:
    async with aclosing(llm.generate("HAMLET:\n", LONG)) as outputs:
        async for output in outputs:
            assert output.finished is False
            break


async def cancelling_the_task_aborts(llm: AsyncLLM, golden: Golden) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in llm.generate("HAMLET:\n", LONG):
            begun.set()

    reading = asyncio.ensure_future(read())
    await begun.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def abort_by_id_ends_the_reader(llm: AsyncLLM, golden: Golden) -> None:
    outputs = llm.generate("HAMLET:\n", LONG, "mine")
    assert (await anext(outputs)).request_id == "mine"
    with pytest.raises(InvalidRequestError, match="in use"):
        await anext(llm.generate("x", GREEDY, "mine"))
    llm.abort("mine")
    llm.abort("nobody's")
    with pytest.raises(AbortedError):
        async for _ in outputs:
            pass
    (*_, last) = [output async for output in llm.generate("x", GREEDY, "mine")]
    assert last.finished, "the id is free again"


async def refusals_are_typed(llm: AsyncLLM, golden: Golden) -> None:
    for prompt, sampling, told in (
        (7, GREEDY, "a prompt must be a text"),
        ({"prompt_token_ids": []}, GREEDY, "empty"),
        ("x", SamplingParams(temperature=9.0), "temperature"),
        ("x", SamplingParams(max_tokens=10_000), "max_tokens is 10000"),
        ("x", SamplingParams(structured_outputs=StructuredOutputs(regex="(")), "regex"),
    ):
        with pytest.raises(InvalidRequestError, match=told):
            await collect(llm, prompt, sampling)
    with pytest.raises(InvalidRequestError, match="dimensions"):
        await llm.embed("x", PoolingParams(dimensions=1))
    with pytest.raises(InvalidRequestError, match="Set add_generation_prompt"):
        await anext(llm.chat([{"role": "user", "content": "x"}], continue_final_message=True))


async def conversations_follow_the_template(llm: AsyncLLM, golden: Golden) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    (*_, last) = [output async for output in llm.chat(messages, GREEDY)]
    template = await llm.get_chat_template()
    assert last.prompt == template.render(messages)
    assert last.prompt_token_ids == template.encode(messages)


async def defaults_fit_behind_any_prompt(llm: AsyncLLM, golden: Golden) -> None:
    status = await llm.status()
    assert status.ready
    assert (await llm.get_default_sampling_params()).max_tokens == 16
    (*_, last) = [output async for output in llm.generate("x")]
    assert len(last.outputs[0].token_ids) <= 16


async def streams_go_on_when_a_stage_is_lost(llm: AsyncLLM, golden: Golden) -> None:
    outputs = llm.generate(PROMPTS[0], LONG)
    await anext(outputs)
    (victim,) = [process for process in started_processes() if title_of(process) == "penstock stage 1 tp 0"]
    victim.kill()
    (*_, last) = [output async for output in outputs]
    assert (last.outputs[0].token_ids, last.outputs[0].text) == (golden.ids[0], golden.texts[0])
    assert (await llm.embed(PROMPTS[1])).outputs.embedding == golden.vectors[1]


# Each leaves the engine idle.
SCENES = (
    streams_say_what_llm_says,
    choices_scores_and_grammars_are_those_of_llm,
    leaving_the_loop_aborts_all_choices,
    vectors_are_those_of_llm,
    leaving_the_loop_aborts,
    cancelling_the_task_aborts,
    abort_by_id_ends_the_reader,
    refusals_are_typed,
    conversations_follow_the_template,
    defaults_fit_behind_any_prompt,
    streams_go_on_when_a_stage_is_lost,
)


def test_streams_vectors_aborts_refusals_a_loss_and_the_end(golden: Golden) -> None:
    """One after the other over one engine, since starting it is what takes long."""

    async def run() -> None:
        async with AsyncLLM("demo", **SMALL) as llm:
            for scene in SCENES:
                await scene(llm, golden)
                await until_idle(llm)
            outputs = llm.generate("x", LONG)
            await anext(outputs)
        with pytest.raises(UnavailableError, match="closed"):
            async for _ in outputs:
                pass
        await llm.close()
        with pytest.raises(UsageError, match="has been closed"):
            await collect(llm, "x")

    before = set(started_processes())
    asyncio.run(run())
    assert not [process for process in set(started_processes()) - before if is_alive(process)]


def test_r1_when_the_supervisor_is_lost_everybody_hears_the_cause() -> None:
    async def run() -> None:
        llm = AsyncLLM("demo", **SMALL)
        outputs = llm.generate("x", LONG)  # starts it
        await anext(outputs)
        supervisor = started_processes()[0]
        supervisor.kill()
        with pytest.raises(StageLostError, match="the supervisor of the engine has ended"):
            async for _ in outputs:
                pass
        with pytest.raises(StageLostError, match="the supervisor of the engine has ended"):
            await collect(llm, "x")
        await llm.close()

    before = set(started_processes())
    asyncio.run(run())
    assert not [process for process in set(started_processes()) - before if is_alive(process)]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"pipeline_paralel_size": 2}, "Did you mean pipeline_parallel_size"),
        ({"distributed_executor_backend": "inprocess"}, "Use mp"),
        ({"distributed_executor_backend": lambda plan: None}, "Use mp"),
        ({"data_parallel_size": 2}, "one pipeline"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"pooling": "max"}, "pooling"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        AsyncLLM("demo", **settings)


def test_a_start_that_fails_or_is_given_up_leaves_nothing() -> None:
    async def fail() -> None:
        llm = AsyncLLM("no/such/model", **SMALL)
        for _ in range(2):
            with pytest.raises(ModelError):
                await llm.start()

    async def give_up() -> None:
        llm = AsyncLLM("demo", **SMALL)
        starting = asyncio.ensure_future(llm.start())
        async with asyncio.timeout(60):
            while not started_processes():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await llm.close()
        with pytest.raises(UnavailableError, match="closed while it started"):
            await starting

    before = set(started_processes())
    asyncio.run(fail())
    asyncio.run(give_up())
    assert not [process for process in set(started_processes()) - before if is_alive(process)]
