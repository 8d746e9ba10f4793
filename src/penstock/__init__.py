"""Penstock serves large language models through a pipeline. `from penstock import LLM, SamplingParams`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.llm import LLM
    from penstock.request import SamplingParams, StructuredOutputs

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> Any:
    """Import lazily: `import penstock` must stay cheap and torch-free."""
    if name == "LLM":
        from penstock.llm import LLM

        return LLM
    if name == "SamplingParams":
        from penstock.request import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from penstock.request import StructuredOutputs

        return StructuredOutputs
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
