"""An engine that serves large language models in a pipeline. `from penstock import LLM, SamplingParams`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.client.outputs import CompletionOutput, RequestOutput
    from penstock.engine.client.vectors import EmbeddingRequestOutput, PoolingRequestOutput
    from penstock.llm.async_llm import AsyncLLM
    from penstock.llm.llm import LLM
    from penstock.llm.prompt_preparer import TextPrompt, TokensPrompt
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
    "LLM": "llm.llm",
    "AsyncLLM": "llm.async_llm",
    "CompletionOutput": "engine.client.outputs",
    "EmbeddingRequestOutput": "engine.client.vectors",
    "PoolingParams": "request",
    "PoolingRequestOutput": "engine.client.vectors",
    "RequestOutput": "engine.client.outputs",
    "SamplingParams": "request",
    "StructuredOutputs": "request",
    "TextPrompt": "llm.prompt_preparer",
    "TokensPrompt": "llm.prompt_preparer",
}


def __getattr__(name: str) -> Any:
    """Import lazily: `import penstock` must stay cheap and torch-free."""
    if name in _HOMES:
        return getattr(import_module(f"penstock.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
