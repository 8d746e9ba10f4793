"""`penstock chat` and `penstock complete`: talk to a running server.

Called by `cli.program`. `cli.chat_terminal` has the conversation, and `cli.http_client` the HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.cli.bench.http_stream import Target
from penstock.cli.chat_terminal import (
    AnswerEnd,
    AnswerStream,
    ChatTerminal,
    Message,
    Thought,
    show_answer,
)
from penstock.cli.client_tls import CA_FILE_HELP
from penstock.cli.flags import SERVED_ENV, flag
from penstock.cli.http_client import first_key, served_model, stream_json
from penstock.cli.terminal import Invocation
from penstock.config.checks import above_zero
from penstock.errors import UsageError


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TalkSettings:
    """Which server, and how its answers are sampled. None leaves a value to the server."""

    url: Annotated[str, flag("running server", "--url", "--base-url", group="server")] = (
        "http://127.0.0.1:8000"
    )
    model_name: Annotated[
        str | None,
        flag("model that the server serves", "--model-name", "--model", group="server", env=SERVED_ENV),
    ] = None
    api_key: Annotated[str, flag("prefer the environment name", "--api-key", group="server")] = ""
    ca_file: Annotated[Path | None, flag(CA_FILE_HELP, "--ca-file", group="server")] = None
    timeout: Annotated[float, flag("longest silence in seconds", "--timeout", group="server")] = 300.0
    max_tokens: Annotated[int | None, flag("most tokens of an answer", "--max-tokens", group="sampling")] = (
        None
    )
    temperature: Annotated[
        float | None, flag("0 takes the most likely token", "--temperature", group="sampling")
    ] = None
    top_p: Annotated[float | None, flag("share of likely tokens", "--top-p", group="sampling")] = None
    seed: Annotated[int | None, flag("same seed, same answer", "--seed", group="sampling")] = None
    stop: Annotated[tuple[str, ...], flag("text that ends an answer", "--stop", group="sampling")] = ()

    def target(self) -> Target:
        """Return the server. Raises `UsageError` for settings that cannot be used."""
        above_zero("--timeout", self.timeout)
        return Target.parse(self.url, first_key(self.api_key), self.ca_file)

    def body(self, model: str) -> dict[str, Any]:
        """Return the fields of a request that do not depend on its text."""
        given = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": list(self.stop) or None,
        }
        always = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        return always | {name: value for name, value in given.items() if value is not None}


_TALK = TalkSettings()


def chat(
    *,
    talk: TalkSettings = _TALK,
    quick: Annotated[
        str | None, flag("send this message, print the answer and exit", "--quick", "-q", group="chat")
    ] = None,
    system_prompt: Annotated[str, flag("first message", "--system-prompt", group="chat")] = "",
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """Run the command `chat`."""
    target = talk.target()
    model = served_model(target, talk.model_name, talk.timeout).id
    body = talk.body(model)

    def ask(messages: Sequence[Message]) -> AnswerStream:
        events = stream_json(
            target, "/v1/chat/completions", body | {"messages": list(messages)}, talk.timeout
        )
        return read_answer(events, _chat_text)

    terminal = ChatTerminal(ask, invocation, line_reader(invocation), system_prompt)
    if quick is not None:
        opening = [*terminal.messages, {"role": "user", "content": quick}]
        show_answer(ask(opening), invocation)
        return 0
    invocation.say(f"{model} at {target.url}")
    return terminal.run()


def complete(
    prompt: str | None = None,
    /,
    *,
    talk: TalkSettings = _TALK,
    quick: Annotated[str | None, flag("the prompt, as in vLLM", "--quick", "-q", group="complete")] = None,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """Run the command `complete`: one prompt from the command line or a pipe, or one after another."""
    target = talk.target()
    body = talk.body(served_model(target, talk.model_name, talk.timeout).id)

    def continue_text(text: str) -> None:
        events = stream_json(target, "/v1/completions", body | {"prompt": text}, talk.timeout)
        invocation.stdout.write(text)
        show_answer(read_answer(events, _completion_text), invocation)

    text = prompt if prompt is not None else quick
    if text is None and not invocation.stdin.isatty():
        text = _piped_text(invocation)
    if text is not None:
        continue_text(text)
        return 0
    read_line = line_reader(invocation)
    while True:
        try:
            continue_text(read_line("> "))
        except (EOFError, KeyboardInterrupt):
            invocation.say("")
            return 0


def _piped_text(invocation: Invocation) -> str:
    text = _decoded(invocation.stdin.read)
    if not text:
        raise UsageError("the prompt is empty.", remedy='Use penstock complete "PROMPT", or pipe text in.')
    return text


def _decoded(read: Callable[[], str]) -> str:
    """Return what is read. Raises `UsageError` for bytes that are no text."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not UTF-8 text: {error}.", remedy="Convert it first.") from error


def line_reader(invocation: Invocation) -> Callable[[str], str]:
    """Return a function that shows a prompt and reads a line, with editing and history on a terminal."""
    if invocation.stdin.isatty() and invocation.stdin is sys.stdin:
        import readline  # noqa: F401  (importing it gives `input` line editing)

        return lambda prompt: _decoded(lambda: input(prompt))
    return lambda prompt: _plain_line(invocation, prompt)


def _plain_line(invocation: Invocation, prompt: str) -> str:
    invocation.stdout.write(prompt if invocation.stdin.isatty() else "")
    invocation.stdout.flush()
    line = _decoded(invocation.stdin.readline)
    if not line:
        raise EOFError
    return line.rstrip("\n")


def read_answer(events: Iterator[Mapping[str, Any]], text_of: Any) -> AnswerStream:
    """Yield the pieces of a streamed answer, a `Thought` for those of reasoning; return how it ended.

    Args:
        text_of: returns the text in a choice of an event; "" if there is none.
    """
    reason, tokens = "", None
    try:
        for event in events:
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event.get("choices") or []:
                reason = choice.get("finish_reason") or reason
                if thought := (choice.get("delta") or {}).get("reasoning_content"):
                    yield Thought(str(thought))
                text = text_of(choice)
                if text:
                    yield text
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()
    return AnswerEnd(finish_reason=reason, tokens=tokens)


def _chat_text(choice: Mapping[str, Any]) -> str:
    return str((choice.get("delta") or {}).get("content") or "")


def _completion_text(choice: Mapping[str, Any]) -> str:
    return str(choice.get("text") or "")
