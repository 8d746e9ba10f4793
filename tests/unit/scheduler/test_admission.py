"""The check at the door, and what a request becomes behind it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.engine import SchedulerConfig
from penstock.errors import InvalidRequestError
from penstock.kvcache.allocator import BlockAllocator
from penstock.kvcache.block_pool import BlockPool
from penstock.request import GenerationRequest, SamplingParams
from penstock.scheduler.admission import Admission, derive_seed


def make(*, max_model_len: int = 20, num_blocks: int = 8, block_size: int = 4) -> Admission:
    allocator = BlockAllocator(BlockPool(num_blocks), block_size)
    return Admission(SchedulerConfig(), allocator, max_model_len=max_model_len, eos_token_ids=[2, 1], seed=7)


def request(prompt_len: int, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", prompt_token_ids=[3] * prompt_len, sampling=SamplingParams(**sampling)
    )


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "max_len"),
    [(5, 1, 6), (5, 7, 12), (5, 15, 20), (5, 16, 20), (5, None, 20), (19, None, 20)],
)
def test_e3_length_cap_is_the_lesser_of_request_and_model(
    prompt_len: int, max_tokens: int | None, max_len: int
) -> None:
    assert make().receive(request(prompt_len, max_tokens=max_tokens), now=0.0).max_len == max_len


def test_a_small_pool_lowers_the_length_cap() -> None:
    admission = make(num_blocks=2)
    assert admission.max_len == 9  # 8 tokens with KV, and a last one that needs none
    assert admission.receive(request(5, max_tokens=None), now=0.0).max_len == 9


def test_a_prompt_longer_than_the_model_names_both_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"has 20 tokens; the model takes 20") as caught:
        make().receive(request(20), now=0.0)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    assert caught.value.remedy == "Shorten the prompt to 19 tokens."


def test_a_prompt_longer_than_the_pool_names_both_numbers() -> None:
    admission = make(num_blocks=2)
    assert admission.receive(request(8), now=0.0).prompt_len == 8
    with pytest.raises(InvalidRequestError, match=r"has 9 tokens; the KV cache holds 8") as caught:
        admission.receive(request(9), now=0.0)
    assert caught.value.code == "kv_capacity_exceeded"


@pytest.mark.parametrize(
    ("asked", "longest", "takes"),
    [
        ({"sampling": SamplingParams()}, 19, "20 tokens in all, with at least 1 of them for the output"),
        (
            {"sampling": SamplingParams(max_tokens=0)},
            20,
            "20 tokens in all, with at least 0 of them for the output",
        ),
        ({"pooling": "last"}, 20, "20"),
    ],
    ids=["generated", "only scored", "pooled"],
)
def test_e3_the_longest_prompt_of_each_kind(asked: dict[str, Any], longest: int, takes: str) -> None:
    """Beyond it the answer names what stands in the way: of the KV cache the last token takes a place only
    where it is pooled."""

    def of(length: int) -> GenerationRequest:
        return GenerationRequest(request_id="r", prompt_token_ids=[3] * length, **asked)

    assert make().receive(of(longest), now=0.0).prompt_len == longest
    with pytest.raises(InvalidRequestError) as caught:
        make().receive(of(longest + 1), now=0.0)
    assert caught.value.message == f"the prompt has {longest + 1} tokens; the model takes {takes}."
    assert caught.value.remedy == f"Shorten the prompt to {longest} tokens."
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    small, most = make(num_blocks=2), 8 + (longest == 20 and "pooling" not in asked)
    assert small.receive(of(most), now=0.0).prompt_len == most
    with pytest.raises(InvalidRequestError) as caught:
        small.receive(of(most + 1), now=0.0)
    assert caught.value.message == f"the prompt has {most + 1} tokens; the KV cache holds 8."
    assert (caught.value.param, caught.value.code) == ("prompt", "kv_capacity_exceeded")


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the prompt has no tokens"):
        make().receive(request(0), now=0.0)


def test_e3_no_token_wanted_is_served_and_fewer_are_refused() -> None:
    state = make().receive(request(3, max_tokens=0), now=0.0)
    assert (state.max_len, state.num_to_prefill) == (3, 2)
    with pytest.raises(InvalidRequestError, match="max_tokens must be at least 0, got -1"):
        make().receive(request(3, max_tokens=-1), now=0.0)


def test_sampling_becomes_what_the_last_stage_needs() -> None:
    sampling = {"temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "seed": -4, "logprobs": 0}
    row = make().receive(request(3, **sampling), now=0.0).sampling
    assert (row.temperature, row.top_k, row.top_p, row.min_p) == (0.5, 0, 0.9, 0.1)
    assert (row.seed, row.min_tokens, row.suppressed_ids, row.num_logprobs) == (-4, 0, [], 0)
    assert make().receive(request(3), now=0.0).sampling.num_logprobs == -1
    assert make().receive(request(3, top_k=5), now=0.0).sampling.top_k == 5


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_suppresses_end_of_sequence_and_stop_ids(ignore_eos: bool) -> None:
    wanted = request(3, min_tokens=2, stop_token_ids=[9, 1], ignore_eos=ignore_eos)
    state = make().receive(wanted, now=0.0)
    assert state.sampling.suppressed_ids == [1, 2, 9]
    assert state.sampling.min_tokens == 2


@pytest.mark.parametrize(("ignore_eos", "stop_ids"), [(False, {1, 2, 9}), (True, {9})])
def test_d11_stop_ids_are_the_models_and_the_requests(ignore_eos: bool, stop_ids: set[int]) -> None:
    state = make().receive(request(3, stop_token_ids=[9], ignore_eos=ignore_eos), now=0.0)
    assert state.stop_ids == stop_ids


def test_seeds_are_the_requests_or_derived_by_arrival() -> None:
    admission, again = make(), make()
    seeds = [admission.receive(request(3), now=0.0).sampling.seed for _ in range(50)]
    assert seeds == [again.receive(request(3), now=9.0).sampling.seed for _ in range(50)]
    assert seeds == [derive_seed(7, arrival) for arrival in range(50)]
    assert len(set(seeds)) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(8, 0) != derive_seed(7, 0)


def test_derived_seeds_are_splitmix64() -> None:
    # First outputs of the published generator for state 0, halved to stay within a signed 64-bit integer.
    assert [derive_seed(0, arrival) for arrival in range(3)] == [
        0xE220A8397B1DCDAF >> 1,
        0x6E789E6AA1B965F4 >> 1,
        0x06C45D188009454F >> 1,
    ]


def test_a_refused_request_does_not_shift_the_seeds_of_others() -> None:
    admission = make()
    with pytest.raises(InvalidRequestError):
        admission.receive(request(0), now=0.0)
    assert admission.receive(request(3), now=0.0).arrival == 0


def test_starting_keeps_a_block_for_each_running_request() -> None:
    admission = make(num_blocks=4)
    state = admission.receive(request(8), now=0.0)  # 2 of 4 blocks
    assert admission.may_start(state, num_running=0)
    assert admission.may_start(state, num_running=2)
    assert not admission.may_start(state, num_running=3)


def test_d10_a_preempted_request_waits_for_its_last_tokens() -> None:
    admission = make()
    state = admission.receive(request(8), now=0.0)
    state.num_pending = 1
    assert not admission.may_start(state, num_running=0)
