"""Penstock serves large language models through a pipeline. `from penstock import LLM, SamplingParams`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM
    from penstock.engine.outputs import CompletionOutput, RequestOutput
    from penstock.engine.text_side import TextPrompt, TokensPrompt
    from penstock.engine.vectors import EmbeddingRequestOutput, PoolingRequestOutput
    from penstock.llm import LLM
    from penstock.request import PoolingParams, SamplingParams, StructuredOutputs

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "engine.outputs",
    "EmbeddingRequestOutput": "engine.vectors",
    "PoolingParams": "request",
    "PoolingRequestOutput": "engine.vectors",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "request",
    "StructuredOutputs": "request",
    "TextPrompt": "engine.text_side",
    "TokensPrompt": "engine.text_side",
}


def __getattr__(name: str) -> Any:
    """Import lazily: `import penstock` must stay cheap and torch-free."""
    if name in _HOMES:
        return getattr(import_module(f"penstock.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
