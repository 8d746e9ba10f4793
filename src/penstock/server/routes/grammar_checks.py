"""The checks of grammars in a request: one that cannot be built within bounds is refused by its field.

A request meets them when its prompt and its sampling are known, before its `responder`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from penstock.errors import InvalidRequestError
from penstock.grammar.proving import GrammarProver
from penstock.request import SamplingParams, StructuredOutputs


class GrammarChecks:
    """The checks of grammars; a refusal names the field that asks for one. One for the server."""

    def __init__(self, prover: GrammarProver) -> None:
        self._prover = prover

    async def check_sampling(self, sampling: SamplingParams, param: str = "structured_outputs") -> None:
        """Return if the structured output of `sampling`, where there is one, can be had.

        Args:
            param: the field that asks for it.

        Raises:
            InvalidRequestError: it cannot; names the field.
            OverloadedError: too many grammars are being built.
        """
        if sampling.structured_outputs is not None:
            with _named(param):
                await self._prover.prove(sampling.structured_outputs)

    async def check_given(self, structured: StructuredOutputs, param: str) -> None:
        """Check a grammar of a part of the text. Raises as above."""
        with _named(param):
            await self._prover.prove(structured)

    async def check_made(self, structured: StructuredOutputs, param: str) -> None:
        """Check a grammar that was made of parts, each of which is within its bounds. Raises as above."""
        with _named(param):
            await self._prover.prove_made(structured)

    def check_schema(self, schema: str, param: str) -> None:
        """Raise `InvalidRequestError` for a JSON schema that is out of bounds, or not obeyed in all.

        Its length does not count.
        """
        with _named(param):
            self._prover.check_schema(schema)


@contextlib.contextmanager
def _named(param: str) -> Iterator[None]:
    """Have a refusal name the field `param`."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = param
        raise
