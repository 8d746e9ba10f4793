"""`chat` and `complete` against a made-up server, and the conversation on its own."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Generator, Iterator, Sequence
from io import BytesIO, StringIO, TextIOWrapper
from typing import Any

import pytest

from fake_completions_server import Script, chat_events, completions_server
from penstock.cli.bench.http_stream import Target
from penstock.cli.chat import read_answer
from penstock.cli.chat_terminal import AnswerEnd, ChatTerminal, Message, show_answer
from penstock.cli.http_client import get_json, served_model, stream_json
from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.errors import (
    AuthenticationError,
    LinkClosedError,
    NotFoundError,
    OverloadedError,
    PeerError,
    PenstockError,
    ProtocolError,
    UnavailableError,
    UsageError,
)

END = AnswerEnd(finish_reason="stop", tokens=2)


def invocation(stdin: str = "") -> Invocation:
    return Invocation(stdout=StringIO(), stderr=StringIO(), stdin=StringIO(stdin), environ={})


def text_of(made: Invocation) -> str:
    assert isinstance(made.stdout, StringIO)
    return made.stdout.getvalue()


def words(*pieces: str, end: AnswerEnd = END) -> Generator[str, None, AnswerEnd]:
    yield from pieces
    return end


class Answers:
    """Stands for the server: remembers what was asked, says what it is told to."""

    def __init__(self, *streams: Generator[str, None, AnswerEnd]) -> None:
        self.asked: list[list[Message]] = []
        self._streams = list(streams)

    def __call__(self, messages: Sequence[Message]) -> Generator[str, None, AnswerEnd]:
        self.asked.append([dict(message) for message in messages])
        return self._streams.pop(0)


def lines(*typed: str) -> Any:
    source: Iterator[str] = iter(typed)

    def read_line(prompt: str) -> str:
        try:
            return next(source)
        except StopIteration:
            raise EOFError from None

    return read_line


def test_turns_are_kept_and_sent_again() -> None:
    answers, made = Answers(words("he", "llo"), words("bye")), invocation()
    chat = ChatTerminal(answers, made, lines("hi", "  ", "and?", "/exit", "never"), "be kind")
    assert chat.run() == 0
    assert answers.asked == [
        [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
        [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "and?"},
        ],
    ]
    assert "hello\n" in text_of(made)


def test_clear_forgets_all_but_the_system_prompt() -> None:
    answers = Answers(words("a"), words("b"))
    chat = ChatTerminal(answers, invocation(), lines("one", "/clear", "two"), "be kind")
    assert chat.run() == 0
    assert answers.asked[1] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "two"},
    ]


def test_ctrl_c_stops_the_answer_closes_the_stream_and_keeps_what_came() -> None:
    closed: list[bool] = []

    def endless() -> Generator[str, None, AnswerEnd]:
        try:
            yield "par"
            yield "tial"
            raise KeyboardInterrupt  # the signal arrives while waiting for the next chunk
        finally:
            closed.append(True)

    answers, made = Answers(endless(), words("ok")), invocation()
    chat = ChatTerminal(answers, made, lines("go", "next"))
    assert chat.run() == 0
    assert closed == [True]
    assert answers.asked[1][1] == {"role": "assistant", "content": "partial"}
    assert "partial [stopped]" in text_of(made)


def test_ctrl_c_while_printing_closes_the_stream() -> None:
    closed: list[bool] = []

    def endless() -> Generator[str, None, AnswerEnd]:
        try:
            while True:
                yield "x"
        except GeneratorExit:
            closed.append(True)
            raise

    class Interrupting(StringIO):
        def write(self, text: str) -> int:
            if text == "x" and self.getvalue() == "xx":
                raise KeyboardInterrupt
            return super().write(text)

    out = Interrupting()
    made = Invocation(stdout=out, stderr=StringIO(), stdin=StringIO(), environ={})
    assert show_answer(endless(), made) == "xxx"
    assert closed == [True]


def test_ctrl_c_at_the_prompt_leaves() -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    assert ChatTerminal(Answers(), invocation(), interrupted).run() == 0


def test_a_failed_turn_is_told_and_forgotten() -> None:
    def lost() -> Generator[str, None, AnswerEnd]:
        yield "so"
        raise PenstockError("stage 1 is lost.", remedy="Try again.")

    answers, made = Answers(lost(), words("fine")), invocation()
    chat = ChatTerminal(answers, made, lines("a", "b"))
    assert chat.run() == 0
    assert answers.asked[1] == [{"role": "user", "content": "b"}]
    assert isinstance(made.stderr, StringIO)
    assert "stage 1 is lost. Try again." in made.stderr.getvalue()


def test_an_answer_cannot_steer_the_terminal() -> None:
    made = invocation()
    assert show_answer(words("\x1b[2Jx"), made) == "\x1b[2Jx"
    assert "\x1b" not in text_of(made)


def test_an_answer_at_the_token_limit_says_so() -> None:
    made = invocation()
    show_answer(words("x", end=AnswerEnd(finish_reason="length", tokens=1)), made)
    assert text_of(made) == "x [stopped at the token limit]\n"


def serve_chat(text: str) -> Script:
    return Script(lambda body, number: chat_events(text))


def test_chat_talks_to_a_server_over_several_turns() -> None:
    script, made = serve_chat("hello there"), invocation("hi\nagain\n/exit\n")
    with completions_server(script) as url:
        assert run(["chat", "--url", url, "--max-tokens", "9", "--temperature", "0"], made) == 0
    assert text_of(made).count("hellothere\n") == 2
    first, second = script.requests
    assert first["path"] == "/v1/chat/completions"
    assert (first["max_tokens"], first["temperature"], first["model"]) == (9, 0.0, "tiny")
    assert "top_p" not in first
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]


def test_quick_chat_asks_once() -> None:
    script, made = serve_chat("yes"), invocation()
    with completions_server(script) as url:
        assert run(["chat", "--url", url, "-q", "ok?", "--system-prompt", "s"], made) == 0
    assert text_of(made) == "yes\n"
    assert [message["content"] for message in script.requests[0]["messages"]] == ["s", "ok?"]


def completion(body: dict[str, Any], number: int) -> list[bytes | None]:
    chunks = [{"choices": [{"index": 0, "text": word, "finish_reason": None}]} for word in (" be", " or")]
    end = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    return [*(json.dumps(chunk).encode() for chunk in (*chunks, end)), b"[DONE]"]


@pytest.mark.parametrize("how", ["argument", "quick", "pipe"])
def test_complete_continues_a_text(how: str) -> None:
    given = {"argument": ["to"], "quick": ["-q", "to"], "pipe": []}[how]
    script, made = Script(completion), invocation("to" if how == "pipe" else "")
    with completions_server(script) as url:
        assert run(["complete", *given, "--url", f"{url}/v1", "--stop", "x", "--stop", "y"], made) == 0
    assert text_of(made) == "to be or\n"
    assert script.requests[0]["path"] == "/v1/completions"
    assert (script.requests[0]["prompt"], script.requests[0]["stop"]) == ("to", ["x", "y"])


def test_an_empty_pipe_is_refused() -> None:
    made = invocation("")
    with completions_server(Script(completion)) as url:
        assert run(["complete", "--url", url], made) == 2


def target(url: str) -> Target:
    return Target.parse(url)


def test_refusals_keep_their_kind_and_words() -> None:
    kinds: dict[int, type[PenstockError]] = {
        400: UsageError,
        401: AuthenticationError,
        404: NotFoundError,
        429: OverloadedError,
        500: PeerError,
        503: UnavailableError,
    }
    for status, kind in kinds.items():
        body = b'{"error":{"message":"no.","type":"t","param":"p","code":"c"}}'
        with completions_server(Script(completion, status=status, error_body=body)) as url:
            with pytest.raises(kind, match=r"no\.") as raised:
                list(stream_json(target(url), "/v1/completions", {}, 5))
            assert raised.value.param == "p"
    with (
        completions_server(Script(completion, status=500, error_body=b"<html>")) as url,
        pytest.raises(ProtocolError, match="HTTP 500 without an error object"),
    ):
        list(stream_json(target(url), "/v1/completions", {}, 5))


def cut(body: dict[str, Any], number: int) -> list[bytes | None]:
    return [*completion(body, number)[:1], None]


def failing(body: dict[str, Any], number: int) -> list[bytes | None]:
    return [*completion(body, number)[:1], b'{"error":{"message":"stage 1 is lost"}}']


def long(body: dict[str, Any], number: int) -> list[bytes | None]:
    return [completion(body, number)[0]] * 10_000  # more than the socket's buffers hold


def test_a_cut_stream_and_an_error_inside_one_are_raised() -> None:
    with completions_server(Script(cut)) as url, pytest.raises(LinkClosedError):
        list(stream_json(target(url), "/v1/completions", {}, 5))
    with completions_server(Script(failing)) as url, pytest.raises(PenstockError, match="stage 1 is lost"):
        list(stream_json(target(url), "/v1/completions", {}, 5))


def test_closing_a_stream_closes_the_connection() -> None:
    with completions_server(Script(long)) as url:  # leaving waits for the server's thread to notice
        stream = stream_json(target(url), "/v1/completions", {}, 5)
        next(stream)
        stream.close()  # type: ignore[attr-defined]


def test_models_are_found_by_name_or_the_first_is_taken() -> None:
    card = {"id": "m", "max_model_len": 7, "vocab_size": "many"}
    with completions_server(Script(completion, card=card)) as url:
        found = served_model(target(url), None)
        assert (found.id, found.max_model_len, found.vocab_size) == ("m", 7, None)
        assert served_model(target(url), "m") == found
        with pytest.raises(NotFoundError, match="The server has: m"):
            served_model(target(url), "other")
        assert get_json(target(url), "/v1/models", 5)["object"] == "list"


def test_an_answer_ends_with_its_reason_and_count() -> None:
    events = [json.loads(event) for event in chat_events("a b", finish="length")[:-1] if event is not None]
    stream = read_answer(iter(events), lambda choice: choice["delta"].get("content") or "")
    assert [next(stream), next(stream)] == ["a", "b"]
    with pytest.raises(StopIteration) as stopped:
        next(stream)
    assert stopped.value.value == AnswerEnd(finish_reason="length", tokens=2)


def test_what_the_model_thinks_is_shown_but_no_part_of_the_conversation() -> None:
    deltas = [{"reasoning_content": "hm"}, {"reasoning_content": "!"}, {"content": "Yes"}, {"content": "."}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    made = invocation()
    stream = read_answer(iter(events), lambda choice: choice["delta"].get("content") or "")
    assert show_answer(stream, made) == "Yes."
    assert text_of(made) == "hm!\n\nYes.\n"


@contextlib.contextmanager
def one_answer(content: bytes) -> Iterator[str]:
    """Serve the bytes to one client, which then sees the connection end."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(content)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()


@pytest.mark.parametrize("status", [b"200 OK", b"503 Busy"])
def test_an_answer_that_is_cut_is_no_bug(status: bytes) -> None:
    head = b"HTTP/1.1 " + status + b"\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{"
    with one_answer(head) as url, pytest.raises(LinkClosedError, match="closed the connection"):
        get_json(target(url), "/v1/models", 5)


def strange(body: dict[str, Any], number: int) -> list[bytes | None]:
    return [b"[7]"]


def broken(body: dict[str, Any], number: int) -> list[bytes | None]:
    return [b"{"]


@pytest.mark.parametrize("events", [strange, broken])
def test_an_event_that_is_no_object_is_the_server_s_fault(events: Any) -> None:
    with completions_server(Script(events)) as url, pytest.raises(ProtocolError, match="not a JSON object"):
        list(stream_json(target(url), "/v1/completions", {}, 5))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--api-key", "ключ"), "the API key has characters that cannot be sent"),
        (("--api-key", "a\nb"), "the API key has characters that cannot be sent"),
        (("--url", "http://127.0.0.1:9/ü"), "has characters that a URL cannot have"),
        (("--url", "http://my host:9"), "the host 'my host' of the URL is not a name"),
        (("--url", "http://日本:9"), "the host '日本' of the URL is not a name"),
        (("--url", "http://a..b:9"), "the host 'a..b' of the URL is not a name"),
        (("--url", f"http://{64 * 'a'}:9"), "of the URL is not a name"),
        (("--timeout", "inf"), "--timeout is inf; it must be above 0"),
        (("--timeout", "nan"), "--timeout is nan; it must be above 0"),
        (("--timeout", "0"), "--timeout is 0.0; it must be above 0"),
        (("--timeout", "-1"), "--timeout is -1.0; it must be above 0"),
    ],
)
def test_what_cannot_be_sent_or_waited_is_not_blamed_on_the_server(given: tuple[str, ...], said: str) -> None:
    made = invocation()
    assert run(["chat", "--url", "http://127.0.0.1:9", *given], made) == 2
    assert isinstance(made.stderr, StringIO)
    assert said in made.stderr.getvalue()


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_a_piped_prompt_that_is_no_utf_8_is_refused(command: str) -> None:
    made = invocation()
    made.stdin = TextIOWrapper(BytesIO(b"\xe9t\xe9"), encoding="utf-8")
    with completions_server(Script(completion)) as url:
        assert run([command, "--url", url], made) == 2
    assert isinstance(made.stderr, StringIO)
    assert "the prompt is not UTF-8 text" in made.stderr.getvalue()
