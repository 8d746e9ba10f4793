"""The log-probabilities in the shapes of the OpenAI routes: of chats, of completions, and of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.request import TokenLogprobs
from penstock.server.openai.openai_types import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from penstock.tokenizer.detokenizer import Detokenizer

LOWEST = -9999.0  # JSON has no minus infinity

TokenBytes = Callable[[int], bytes]


def token_name(raw: bytes) -> str:
    r"""Return the token as text; bytes that are not text by themselves are spelled `bytes:\xe2\x80`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], token_bytes: TokenBytes
) -> ChatLogprobs:
    return ChatLogprobs(
        [
            _chat_entry(token_id, entry, token_bytes)
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]
    )


def _chat_entry(token_id: int, entry: TokenLogprobs, token_bytes: TokenBytes) -> ChatTokenLogprob:
    raw = token_bytes(token_id)
    top = [
        TopLogprob(token_name(top_raw), max(value, LOWEST), list(top_raw))
        for top_raw, value in zip(map(token_bytes, entry.top_ids), entry.top_logprobs, strict=True)
    ]
    return ChatTokenLogprob(token_name(raw), max(entry.logprob, LOWEST), list(raw), top)


class CompletionLogprobsWriter:
    """Writes log-probabilities of consecutive tokens of a prompt or an output, piece by piece.

    A token that only completes a character begins where the character does. A token without text begins where
    the next one does.

    Args:
        token_bytes: returns the bytes of a token.
        detokenizer: a fresh detokenizer for these tokens; its text shows where each token begins.
        begin: number of characters of the text before the first token.
        end: number of characters of the whole text, if it is known: no token begins after it.
        num_top: number of likeliest tokens to report; an entry may have more. None: all that it has.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        detokenizer: Detokenizer,
        *,
        begin: int = 0,
        end: int | None = None,
        num_top: int | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._detokenizer = detokenizer
        self._length = begin
        self._end = end
        self._num_top = num_top

    @property
    def offset(self) -> int:
        """The place in the text where the next token begins."""
        return self._length if self._end is None else min(self._length, self._end)

    def write(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """Return the next tokens' texts, values and offsets; the likeliest always include the chosen token.

        Args:
            entries: None for a token without a value, which is the first of a prompt.
        """
        names = [token_name(self._token_bytes(token_id)) for token_id in token_ids]
        offsets = []
        for token_id in token_ids:
            text = self._detokenizer.feed((token_id,))
            left = _length_before(self._token_bytes(token_id), text)
            self._length += left
            offsets.append(self.offset)
            self._length += len(text) - left
        tops = [
            None if entry is None else self._top(entry) | {name: max(entry.logprob, LOWEST)}
            for entry, name in zip(entries, names, strict=True)
        ]
        values = [None if entry is None else max(entry.logprob, LOWEST) for entry in entries]
        return CompletionLogprobs(text_offset=offsets, token_logprobs=values, tokens=names, top_logprobs=tops)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        names = [token_name(self._token_bytes(token_id)) for token_id in entry.top_ids[: self._num_top]]
        return {name: max(value, LOWEST) for name, value in zip(names, entry.top_logprobs, strict=False)}


def _length_before(raw: bytes, text: str) -> int:
    """Return how many characters of the text that came with a token are not the token's own.

    They stand for bytes of earlier tokens that became no character, and come before the token's own text.
    """
    own = raw.decode(errors="ignore")
    is_text = own.encode() == raw
    return len(text) - len(own) if is_text and own and text.endswith(own) else 0


def joined_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Return the log-probabilities of two runs of tokens as those of one run."""
    return CompletionLogprobs(
        text_offset=first.text_offset + second.text_offset,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        tokens=first.tokens + second.tokens,
        top_logprobs=first.top_logprobs + second.top_logprobs,
    )


def prompt_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int, token_bytes: TokenBytes
) -> PromptLogprobs:
    """Return the log-probabilities of all tokens of a prompt, in vLLM's shape.

    Args:
        entries: log-probabilities of all tokens but the first.
        num_top: number of likeliest tokens to report; an entry may have more.
    """

    def told(token_id: int, value: float, rank: int) -> PromptLogprob:
        text = token_bytes(token_id).decode(errors="replace")
        return PromptLogprob(logprob=max(value, LOWEST), rank=rank, decoded_token=text)

    logprobs: PromptLogprobs = [None]
    for token_id, entry in zip(token_ids[1:], entries, strict=True):
        tops = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
        likeliest = {top_id: told(top_id, value, rank) for rank, (top_id, value) in enumerate(tops, 1)}
        logprobs.append({token_id: told(token_id, entry.logprob, entry.rank)} | likeliest)
    return logprobs
