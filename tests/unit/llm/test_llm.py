"""`LLM` with its stages as threads: arguments, shapes of results, stop strings, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from checkpoints import make_checkpoint
from paths import shared_data
from penstock import LLM, PoolingParams, SamplingParams
from penstock.engine.supervisor.launch import LaunchPlan
from penstock.errors import InvalidRequestError, ModelError, PenstockError, UsageError
from penstock.executor.inprocess import InprocessExecutor
from penstock.llm.llm import CompletionOutput, RequestOutput
from penstock.llm.prompt_preparer import default_sampling

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SMALL = {"distributed_executor_backend": "inprocess", "threads_per_rank": 1, "dtype": "float32"}


@pytest.fixture(scope="module")
def stories() -> Iterator[LLM]:
    model = shared_data("models", "stories260K")
    with LLM(str(model), pipeline_parallel_size=2, num_blocks=128, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = make_checkpoint(tmp_path_factory.mktemp("model"))
    with LLM(str(model), num_blocks=32, **SMALL) as llm:
        yield llm


def test_results_have_vllms_shape(stories: LLM) -> None:
    (output,) = stories.generate("Once upon a time", GREEDY)
    assert isinstance(output, RequestOutput)
    assert output.prompt == "Once upon a time"
    assert output.prompt_token_ids[0] == 1
    assert output.finished
    (completion,) = output.outputs
    assert isinstance(completion, CompletionOutput)
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert len(completion.token_ids) == 12
    assert completion.text.startswith(", there was a little girl")


def test_prompts_take_every_form_and_results_keep_their_order(stories: LLM) -> None:
    ids = stories.get_tokenizer().encode("Once upon")
    outputs = stories.generate(
        ["Once upon", {"prompt": "Once upon"}, {"prompt_token_ids": ids}, "Lily"], [GREEDY] * 4
    )
    assert [output.prompt for output in outputs] == ["Once upon", "Once upon", None, "Lily"]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs[:3]}) == 1
    assert outputs[3].outputs[0].token_ids != outputs[0].outputs[0].token_ids
    assert len({output.request_id for output in outputs}) == 4
    assert stories.generate([]) == []


def test_d11_stop_strings_cut_text_and_tokens(stories: LLM) -> None:
    (whole,) = stories.generate("Once upon a time", GREEDY)
    (cut,) = stories.generate(
        "Once upon a time", SamplingParams(temperature=0.0, max_tokens=12, stop=["girl"])
    )
    completion = cut.outputs[0]
    assert completion.text == whole.outputs[0].text.partition("girl")[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "girl")
    assert completion.token_ids == whole.outputs[0].token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) < 12
    stats = stories.stats()
    assert stats is not None
    assert stats.scheduler.num_running == 0, "the core was told"


def test_golden_ids_and_text(stories: LLM) -> None:
    golden = json.loads((shared_data("models", "stories260K") / "golden.json").read_text())
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=2)
    (output,) = stories.generate({"prompt_token_ids": [1]}, sampling)
    completion = output.outputs[0]
    assert completion.token_ids == golden["greedy_ids"][:64]
    assert golden["greedy_text"].startswith(completion.text)
    assert completion.logprobs is not None
    for position, (token_id, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        assert entry[token_id].logprob == pytest.approx(golden["greedy_logprobs"][position], abs=1e-3)
        assert entry[token_id].rank == 1
        assert len(entry) == 2


@pytest.mark.parametrize(
    ("prompts", "sampling", "place", "param"),
    [
        (["a", 7], GREEDY, 1, "prompts[1]"),
        (["a", "b", {"prompt_token_ids": []}], GREEDY, 2, "prompts[2]"),
        (["a", {"prompt_token_ids": [512]}], GREEDY, 1, "prompts[1]"),
        (["a", {"prompt_token_ids": ["x"]}], GREEDY, 1, "prompts[1]"),
        (["a", "b"], [GREEDY, SamplingParams(temperature=9.0)], 1, "temperature"),
        (["a", {"prompt_token_ids": [5] * 501}], GREEDY, 1, "max_tokens"),
    ],
    ids=str,
)
def test_r8_an_error_in_a_batch_names_the_prompt_and_nothing_runs(
    stories: LLM, prompts: Any, sampling: Any, place: int, param: str
) -> None:
    before = stories.stats()
    with pytest.raises(InvalidRequestError, match=rf"^prompts\[{place}\]: ") as raised:
        stories.generate(prompts, sampling)
    assert raised.value.param == param
    after = stories.stats()
    assert before is not None
    assert after is not None
    assert after.scheduler.prompt_tokens == before.scheduler.prompt_tokens


def test_a_length_that_was_asked_for_must_fit_and_a_default_is_shortened(stories: LLM) -> None:
    prompt = {"prompt_token_ids": [5] * 505}
    with pytest.raises(InvalidRequestError, match=r"505 tokens and max_tokens is 16, 521 together"):
        stories.generate(prompt, SamplingParams(max_tokens=16, ignore_eos=True))
    (output,) = stories.generate(prompt)
    assert 1 <= len(output.outputs[0].token_ids) <= 7


def test_the_package_has_the_names_of_results_and_prompts(stories: LLM) -> None:
    (output,) = stories.generate(penstock.TokensPrompt(prompt_token_ids=[1, 403]), GREEDY)
    assert isinstance(output, penstock.RequestOutput)
    assert isinstance(output.outputs[0], penstock.CompletionOutput)
    (text,) = stories.generate(penstock.TextPrompt(prompt="Once"), GREEDY)
    assert text.prompt == "Once"
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        penstock.Engine  # noqa: B018


def test_vectors_have_vllms_shape(stories: LLM) -> None:
    first, second = stories.embed(["Once upon", {"prompt_token_ids": [1, 403]}])
    assert isinstance(first, penstock.EmbeddingRequestOutput)
    assert first.prompt_token_ids == stories.get_tokenizer().encode("Once upon")
    assert (first.finished, first.num_cached_tokens) == (True, 0)
    assert first.outputs.hidden_size == len(first.outputs.embedding) == 64
    assert sum(number * number for number in first.outputs.embedding) == pytest.approx(1.0, abs=1e-6)
    assert first.outputs.embedding != second.outputs.embedding
    (raw,) = stories.encode("Once upon", pooling="last")
    assert isinstance(raw, penstock.PoolingRequestOutput)
    assert (raw.outputs.data.shape, str(raw.outputs.data.dtype)) == ((64,), "float32")
    length = float((raw.outputs.data**2).sum()) ** 0.5
    assert raw.outputs.data / length == pytest.approx(first.outputs.embedding, abs=1e-6)
    (same,) = stories.encode("Once upon", PoolingParams(pooling="last"))
    assert same.outputs.data == pytest.approx(first.outputs.embedding, abs=1e-7)
    each = [PoolingParams(pooling="cls"), PoolingParams(pooling="mean")]
    cls, mean = stories.embed(["Once upon"] * 2, each)
    assert cls.outputs.embedding != mean.outputs.embedding
    assert stories.embed([]) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"pooling": "max"}, "pooling_params"),
        ({"pooling": "last", "pooling_params": PoolingParams()}, "mean the same"),
        ({"pooling_params": [PoolingParams()]}, "1 pooling_params were given for 2 prompts"),
        (
            {"pooling_params": PoolingParams(dimensions=3)},
            r"prompts\[0\]: dimensions is 3; this model gives 64",
        ),
        ({"pooling_params": PoolingParams(dimensions="3")}, "pooling_params"),
    ],
)
def test_bad_pooling_is_refused(stories: LLM, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        stories.encode(["a", "b"], **arguments)


def test_a_vector_takes_the_whole_context_and_no_more(stories: LLM) -> None:
    assert stories.embed({"prompt_token_ids": [5] * 512})[0].outputs.hidden_size == 64
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: .*513 tokens.*512"):
        stories.embed(["a", {"prompt_token_ids": [5] * 513}])


def test_numpy_like_ids_and_integer_temperatures_are_taken(stories: LLM) -> None:
    import numpy

    (output,) = stories.generate(
        {"prompt_token_ids": numpy.array([1, 403])}, SamplingParams(temperature=0, max_tokens=2)
    )
    assert output.prompt_token_ids == [1, 403]


def test_a_progress_bar_changes_nothing(stories: LLM) -> None:
    quiet = stories.generate("Once", GREEDY)
    shown = stories.generate("Once", GREEDY, use_tqdm=True)
    assert quiet[0].outputs == shown[0].outputs


@pytest.mark.parametrize(
    "prompts",
    ["", 7, [7], {"text": "a"}, {"prompt_token_ids": ["a"]}, {"prompt_token_ids": [512]}, [[1, 2]]],
    ids=str,
)
def test_r8_a_bad_prompt_is_refused_before_anything_runs(stories: LLM, prompts: object) -> None:
    if prompts == "":
        prompts = {"prompt_token_ids": []}
    with pytest.raises(InvalidRequestError):
        stories.generate(prompts, GREEDY)


def test_a_prompt_longer_than_the_model_names_both_numbers(stories: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"600 tokens.*512"):
        stories.generate({"prompt_token_ids": [5] * 600}, GREEDY)


@pytest.mark.parametrize("sampling", [[GREEDY], [GREEDY] * 3])
def test_as_many_sampling_params_as_prompts(stories: LLM, sampling: list[SamplingParams]) -> None:
    with pytest.raises(InvalidRequestError, match="for 2 prompts"):
        stories.generate(["a", "b"], sampling)


def test_bad_sampling_values_are_refused(stories: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        stories.generate("a", SamplingParams(temperature=9.0))
    with pytest.raises(InvalidRequestError, match="sampling_params"):
        stories.generate("a", SamplingParams(temperature="hot"))


def test_an_interrupt_leaves_nothing_running(stories: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = 0
    poll = stories._client.poll

    def interrupted(timeout_s: float) -> object:
        nonlocal polls
        polls += 1
        if polls == 3:
            raise KeyboardInterrupt
        return poll(timeout_s)

    monkeypatch.setattr(stories._client, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stories.generate(["a", "b"], SamplingParams(max_tokens=400, ignore_eos=True))
    monkeypatch.undo()
    stats = stories.stats()
    assert stats is not None
    assert (stats.scheduler.num_running, stats.scheduler.num_waiting) == (0, 0)
    assert len(stories.generate("Once", GREEDY)[0].outputs[0].token_ids) == 12


def test_chat_without_a_template_says_so(stories: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        stories.chat([{"role": "user", "content": "hi"}], GREEDY)


def test_a_chat_template_beside_the_model_is_used(tmp_path: Path) -> None:
    source = shared_data("models", "stories260K")
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} Then{% endif %}"
    )
    with LLM(str(tmp_path), num_blocks=32, **SMALL) as llm:
        first, second = llm.chat(
            [[{"role": "user", "content": "Once"}], [{"role": "user", "content": "</s>"}]], GREEDY
        )
        assert first.prompt == "<s>Once Then"
        assert first.prompt_token_ids == llm.get_tokenizer().encode("Once Then")
        assert 2 not in second.prompt_token_ids
        (single,) = llm.chat([{"role": "user", "content": "Once"}], GREEDY)
        assert single.outputs == first.outputs
        begun = [{"role": "user", "content": "Once"}, {"role": "assistant", "content": " upon"}]
        (more,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
        assert more.prompt == "<s>Once upon"
        with pytest.raises(InvalidRequestError, match="Set add_generation_prompt to False"):
            llm.chat(begun, GREEDY, continue_final_message=True)
        with pytest.raises(InvalidRequestError, match="last message of the assistant"):
            llm.chat(begun[:1], GREEDY, add_generation_prompt=False, continue_final_message=True)
        with pytest.raises(InvalidRequestError, match="does not support tools") as raised:
            llm.chat(begun[:1], GREEDY, tools=[{"type": "function", "function": {"name": "look"}}])
        assert raised.value.param == "tools"
        with pytest.raises(
            InvalidRequestError, match=r"^messages\[1\]: content parts must be text"
        ) as raised:
            llm.chat([begun, [{"role": "user", "content": [{"type": "image_url"}]}]], GREEDY)
        assert raised.value.param == "messages[1]"


def test_tools_are_shown_by_a_template_that_knows_them(tmp_path: Path) -> None:
    for path in shared_data("models", "stories260K").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
    )
    with LLM(str(tmp_path), num_blocks=32, **SMALL) as llm:
        tools = [{"type": "function", "function": {"name": name}} for name in ("look", "leap")]
        (output,) = llm.chat([{"role": "user", "content": "Once"}], GREEDY, tools=tools)
    assert output.prompt == "look leap Once"


def test_a_model_without_tokenizer_runs_on_ids(without_tokenizer: LLM) -> None:
    (output,) = without_tokenizer.generate({"prompt_token_ids": [3, 4]}, GREEDY)
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].text == ""
    with pytest.raises(InvalidRequestError, match="token ids"):
        without_tokenizer.generate("text")


def test_defaults_come_from_the_generation_config() -> None:
    found = default_sampling({"temperature": 0.5, "top_k": 20.0, "top_p": 0.8, "repetition_penalty": 1.1})
    assert found == SamplingParams(temperature=0.5, top_k=20, top_p=0.8, repetition_penalty=1.1)
    assert default_sampling({}) == SamplingParams()


def test_an_unknown_argument_gets_the_nearest_name() -> None:
    with pytest.raises(
        UsageError, match=r"no argument 'pipeline_paralel_size'. Did you mean pipeline_parallel"
    ):
        LLM("x", pipeline_paralel_size=2)


@pytest.mark.parametrize(
    "arguments",
    [{"dtype": "int8"}, {"max_num_seqs": 0}, {"device": "tpu"}, {"pipeline_parallel_size": "two"}],
    ids=str,
)
def test_an_argument_out_of_range_is_a_usage_error(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(arguments))):
        LLM("x", **arguments)


def test_a_missing_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        LLM(str(tmp_path / "none"), **SMALL)


def test_after_shutdown_it_says_so(tmp_path: Path) -> None:
    llm = LLM(str(make_checkpoint(tmp_path)), num_blocks=16, **SMALL)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(UsageError, match="shut down"):
        llm.generate({"prompt_token_ids": [1]})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_cuda_without_a_gpu_says_so() -> None:
    with pytest.raises(UsageError, match=r"finds no GPU.*--device cpu"):
        LLM("demo", device="cuda", distributed_executor_backend="inprocess")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"distributed_executor_backend": "dask"}, "no executor has this name"),
        ({"distributed_executor_backend": "external_launcher"}, "use `penstock worker --torchrun`"),
        ({"distributed_executor_backend": "uni"}, "caller's process is `inprocess`"),
        ({"context_parallel_size": 2}, "context parallelism is not available"),
        ({"enable_elastic_ep": True}, "elastic expert parallelism adds and removes ranks"),
        ({"data_parallel_size": 2}, "an LLM is one pipeline"),
    ],
)
def test_i2_i3_i5_layouts_that_are_not_built_are_refused_by_name(
    arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        LLM("demo", **arguments)


def test_i2_the_caller_may_bring_an_executor() -> None:
    made = []

    def make(plan: LaunchPlan) -> InprocessExecutor:
        made.append(InprocessExecutor(plan.ranks))
        return made[-1]

    settings = SMALL | {"distributed_executor_backend": make}
    with LLM("demo", pipeline_parallel_size=2, **settings) as own, LLM("demo", **SMALL) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=8)
        assert own.generate("ROMEO:", greedy)[0].outputs == llm.generate("ROMEO:", greedy)[0].outputs
    assert len(made) == 1


def test_g8_bad_words_are_not_generated(stories: LLM) -> None:
    """Without them the text begins with ", there was a little girl"."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, bad_words=words)
        for words in (["little"], ["was a little"], ["there was little"])
    ]
    texts = [one.outputs[0].text for one in stories.generate(["Once upon a time"] * 3, params)]
    assert texts[0].startswith(", there was a ")
    assert "little" not in texts[0]
    assert "was a little" not in texts[1]
    assert texts[2].startswith(", there was a little girl")


def test_bad_words_that_leave_no_token_end_the_request_with_an_error(stories: LLM) -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=[7, 8], bad_word_ids=[[7], [8]])
    with pytest.raises(PenstockError, match="its constraints allow no token"):
        stories.generate("Once upon a time", params)


def test_bad_words_need_a_tokenizer(without_tokenizer: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts\[0\]: bad_words: .*no tokenizer"):
        without_tokenizer.generate({"prompt_token_ids": [1]}, SamplingParams(bad_words=["a"]))
