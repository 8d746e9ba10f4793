"""The settings of the HTTP server, as one frozen value: `penstock serve` makes it.

The API process reads it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.config.checks import at_least, between
from penstock.config.limits import ConnectionLimits, GrammarLimits, Limits
from penstock.config.setting import Setting
from penstock.errors import UsageError

ToolParser = Literal[
    "auto",
    "none",
    "mistral_args",
    "mistral",
    "hermes",
    "qwen3_coder",
    "seed_oss",
    "glm45",
    "minimax_m2",
    "minimax_m3",
    "minicpm5",
    "hunyuan",
    "kimi_k3",
    "solar",
    "apertus",
    "deepseek_v4",
    "deepseek_v32",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "harmony",
    "gemma4",
    "function_gemma",
    "lfm2",
    "olmo3",
    "functionary_v3",
    "functionary_v32",
    "muse",
    "cohere",
    "command_r",
    "phi4_mini",
    "granite",
    "firefunction",
    "gigachat",
    "gigachat3",
    "nemotron_json",
    "minimax_m1",
    "tool_calls",
    "internlm",
    "llama3_json",
    "pythonic",
    "json",
]
ReasoningParser = Literal[
    "auto",
    "none",
    "mistral",
    "harmony",
    "granite",
    "seed_oss",
    "minimax_m3",
    "hunyuan",
    "kimi_k3",
    "muse",
    "solar",
    "functionary",
    "gemma4",
    "cohere",
    "qwen3",
    "deepseek_r1",
]


def _existing_directory(path: Path) -> str:
    if not path.is_dir():
        raise UsageError(
            f"--profile-dir {path} is not a directory.", param="--profile-dir", remedy="Make it."
        )
    return str(path.absolute())


def _absolute(path: Path) -> str:
    """Return the path as child processes can use it."""
    return str(path.absolute())


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP front. Keys are never logged nor shown.

    Attributes:
        host: address to listen on; an address other than loopback needs a key.
        port: port to listen on; 0 chooses a free port.
        reuse_port: take over the port of a running server once this one is ready.
        ssl_certfile: PEM file of the server's certificate and those that signed it; None serves plain HTTP.
        ssl_keyfile: PEM file of the certificate's private key, not encrypted.
        served_model_names: names of the model for clients; answers carry the first one. Repeat the flag, or
            give it once before all names. Default: the model's own name.
        tool_parser: format of tool calls (`tokenizer.form_table`); `auto` detects it from the chat
            template.
        reasoning_parser: format of the model's reasoning; `auto` detects it from the chat template.
        api_keys: keys, one of which each client must send; without keys the server is open.
        api_key_file: file of such keys, one per line.
        admin_keys: keys for `/pause` and other admin routes; without keys these routes do not exist.
        admin_key_file: file of admin keys, one per line.
        allowed_origins: origins whose web pages may use the server, such as `https://chat.example`, besides
            its own.
        allowed_hosts: extra host names that clients in containers or on other machines use for this one,
            such as `host.docker.internal`; checked only if the server listens on loopback.
        profile_dir: directory for the files of `/start_profile`; None switches profiles off.
        insecure: allow an address other than loopback without a key.
        json_open_objects: allow fields that a JSON schema does not declare, as JSON Schema does, unless the
            request says otherwise; by default such objects are closed or bounded.
        drain_s: seconds for running requests to end after SIGTERM.
        log_format: format of the log on standard error.
        vllm_metric_names: add vLLM's metric names to `/metrics`, for dashboards made for vLLM.
        min_free_bytes: bytes; with less free host memory new requests get 503. 0 switches it off.
        settings: what `/server_info` shows; without secrets.
    """

    host: Annotated[str, Setting("server", "address to listen on")] = "127.0.0.1"
    port: Annotated[int, Setting("server", "port to listen on")] = 8000
    reuse_port: Annotated[bool, Setting("server", "take over the port of a running server")] = False
    ssl_certfile: Annotated[
        str | None,
        Setting("server", "certificate of HTTPS, PEM", text_type=Path | None, read=_absolute),
    ] = None
    ssl_keyfile: Annotated[
        str | None, Setting("server", "its private key, PEM", text_type=Path | None, read=_absolute)
    ] = None
    served_model_names: Annotated[
        list[str],
        Setting("server", "name that clients use; several are aliases", flag="--served-model-name"),
    ] = []
    tool_parser: Annotated[
        ToolParser,
        Setting(
            "server",
            "tool-call format; auto: from the chat template",
            aliases=("--tool-call-parser",),
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser, Setting("server", "reasoning format; auto: from the chat template")
    ] = "auto"
    api_keys: Annotated[
        list[str],
        Setting(
            "server",
            "key that clients must send; prefer --api-key-file",
            flag="--api-key",
            is_secret=True,
        ),
    ] = []
    api_key_file: ClassVar[Annotated[Path | None, Setting("server", "file of keys, one a line")]] = None
    admin_keys: Annotated[
        list[str],
        Setting(
            "server",
            "key that opens /pause and the like; prefer --admin-key-file",
            flag="--admin-key",
            is_secret=True,
        ),
    ] = []
    admin_key_file: ClassVar[Annotated[Path | None, Setting("server", "file of admin keys, one a line")]] = (
        None
    )
    allowed_origins: Annotated[
        list[str], Setting("server", "web origin that may use it: https://chat.example")
    ] = []
    allowed_hosts: Annotated[
        list[str], Setting("server", "extra name of this machine: host.docker.internal")
    ] = []
    profile_dir: Annotated[
        str | None,
        Setting(
            "server",
            "directory for what /start_profile records",
            text_type=Path | None,
            read=_existing_directory,
        ),
    ] = None
    insecure: Annotated[bool, Setting("server", "allow an open address without a key")] = False
    json_open_objects: Annotated[bool, Setting("server", "allow JSON fields that schemas do not name")] = (
        False
    )
    drain_s: Annotated[
        float, Setting("server", "seconds for running requests after SIGTERM", flag="--drain-seconds")
    ] = 30.0
    log_format: Annotated[
        Literal["text", "json"], Setting("server", "format of the log on standard error")
    ] = "text"
    vllm_metric_names: Annotated[bool, Setting("server", "add vLLM's metric names to /metrics")] = False
    min_free_bytes: Annotated[int, Setting("limits", "with less free host memory, answer 503")] = 128 << 20
    limits: Limits = Limits()
    connections: ConnectionLimits = ConnectionLimits()
    grammars: GrammarLimits = GrammarLimits()
    settings: dict[str, Any] = {}

    def __post_init__(self) -> None:
        between("port", self.port, 0, 65535)
        if not 0 <= self.drain_s < math.inf:
            raise UsageError(f"drain_s is {self.drain_s}; it must be at least 0.", param="drain_s")
        at_least("min_free_bytes", self.min_free_bytes, 0)
        if not all(name.strip() for name in self.served_model_names):
            raise UsageError(
                "served_model_names contains an empty name.",
                remedy="Give names with characters, or leave the flag out for the model's own.",
                param="served_model_names",
            )
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            given, missing = ("certfile", "keyfile") if self.ssl_certfile else ("keyfile", "certfile")
            raise UsageError(
                f"--ssl-{given} is given without --ssl-{missing}.",
                remedy="Give both for HTTPS, or none for plain HTTP; one file with both may be given twice.",
                param=f"ssl_{missing}",
            )

    @property
    def scheme(self) -> str:
        """The scheme of the server's URLs."""
        return "https" if self.ssl_certfile else "http"
