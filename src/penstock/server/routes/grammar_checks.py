"""Checks of a request's grammars: one that cannot be built is refused, and the error names its field.

They are made when the prompt and the sampling parameters are known, before `responder` makes the response.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from penstock.errors import InvalidRequestError
from penstock.grammar.proving import GrammarProver
from penstock.request import SamplingParams, StructuredOutputs


class GrammarChecks:
    """The checks of grammars; a refusal names the field at fault. The server has one such object."""

    def __init__(self, prover: GrammarProver) -> None:
        self._prover = prover

    async def check_sampling(self, sampling: SamplingParams, param: str = "structured_outputs") -> None:
        """Check the structured output of `sampling`, if it has one.

        Args:
            param: the field that asks for structured output.

        Raises:
            InvalidRequestError: the grammar cannot be used; the error names the field.
            OverloadedError: too many grammars are being built.
            UnavailableError: grammars cannot be tried out now.
        """
        if sampling.structured_outputs is not None:
            with _named(param):
                await self._prover.prove(sampling.structured_outputs)

    async def check_given(self, structured: StructuredOutputs, param: str) -> None:
        """Check a grammar for a part of the text. Raises what `check_sampling` does."""
        with _named(param):
            await self._prover.prove(structured)

    async def check_made(self, structured: StructuredOutputs, param: str) -> None:
        """Check a grammar that this server has made of parts, whose sizes were checked before.

        Raises what `check_sampling` does.
        """
        with _named(param):
            await self._prover.prove_made(structured)

    def check_schema(self, schema: str, param: str) -> None:
        """Raise `InvalidRequestError` for a JSON schema beyond bounds, or one that a grammar ignores in part.

        The schema's length is not checked, since the tools that it belongs to are bounded.
        """
        with _named(param):
            self._prover.check_schema(schema)


@contextlib.contextmanager
def _named(param: str) -> Iterator[None]:
    """Let a refusal name the field `param`."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = param
        raise
