"""The prompt at the beginning of a completion's text, and what the model thinks of its tokens.

`POST /v1/completions` with `echo`. A prompt that came as text is echoed as it came; one of token ids, as the
text of these. With log-probabilities the tokens of the prompt stand before those of the output, the first
without a value, since nothing stands before it. `text_offset` says how many characters of the text are there
before a token; one that only completes a character begins where that does, and hidden ones take no room.

Called by `completions` for a whole answer, and by `sse` piece by piece, as the scores come.
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
        num_top: likeliest tokens told at each position; None: no log-probabilities are wanted.
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
            prompt: as the client gave it.
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
            entries: of the prompt's tokens but the first.
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
        self._num_told = 0  # tokens

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
