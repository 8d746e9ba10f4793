"""Writes the end of each chunk of a stream: `usage`, if the client has asked for it, and the closing bytes.

Which `usage` a chunk has depends on the client's `stream_options`:

- without `include_usage`, none
- with `include_usage`, null, since the usage comes in a separate chunk at the end
- with `continuous_usage_stats` as well, the numbers of the chunk's choice so far, in vLLM's form: the tokens
  of its prompt, the tokens generated up to this chunk, and their sum

Called by `sse`.
"""

from __future__ import annotations

from typing import Protocol


class ChunkEnd(Protocol):
    """Writes the end of each chunk of one choice."""

    @property
    def encoded(self) -> bytes:
        """The bytes that follow the choice, up to the end of the event."""

    def count(self, num_tokens: int) -> None:
        """Count tokens that were generated; chunks from now on report them."""


class PlainEnd:
    """An end that is the same for all chunks.

    Args:
        shows_null: whether the chunks have `usage` with the value null; else they have none.
    """

    def __init__(self, *, shows_null: bool) -> None:
        self.encoded = b'],"usage":null}\n\n' if shows_null else b"]}\n\n"

    def count(self, num_tokens: int) -> None:
        pass


class CountedEnd:
    """An end with the usage so far.

    Args:
        prompt_tokens: tokens of the choice's prompt.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0

    @property
    def encoded(self) -> bytes:
        prompt, completion = self._prompt_tokens, self._completion_tokens
        return b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (
            prompt,
            completion,
            prompt + completion,
        )

    def count(self, num_tokens: int) -> None:
        self._completion_tokens += num_tokens
