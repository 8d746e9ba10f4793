"""Settings that users of other engines know, and that are not built here: refused by name [I2] [I3] [I5].

Asked by `llm` for unknown arguments and by the command line for unknown flags.
"""

from __future__ import annotations

from typing import NoReturn

from penstock.errors import UsageError

_CONTEXT = ("context parallelism is not available", "Use more stages (--pp) or more ranks for each (--tp).")
_REFUSED = {
    "context_parallel_size": _CONTEXT,
    "prefill_context_parallel_size": _CONTEXT,
    "decode_context_parallel_size": _CONTEXT,
    "enable_elastic_ep": (
        "elastic expert parallelism adds and removes ranks, but the stages of a pipeline are fixed",
        "Use --enable-expert-parallel.",
    ),
}


def refuse_if_known(name: str) -> None:
    """Raise `UsageError` for a setting that is known elsewhere; `name` with underscores."""
    if name in _REFUSED:
        what, remedy = _REFUSED[name]
        raise UsageError(f"{name} is not supported: {what}.", remedy=remedy, param=name, code="unsupported")


def refuse_replicas() -> NoReturn:
    """Refuse several replicas: an `LLM` has one pipeline."""
    raise UsageError(
        "an LLM is one pipeline; data_parallel_size is for the server.",
        remedy="Use `penstock serve --dp`, or an LLM for each replica.",
        param="data_parallel_size",
        code="unsupported",
    )
