"""The core's side of a draft model, against a process that says what it is told to."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import pytest

from drafters import asked
from fakes import FakeClock
from penstock.batch import GREEDY, LogitChanges, RowSampling
from penstock.drafting.draft_wire import MOST_IDS, Ask, Asked, DraftSocket, Guess, Guessed, draft_sockets
from penstock.drafting.model_drafter import SILENCE_S, ModelDrafter
from penstock.errors import LinkClosedError, PenstockError, StageLostError, WaitTimeoutError
from penstock.request import StructuredOutputs
from penstock.speculation.drafter import NO_DRAFT, Draft

TOKEN_S = 0.01


class FakeProcess:
    """The other end of the connection, in the hands of a test."""

    def __init__(self) -> None:
        own, other = draft_sockets()
        self.socket: DraftSocket[Guessed] = DraftSocket(own, Guessed)
        self.end: DraftSocket[Asked] = DraftSocket(other, Asked)
        self.is_closed = False
        self.clock = FakeClock()
        self.drafter = ModelDrafter(self, self.clock)

    def why_ended(self) -> PenstockError | None:
        return StageLostError("drafter was killed by SIGKILL.")

    def close(self) -> None:
        self.is_closed = True
        self.socket.close()
        self.end.close()

    def load(self) -> None:
        self.end.send(Guessed(token_s=TOKEN_S))
        self.drafter.poll()

    def asks(self) -> list[Ask]:
        """What the core has said since the last time."""
        self.drafter.poll()
        return [ask for message in self.end.receive() for ask in message.asks]

    def say(
        self,
        request: int,
        num_known: int,
        token_ids: list[int],
        *,
        is_idle: bool = False,
        is_all: bool = False,
    ) -> None:
        self.end.send(Guessed([Guess(request, num_known, token_ids, is_all)], TOKEN_S, is_idle))
        assert set(self.drafter.poll()) == {request}

    def propose(self, token_ids: list[int], most: int = 4, request: int = 0, **given: object) -> Draft:
        return self.drafter.propose(asked(token_ids, most, request, **given))


@pytest.fixture
def process() -> Iterator[FakeProcess]:
    process = FakeProcess()
    yield process
    process.close()


def test_nothing_is_guessed_before_the_model_is_loaded(process: FakeProcess) -> None:
    assert process.propose([1, 2]) is NO_DRAFT
    assert process.asks() == []
    process.load()
    process.propose([1, 2])
    assert [ask.token_ids for ask in process.asks()] == [[1, 2]]


def test_only_new_tokens_are_told(process: FakeProcess) -> None:
    process.load()
    process.propose([1, 2], prompt_len=2)
    process.propose([1, 2])
    process.propose([1, 2, 3, 4])
    first, second = process.asks()
    assert (first.start, first.token_ids, first.prompt_len, first.sampling) == (0, [1, 2], 2, GREEDY)
    assert (second.start, second.token_ids, second.sampling) == (2, [3, 4], None)


def test_a_long_prompt_is_told_in_parts(process: FakeProcess) -> None:
    process.load()
    text = list(range(MOST_IDS * 2 + 5))
    process.propose(text)
    asks = process.asks()
    assert [token_id for ask in asks for token_id in ask.token_ids] == text
    assert [ask.start for ask in asks] == [0, MOST_IDS, 2 * MOST_IDS]
    assert [bool(ask.wanted) for ask in asks] == [False, False, True]


def test_a_guess_that_fits_the_text_is_a_draft_and_more_of_it_comes(process: FakeProcess) -> None:
    process.load()
    text = [1, 2, 3]
    assert process.propose(text).more_s == math.inf  # it may have to compute a long prompt first
    process.say(0, 3, [4, 5])
    draft = process.propose(text)
    assert (draft.token_ids, draft.more_s) == ([4, 5], TOKEN_S)
    process.say(0, 3, [4, 5, 6, 7])
    draft = process.propose([*text, 4])  # the first was right
    assert draft.token_ids == [5, 6, 7]
    assert process.propose([*text, 4, 9]).token_ids == ()


def test_where_no_more_is_guessed_nobody_waits_for_more(process: FakeProcess) -> None:
    process.load()
    text = [1, 2, 3]
    process.propose(text)
    process.say(0, 3, [4], is_all=True)
    draft = process.propose(text)
    assert (draft.token_ids, draft.more_s) == ([4], math.inf)
    text.append(4)
    assert process.propose(text).more_s == math.inf
    process.say(0, 4, [5])  # there is room again
    assert process.propose(text).more_s == TOKEN_S


def test_no_more_than_is_asked_for(process: FakeProcess) -> None:
    process.load()
    process.propose([1], most=2)
    process.say(0, 1, [2, 3, 4])
    assert process.propose([1], most=2) == Draft([2, 3], process.propose([1]).chance)


def test_the_chance_follows_what_was_said(process: FakeProcess) -> None:
    process.load()
    text, before = [1], process.propose([1]).chance
    for token in range(2, 30):
        process.say(0, len(text), [token])
        text.append(token)
        process.propose(text)
    good = process.propose(text).chance
    assert good > before
    for token in range(30, 90):
        process.say(0, len(text), [token + 1])
        text.append(token)
        process.propose(text)
    assert process.propose(text).chance < before < good


def test_one_who_guesses_badly_is_asked_now_and_then(process: FakeProcess) -> None:
    process.load()
    text = [1]
    for token in range(2, 200):
        for ask in process.asks():
            process.say(0, ask.start + len(ask.token_ids), [0] * ask.wanted)
        text.append(token)
        process.propose(text)
    wanted = []
    for token in range(200, 300):
        text.append(token)
        draft = process.propose(text)
        assert draft.more_s == math.inf
        wanted += [ask.wanted for ask in process.asks()]
    assert len(wanted) in range(3, 6)
    assert set(wanted) == {1}


def test_what_is_of_no_use_now_is_not_guessed(process: FakeProcess) -> None:
    process.load()
    process.propose([1, 2], least_chance=0.95)
    assert process.asks() == []


def test_guesses_are_drawn_as_the_requests_tokens_are(process: FakeProcess) -> None:
    process.load()
    sampling = RowSampling(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.0,
        seed=11,
        min_tokens=3,
        suppressed_ids=[2],
        num_logprobs=4,
        num_prompt_logprobs=1,
        structured=StructuredOutputs(regex="a+"),
    )
    process.propose([1, 2], sampling=sampling)
    (ask,) = process.asks()
    assert ask.sampling == msgspec.structs.replace(
        sampling, num_logprobs=-1, num_prompt_logprobs=-1, structured=None
    )


def test_requests_that_end_are_told_once(process: FakeProcess) -> None:
    process.load()
    process.propose([1], request=4)
    process.drafter.forget(4)
    process.drafter.forget(4)
    process.drafter.forget(5)  # was never asked about
    process.drafter.poll()
    assert [request for message in process.end.receive() for request in message.forgotten] == [4]
    process.end.send(Guessed([Guess(4, 1, [2])], TOKEN_S))
    assert process.drafter.poll() == set()


def test_a_process_that_ends_is_an_error_with_its_reason(process: FakeProcess) -> None:
    process.load()
    process.end.close()
    with pytest.raises(LinkClosedError, match="its process has ended: drafter was killed by SIGKILL"):
        process.drafter.poll()


def test_a_process_that_says_nothing_is_an_error(process: FakeProcess) -> None:
    process.load()
    process.propose([1])
    process.drafter.poll()
    process.clock.advance(SILENCE_S / 2)
    process.end.send(Guessed(token_s=TOKEN_S, is_idle=False))
    process.drafter.poll()
    process.clock.advance(SILENCE_S - 0.1)
    process.drafter.poll()
    process.clock.advance(0.2)
    with pytest.raises(WaitTimeoutError, match="nothing for 60 s"):
        process.drafter.poll()


def test_a_process_without_work_may_be_silent(process: FakeProcess) -> None:
    process.load()
    process.propose([1])
    process.say(0, 1, [2, 3, 4, 5], is_idle=True)
    process.clock.advance(10 * SILENCE_S)
    assert process.drafter.poll() == set()


def test_a_process_that_reads_nothing_is_an_error(process: FakeProcess) -> None:
    process.load()

    def ask_on() -> None:
        for number in range(2000):
            process.propose([7] * MOST_IDS, request=number)
            process.drafter.poll()

    with pytest.raises(LinkClosedError):
        ask_on()


def test_a_second_core_side_hears_that_the_model_is_loaded(process: FakeProcess) -> None:
    """The first epoch of a core may fail, and the process is used on."""
    process.load()
    second = ModelDrafter(process, process.clock)
    questions = list(process.end.receive())  # the process answers whatever it is told
    assert questions[-1] == Asked()
    process.end.send(Guessed(token_s=TOKEN_S))
    second.poll()
    second.propose(asked([1, 2], 4))
    second.poll()
    assert [ask.token_ids for message in process.end.receive() for ask in message.asks] == [[1, 2]]


def test_a_request_that_says_too_much_of_its_tokens_is_left_alone(process: FakeProcess) -> None:
    process.load()
    bias = LogitChanges(bias=dict.fromkeys(range(5000), 1.5))
    sampling = msgspec.structs.replace(GREEDY, changes=bias)
    assert process.propose([1, 2], sampling=sampling) is NO_DRAFT
    assert process.asks() == []


def test_many_requests_that_say_much_go_in_several_messages(process: FakeProcess) -> None:
    process.load()
    bias = LogitChanges(bias=dict.fromkeys(range(1000), 1.5))
    sampling = msgspec.structs.replace(GREEDY, changes=bias)
    for request in range(40):
        process.propose([1, 2], request=request, sampling=sampling)
    asks = [ask for _ in range(10) for ask in process.asks()]  # what the socket does not hold follows
    assert sorted(ask.request for ask in asks) == list(range(40))


def test_a_guess_that_comes_late_is_held_against_what_was_said(process: FakeProcess) -> None:
    process.load()
    process.propose([1, 2, 3])
    process.propose([1, 2, 3, 9])
    process.say(0, 3, [4, 5])  # behind the first three
    assert process.propose([1, 2, 3, 9]).token_ids == ()
    process.say(0, 3, [9, 6])
    assert process.propose([1, 2, 3, 9]).token_ids == [6]
