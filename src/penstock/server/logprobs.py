"""Log-probabilities in the two shapes of the OpenAI routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.request import TokenLogprobs
from penstock.server.openai_types import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob

LOWEST = -9999.0  # JSON has no minus infinity

TokenBytes = Callable[[int], bytes]


def token_name(raw: bytes) -> str:
    """The token as text; bytes that are no text of their own are spelled `bytes:\\xe2\\x80`."""
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
    """Keeps the text offset of a sequence from one chunk to the next."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._offset = 0

    def write(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Tokens, values and offsets; the likeliest of a position always include the chosen token."""
        names = [token_name(self._token_bytes(token_id)) for token_id in token_ids]
        values = [max(entry.logprob, LOWEST) for entry in entries]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        tops = [
            self._top(entry) | {name: value}
            for entry, name, value in zip(entries, names, values, strict=True)
        ]
        return CompletionLogprobs(text_offset=offsets, token_logprobs=values, tokens=names, top_logprobs=tops)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        names = [token_name(self._token_bytes(token_id)) for token_id in entry.top_ids]
        return {name: max(value, LOWEST) for name, value in zip(names, entry.top_logprobs, strict=True)}
