"""The settings of other engines that Penstock refuses with an error that names them [I2] [I3] [I5].

`llm` looks here for each unknown argument, and `cli.program` for each flag.
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
    """Raise `UsageError` if other engines have this setting and Penstock cannot support it.

    Args:
        name: the setting's name, with underscores between its words.
    """
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
