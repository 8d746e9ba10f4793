"""What penalties count and bad words forbid survives the loss of the last stage and of the core (D6, R4)."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from depth import sampled
from disturbed import Server, Stream, named
from penstock.scheduler.admission import derive_seed

NUM_TOKENS = 300
EOS = 1
INTERRUPTED = "penstock_recovered_requests_total"
PENALTIES: list[dict[str, Any]] = [
    {"prompt": "ROMEO:", "temperature": 0, "repetition_penalty": 1.2},
    {
        "prompt": "Once upon a time",
        "temperature": 1.0,
        "seed": 11,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.5,
        "logit_bias": {"20": 2.0},
    },
    {"prompt": "JULIET:", "temperature": 1.0, "seed": 12, "bad_words": ["the", "and", "you", "not so"]},
    {"prompt": "KING:", "temperature": 1.0, "seed": 13, "allowed_token_ids": [*range(2, 90)]},
    {"prompt": "FOOL:", "temperature": 1.3, "seed": 15, "min_p": 0.05, "top_p": 0.9},
    {
        "prompt": "HAMLET:",
        "temperature": 1.0,
        "seed": 14,
        "top_k": 7,
        "min_tokens": NUM_TOKENS - 20,
        "logit_bias": {str(EOS): 100},  # it ends as soon as it may
        "ignore_eos": False,
    },
]


def test_no_bad_word_is_in_an_answer(server: Server) -> None:
    plain = {name: value for name, value in PENALTIES[2].items() if name != "bad_words"}
    texts = []
    for request in (plain, PENALTIES[2]):
        body = json.dumps(request | {"model": "demo", "max_tokens": NUM_TOKENS}).encode()
        asked = urllib.request.Request(
            server.url + "/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            texts.append(json.load(answer)["choices"][0]["text"].split())
    assert {"the", "and"} & {*texts[0]}
    assert not {"the", "and"} & {*texts[1]}


def ids(server: Server) -> list[Stream]:
    return [Stream(server, request | {"max_tokens": NUM_TOKENS}) for request in PENALTIES]


@pytest.fixture(scope="module")
def server(demo_server: Server) -> Server:
    return demo_server


@pytest.mark.parametrize(
    "victim", sampled(["penstock stage 1 tp 0", "penstock stage 0 tp 0", "penstock core"], 1)
)
def test_d6_r4_penalised_streams_go_on_with_the_same_tokens(server: Server, victim: str) -> None:
    golden = [[*stream] for stream in ids(server)]
    assert [len(tokens) for tokens in golden] == [NUM_TOKENS] * 5 + [NUM_TOKENS - 19]
    assert golden[5].index(EOS) == NUM_TOKENS - 20
    assert all(2 <= token < 90 for token in golden[3])
    before, interrupted = server.num_recoveries, server.metric(INTERRUPTED)
    streams = [iter(stream) for stream in ids(server)]
    found = [[next(streams[0]) for _ in range(40)], *([] for _ in PENALTIES[1:])]
    named(server, victim).kill()
    for tokens, stream in zip(found, streams, strict=True):
        tokens.extend(stream)
    assert server.num_recoveries == before + 1, "before the streams ended"
    if "stage" in victim:
        assert server.metric(INTERRUPTED) == interrupted + len(PENALTIES)
    assert found == golden


@pytest.mark.soak
def test_r4_a_stream_without_a_seed_goes_on_by_the_seed_that_it_had() -> None:
    """Found out by asking for it again with the seeds of the first sequences, of which it was one."""
    asked: dict[str, Any] = {"prompt": "JULIET:", "temperature": 1.0, "max_tokens": NUM_TOKENS}
    with Server(2) as server:
        stream = iter(Stream(server, asked))
        found = [next(stream) for _ in range(40)]
        named(server, "penstock core").kill()
        found += stream
        assert server.num_recoveries == 1, "before the stream ended"
        for place in range(200):
            again = iter(Stream(server, asked | {"seed": derive_seed(0, place)}))
            if [next(again) for _ in range(20)] == found[:20]:
                assert found == [*found[:20], *again]
                return
    pytest.fail("its seed was none of the engine's")


def choices(server: Server, victim: str = "") -> list[list[int]]:
    """Ids of each of three choices; the victim is killed when some have come."""
    body = {"model": "demo", "prompt": "ROMEO:\n" * 30, "n": 3, "seed": 4, "max_tokens": NUM_TOKENS}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    found: list[list[int]] = [[], [], []]
    asked = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                found[choice["index"]] += choice.get("token_ids") or []
            if victim and sum(map(len, found)) >= 60:
                named(server, victim).kill()
                victim = ""
    return found


@pytest.mark.parametrize("victim", sampled(["penstock core", "penstock stage 1 tp 0"], 1))
def test_r4_choices_of_one_prompt_go_on_with_the_same_tokens(server: Server, victim: str) -> None:
    golden = choices(server)
    assert [len(ids) for ids in golden] == [NUM_TOKENS] * 3
    assert len({tuple(ids) for ids in golden}) == 3
    before = server.num_recoveries
    assert choices(server, victim) == golden
    assert server.num_recoveries == before + 1, "before the stream ended"


REPEATED = "the cat sat on the mat and the dog sat on the log. " * 6
STREAMS: list[dict[str, Any]] = [
    {"prompt": REPEATED, "temperature": 0},
    {"prompt": REPEATED, "temperature": 0.3, "seed": 21, "repetition_penalty": 1.02},
    {
        "prompt": "List:",
        "temperature": 0.5,
        "seed": 22,
        "ignore_eos": False,
        "structured_outputs": {"regex": "(the cat sat on the mat, ){40}"},
    },
]


@pytest.mark.parametrize(
    "victim", sampled(["penstock stage 1 tp 0", "penstock stage 2 tp 0", "penstock core"], 1)
)
def test_r4_a_stream_of_windows_goes_on_with_the_same_tokens(server: Server, victim: str) -> None:
    """Alone in the pipe, so that windows follow each other when the victim ends."""
    with Server(3, "--no-warm-spare", "--speculative-method", "suffix") as drafting:
        for request in STREAMS:
            golden = [*Stream(server, request | {"max_tokens": NUM_TOKENS})]
            stream = iter(Stream(drafting, request | {"max_tokens": NUM_TOKENS}))
            found = [next(stream) for _ in range(60)]
            before = drafting.num_recoveries
            named(drafting, victim).kill()
            found += stream
            assert found == golden
            assert drafting.num_recoveries == before + 1, "before the stream ended"
        assert drafting.metric("penstock_spec_accepted_tokens_total") > 0
