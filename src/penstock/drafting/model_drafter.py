"""A drafter whose guesses come from a small model in a process of its own: the core's side.

The process (`drafting.drafter_process`) gets the new tokens of a request, and guesses on from there until it
has as many guesses as are wanted. The core never waits for the process. A question is answered with the
guesses that have come and still fit the text, and the scheduler decides whether to wait for more. While a
window is on its way through the stages the draft model may guess on, as if the whole window were right.

The draft model chooses its tokens with the sampling parameters and the random numbers of the request. So
where both models have the same probabilities they draw the same token, and sampled texts are guessed nearly
as well as greedy ones.

Each token that comes shows whether the newest guess was right. Where guesses are right too seldom to be of
use, the model is asked for one token now and then, to see whether that has changed. Torch-free.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from penstock.batch import RowSampling
from penstock.drafting.draft_wire import (
    MOST_IDS,
    MOST_SAMPLING_BYTES,
    Ask,
    Asked,
    DraftSocket,
    Guess,
    Guessed,
)
from penstock.errors import LinkClosedError, PenstockError, WaitTimeoutError
from penstock.speculation.drafter import NO_DRAFT, Draft, OwnGuesses, Question
from penstock.speculation.guessed_text import FIRST_CHANCE, LEAST_CHANCE, Chance, GuessedText, useful

SILENCE_S = 60.0  # the longest time without a message while the process has work; a step takes far less
_TRIAL_EVERY = 24  # tokens from one trial to the next, where guesses are of no use
_MOST_BEHIND = 64  # so many tokens are computed in about the time of one
_SAMPLING_AS_IDS = MOST_SAMPLING_BYTES // 5  # how many ids (of five bytes) a request's sampling counts as


class DraftingProcess(Protocol):
    """The process in which the model computes; `drafting.drafter_child` starts it."""

    @property
    def socket(self) -> DraftSocket[Guessed]: ...

    def why_ended(self) -> PenstockError | None:
        """Return the error that the process has reported, or how it ended; None: it runs."""
        ...

    def close(self) -> None:
        """End the process, whatever it does."""
        ...


class ModelDrafter(OwnGuesses):
    """Guesses with another model; until that model is loaded there are no guesses.

    Args:
        process: the process, which belongs to this drafter.
        clock: monotonic seconds.
    """

    name = "draft_model"

    def __init__(self, process: DraftingProcess, clock: Callable[[], float]) -> None:
        self._process = process
        self._socket = process.socket
        self._clock = clock
        self._texts: dict[int, _Text] = {}
        self._asks: list[Ask] = []  # to be sent
        self._forgotten: list[int] = []
        self._chance = Chance(FIRST_CHANCE)  # measured on all requests
        self._token_s = math.inf
        self._silent_since: float | None = None  # None: the process has no work
        with contextlib.suppress(LinkClosedError):  # `poll` raises it again
            self._socket.send(Asked())  # it is answered once the model is loaded

    def propose(self, question: Question) -> Draft:
        if not self._has_loaded:
            return NO_DRAFT
        token_ids = question.token_ids
        text = self._texts.get(question.request)
        if text is None:
            text = self._texts[question.request] = _Text(self._chance.value, _drawn_by(question.sampling))
        if text.sampling_bytes > MOST_SAMPLING_BYTES:
            return NO_DRAFT
        for is_right in text.read(token_ids):
            self._chance.note(is_right)
        wanted, is_trial = self._wanted(text, question)
        if wanted and (text.num_told < len(token_ids) or text.wanted < wanted):
            self._ask(text, question, wanted)
        guessed = text.following(token_ids)
        has_more = not is_trial and len(guessed) < wanted and text.is_followed and not text.is_all
        return Draft(guessed[: question.most], text.chance.value, self._token_s if has_more else math.inf)

    @property
    def _has_loaded(self) -> bool:
        return math.isfinite(self._token_s)

    def _wanted(self, text: _Text, question: Question) -> tuple[int, bool]:
        """Return how many tokens to ask for, and whether as a trial, to see if guesses are of use again."""
        if text.chance.value >= max(question.least_chance, LEAST_CHANCE):
            return min(question.most, useful(text.chance.value)), False
        return int(len(question.token_ids) >= text.tried_at + _TRIAL_EVERY), True

    def _ask(self, text: _Text, question: Question, wanted: int) -> None:
        new = question.token_ids[text.num_told :]
        for first in range(0, max(1, len(new)), MOST_IDS):
            is_first = text.num_told == 0 and first == 0
            self._asks.append(
                Ask(
                    request=question.request,
                    start=text.num_told + first,
                    token_ids=new[first : first + MOST_IDS],
                    wanted=wanted if first + MOST_IDS >= len(new) else 0,
                    prompt_len=question.prompt_len if is_first else 0,
                    sampling=text.sampling if is_first else None,
                )
            )
        text.num_told = text.tried_at = len(question.token_ids)
        text.wanted = wanted

    def accept(self, request: int, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: the next tokens show how many guesses were right."""

    def forget(self, request: int) -> None:
        if self._texts.pop(request, None) is not None:
            self._forgotten.append(request)

    def poll(self) -> Collection[int]:
        """Send the questions and take the guesses; see `Drafter.poll`.

        Raises:
            LinkClosedError: the process has ended.
            WaitTimeoutError: the process has work, and has sent nothing for `SILENCE_S`.
        """
        try:
            self._send()
            return self._receive()
        except LinkClosedError as error:
            raise LinkClosedError(f"its process has ended: {self._process.why_ended() or error}") from None

    def _send(self) -> None:
        """Send the questions since the last time, in messages of bounded size."""
        if not self._asks and not self._forgotten:
            self._socket.flush()
            return
        if self._asks and self._silent_since is None:
            self._silent_since = self._clock()
        asks, self._asks = self._asks, []
        forgotten, self._forgotten = self._forgotten, []
        size, part = 0, list[Ask]()
        for ask in asks:
            more = len(ask.token_ids) + (_SAMPLING_AS_IDS if ask.sampling is not None else 0)
            if part and size + more > MOST_IDS:
                self._socket.send(Asked(part))
                size, part = 0, []
            size += more
            part.append(ask)
        self._socket.send(Asked(part, forgotten))

    def _receive(self) -> Collection[int]:
        news, now = set(), self._clock()
        for message in self._socket.receive():
            self._token_s = message.token_s
            self._silent_since = None if message.is_idle else now
            for guess in message.guesses:
                if (text := self._texts.get(guess.request)) is not None:
                    text.take(guess)
                    news.add(guess.request)
        if self._silent_since is not None and now - self._silent_since > SILENCE_S:
            raise WaitTimeoutError(f"its process has sent nothing for {SILENCE_S:.0f} s.")
        return news

    def wait_sources(self) -> Sequence[int]:
        return (self._socket.fileno(),)

    def close(self) -> None:
        self._process.close()


class _Text(GuessedText):
    """The guesses of one request.

    Args:
        chance: the chance that a guess is right, to begin with.
        sampling: how guesses are chosen.

    Attributes:
        num_told: how many tokens the process has been sent.
        wanted: how many guesses the newest `Ask` wanted.
        tried_at: the number of tokens at the newest `Ask`.
        is_all: nothing will be guessed beyond the newest guess.
    """

    def __init__(self, chance: float, sampling: RowSampling) -> None:
        super().__init__(chance)
        self.sampling = sampling
        self.sampling_bytes = len(msgspec.msgpack.encode(sampling))
        self.num_told = 0
        self.wanted = 0
        self.tried_at = 0
        self.is_all = False
        self._has_guess = False

    @property
    def is_followed(self) -> bool:
        """Whether the process has computed the text, except for a few of the newest tokens."""
        return self._has_guess and self.num_behind <= _MOST_BEHIND

    def take(self, guess: Guess) -> None:
        """Take the newest guess of the process."""
        self.hear(guess.num_known, guess.token_ids)
        self.is_all, self._has_guess = guess.is_all, True


def _drawn_by(sampling: RowSampling) -> RowSampling:
    """Return the sampling for guesses: the request's, without log-probabilities and without a grammar."""
    return msgspec.structs.replace(sampling, num_logprobs=-1, num_prompt_logprobs=-1, structured=None)
