"""The settings of the HTTP server, as one frozen value: `penstock serve` makes it.

The API process reads it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.config.checks import at_least
from penstock.config.limits import ConnectionLimits, GrammarLimits, Limits

ToolParser = Literal["auto", "none", "llama3_json", "hermes", "mistral", "mistral_args", "json"]
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral"]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP front. Keys are never logged nor shown.

    Attributes:
        admin_keys: for pausing and the like, which nobody may where there is none.
        allowed_origins: whose web pages may use the server, such as https://chat.example; none but its own.
        reuse_port: take the port over from a server that has the same, once everything is ready.
        min_free_bytes: of the host's memory; with less left new requests are answered 503. 0 never.
        profile_dir: where profiles are written; None refuses them.
        settings: what `/server_info` shows; without secrets.
        tool_parser: how the model calls tools (`tokenizer.tool_formats`); auto: as its chat template shows.
        reasoning_parser: where it thinks aloud; auto: as its chat template shows.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    reuse_port: bool = False
    api_keys: list[str] = []
    admin_keys: list[str] = []
    allowed_origins: list[str] = []
    served_model_name: str | None = None
    insecure: bool = False  # allow a non-loopback address without a key
    drain_s: float = 30.0
    limits: Limits = Limits()
    connections: ConnectionLimits = ConnectionLimits()
    grammars: GrammarLimits = GrammarLimits()
    min_free_bytes: int = 128 << 20
    log_format: Literal["text", "json"] = "text"
    profile_dir: str | None = None
    settings: dict[str, Any] = {}
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"

    def __post_init__(self) -> None:
        at_least("min_free_bytes", self.min_free_bytes, 0)
