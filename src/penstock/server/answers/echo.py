"""The prompt at the beginning of a completion's text, and the log-probabilities of the prompt's tokens.

A client asks for it by `echo` in `POST /v1/completions`. A prompt that came as text is echoed as it came; a
prompt of token ids is echoed as their text. With log-probabilities, the tokens of the prompt stand before
those of the output. The first one has no value, since no token stands before it. `text_offset` says how many
characters of the text stand before a token. A token that only completes a character has the offset of that
character, and a hidden token has no characters.

`completions` makes the echo, and writes it for a whole answer; `sse` writes it piece by piece, as the scores
come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.request import SamplingParams, TokenLogprobs
from penstock.server.engine_port import TextCodec
from penstock.server.openai.logprobs import CompletionLogprobsWriter, joined_logprobs
from penstock.server.openai.openai_types import CompletionLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """The text and log-probabilities of one prompt, which stand before its output.

    Attributes:
        num_top: number of likeliest tokens reported at each position; None: no log-probabilities are wanted.
        skips_special_tokens: whether special tokens of the prompt have no characters in `text`.
    """

    text: str
    token_ids: list[int]
    num_top: int | None
    skips_special_tokens: bool
    codec: TextCodec

    @classmethod
    def of(
        cls, prompt: str | list[int], token_ids: list[int], sampling: SamplingParams, codec: TextCodec
    ) -> Echo:
        """Make the echo of a prompt.

        Args:
            prompt: the prompt as the client gave it.
            token_ids: the ids of the prompt.
        """
        skips = sampling.skip_special_tokens
        if isinstance(prompt, str):
            text, skips = prompt, True  # the tokenizer's own tokens are not in it
        else:
            detokenizer = codec.detokenizer([], skip_special_tokens=skips)
            text = detokenizer.feed(token_ids) + detokenizer.finish()
        return cls(
            text=text,
            token_ids=token_ids,
            num_top=sampling.logprobs,
            skips_special_tokens=skips,
            codec=codec,
        )

    def before(
        self, logprobs: CompletionLogprobs | None, entries: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        """Return the log-probabilities of a whole answer: the prompt's, then those of the output.

        Args:
            entries: log-probabilities of all tokens of the prompt but the first.
        """
        if self.num_top is None or logprobs is None:
            return logprobs
        _, echoed = EchoWriter(self).piece(entries)
        return joined_logprobs(echoed, logprobs)


class EchoWriter:
    """An echo with log-probabilities, piece by piece. All pieces together are the echo."""

    def __init__(self, echo: Echo) -> None:
        assert echo.num_top is not None
        self._echo = echo
        self._writer = CompletionLogprobsWriter(
            echo.codec.token_bytes,
            echo.codec.detokenizer([], skip_special_tokens=echo.skips_special_tokens),
            end=len(echo.text),
            num_top=echo.num_top,
        )
        self._num_told = 0  # tokens whose log-probabilities were returned

    @property
    def is_done(self) -> bool:
        return self._num_told == len(self._echo.token_ids)

    def piece(self, entries: Sequence[TokenLogprobs]) -> tuple[str, CompletionLogprobs]:
        """Return the text and log-probabilities of the next tokens, with the first token if it is still due.

        Args:
            entries: log-probabilities of the next tokens of the prompt.
        """
        begin, new_entries = self._num_told, [*([] if self._num_told else [None]), *entries]
        self._num_told += len(new_entries)
        first = self._writer.offset
        logprobs = self._writer.write(self._echo.token_ids[begin : self._num_told], new_entries)
        return self._echo.text[first : None if self.is_done else self._writer.offset], logprobs
