"""The typical request, by its numbers of prompt and output tokens, for which a partition is chosen."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.errors import UsageError


@dataclass(frozen=True, slots=True)
class Mix:
    """The tokens of a typical request: prompt tokens are prefilled, and each output token is one decode."""

    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Mix:
        """Parse a mix: "512:128" is 512 prompt tokens and 128 output tokens. Raises `UsageError`."""
        match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text.strip())
        if not match or int(match[2]) < 1:
            raise UsageError(
                f'partition_mix is "{text}", which is not a mix of prefill and decode.',
                remedy='Write PROMPT:OUTPUT, the tokens of a typical request, such as "512:128"; '
                '"0:128" counts decodes only.',
                param="partition_mix",
            )
        return cls(int(match[1]), int(match[2]))

    def mean_length(self, max_model_len: int) -> int:
        """Return the tokens that a running request holds in the KV cache, on average over its decodes."""
        return min(self.prompt + (self.output + 1) // 2, max_model_len)
