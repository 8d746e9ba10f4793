"""The errors of unusable JSON schemas, which are refused before anything is built of them."""

from __future__ import annotations

from penstock.errors import InvalidRequestError


def unsupported(keyword: str, why: str) -> InvalidRequestError:
    """Return the refusal of a keyword that would not be obeyed."""
    return InvalidRequestError(
        f"structured output: the schema has {keyword}: {why}.",
        remedy=f"Leave {keyword} out, and check the value in the client.",
        param="structured_outputs",
        code="unsupported_schema",
    )


def refused(why: str) -> InvalidRequestError:
    """Return the refusal of a text that is not a schema."""
    return InvalidRequestError(
        f"structured output: {why}.", param="structured_outputs", code="invalid_schema"
    )
