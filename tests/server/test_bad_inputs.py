"""Row R8 and section "bad inputs" of the promises: bytes, JSON and text that break servers get a 400 here.

The whole conformance suite and all naughty strings go through the real HTTP server over a fake engine.
`tests/pipeline/test_bad_neighbours.py` sends them to a model beside a neighbour whose tokens must not change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from bad_inputs import TAKEN, is_taken, json_suite, naughty_strings
from fake_engine import EOS, ByteCodec, fake_model
from live_server import LiveServer

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
WRAPPED = {TEXT: b'{"prompt": "a", "x": %s}', CHAT: b'{"messages": [{"role": "user"}], "x": %s}'}


class Sender:
    """Requests over one connection that stays open: a bad one must not cost the next its connection."""

    def __init__(self, live: LiveServer) -> None:
        self._connection = HTTPConnection("127.0.0.1", live.port, timeout=20)

    def __call__(self, path: str, body: Any) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._connection.request("POST", path, raw)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def send(live: LiveServer) -> Iterator[Sender]:
    sender = Sender(live)
    yield sender
    sender.close()


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_r8_every_file_of_the_json_suite_as_a_body(live: LiveServer, send: Sender, path: str) -> None:
    suite = json_suite()
    assert len(suite) == 318
    assert set(suite) >= TAKEN
    missing = "prompt" if path == TEXT else "messages"
    before = len(live.engine.added)
    for name, body in suite.items():
        status, answer = send(path, body)
        assert status == 400, name  # a file of JSON too: none of them is a request
        code, message = answer["error"]["code"], answer["error"]["message"]
        if not is_taken(name):
            assert code in ("invalid_json", "json_too_deep"), name
        elif isinstance(json.loads(body), dict):
            assert (code, answer["error"]["param"]) == ("missing_required_parameter", missing), name
        else:
            assert "must be a JSON object, got " in message, name
    assert len(live.engine.added) == before


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_r8_every_file_of_the_json_suite_inside_a_request(send: Sender, path: str) -> None:
    for name, body in json_suite().items():
        status, answer = send(path, WRAPPED[path].replace(b"%s", body))
        if is_taken(name):
            assert status == 200, name
        else:
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), name


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_r8_naughty_strings_as_bodies(send: Sender, path: str) -> None:
    for text in naughty_strings():
        status, answer = send(path, text.encode())
        assert status == 400, text
        assert answer["error"]["code"] in ("invalid_json", "json_too_deep", "missing_required_parameter")


def test_r8_naughty_strings_as_text_come_back_as_they_went_in(send: Sender) -> None:
    strings = naughty_strings()
    assert len(strings) > 400
    for text in strings:
        stop = [("\x1f\x1e" + text)[:60]]
        _, answer = send(TEXT, {"prompt": text, "max_tokens": 2000, "user": text, "stop": stop})
        assert answer["choices"][0]["text"] == text
        _, answer = send(CHAT, {"messages": [{"role": "user", "content": text, "name": text}]})
        assert answer["choices"][0]["message"]["content"] == f"user: {text}\n"


def test_r8_naughty_strings_as_streamed_text(live: LiveServer) -> None:
    for text in naughty_strings()[::4]:
        body = {"messages": [{"role": "user", "content": text}], "stream": True, "model": "fake"}
        response, raw = live.request("POST", CHAT, body)
        assert response.status == 200
        chunks = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == f"user: {text}\n"


def test_r8_naughty_strings_as_names(live: LiveServer, send: Sender) -> None:
    """Of models, roles and fields: none has a meaning, none gets into a header or a log line as it is."""
    for text in filter(None, naughty_strings()):
        assert send(TEXT, {"prompt": "a", "model": text})[0] == 404
        assert send(CHAT, {"messages": [{"role": text, "content": "a"}]})[0] == 400
        response, _ = live.request("POST", TEXT, {"prompt": "a", text: text})
        assert response.status == 200
        assert (response.getheader("x-penstock-warning") or "").isascii()
    assert live.log.getvalue().isascii()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param(b'{"prompt": NaN}', "invalid_json", id="nan"),
        pytest.param(b'{"prompt": "a", "temperature": Infinity}', "invalid_json", id="infinity"),
        pytest.param(b'{"prompt": "a", "temperature": -Infinity}', "invalid_json", id="minus infinity"),
        pytest.param(b'{"prompt": "a", "temperature": 1e400}', "invalid_json", id="1e400"),
        pytest.param(b'{"prompt": "a", "x": -1e400}', "invalid_json", id="-1e400 that nobody reads"),
        pytest.param(b'{"prompt": "\\ud800"}', "invalid_json", id="lone high surrogate"),
        pytest.param(b'{"prompt": "\\udc00"}', "invalid_json", id="lone low surrogate"),
        pytest.param(b'{"prompt": "\\ud800\\u0041"}', "invalid_json", id="broken pair"),
        pytest.param(b'{"prompt": "\xed\xa0\x80"}', "invalid_json", id="surrogate as UTF-8"),
        pytest.param(b'{"prompt": "a\x00b"}', "invalid_json", id="NUL in a string"),
        pytest.param(b'{"prompt": "a"}\x00', "invalid_json", id="NUL at the end"),
        pytest.param(b'\xef\xbb\xbf{"prompt": "a"}', "invalid_json", id="BOM"),
        pytest.param('{"prompt": "a"}'.encode("utf-16"), "invalid_json", id="UTF-16"),
        pytest.param('{"prompt": "a"}'.encode("utf-32"), "invalid_json", id="UTF-32"),
        pytest.param(b'{"prompt": "a"}{"prompt": "b"}', "invalid_json", id="second value"),
        pytest.param(b'{"prompt": "a"},', "invalid_json", id="trailing byte"),
        pytest.param(b'{"prompt": "a", "seed": 9223372036854775808}', "out_of_range", id="seed 2^63"),
        pytest.param(b'{"prompt": "a", "max_tokens": 1%s}' % (b"0" * 400), "out_of_range", id="10^400"),
        pytest.param(b'{"prompt": "a", "seed": %s}' % (b"9" * 5000), "invalid_json", id="10^5000"),
        pytest.param(b'{"prompt": [18446744073709551616]}', "token_id_out_of_range", id="id 2^64"),
        pytest.param(b'{"prompt": "a", "stop_token_ids": [1%s]}' % (b"0" * 99), "out_of_range", id="stop id"),
        pytest.param(b'{"prompt": "a", "temperature": 1%s}' % (b"0" * 400), "out_of_range", id="temperature"),
        pytest.param(b"[" * 100_000, "json_too_deep", id="deep and open"),
        pytest.param(b'{"x":' + b"[" * 64 + b"]" * 64 + b"}", "json_too_deep", id="65 levels"),
    ],
)
def test_r8_json_that_is_not_taken(live: LiveServer, body: bytes, code: str) -> None:
    before = len(live.engine.added)
    status, answer = live.post(TEXT, body)
    assert (status, answer["error"]["code"]) == (400, code), answer
    assert len(live.engine.added) == before


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        (TEXT, b'{"prompt": "a", "max_tokens": 1, "prompt": "b"}', "prompt"),
        (TEXT, b'{"prompt": "a", "x": {"y": 1, "y": 1}}', "y"),
        (TEXT, b'{"prompt": "a", "x": [{"": 1, "": [12345678901234567890123, 0.5]}]}', ""),
        (TEXT, b'{"prompt": "a", "pro\\u006dpt": "b"}', "prompt"),
        (TEXT, b'{"%b": 1, "%b": 2}' % (b"k" * 1000, b"k" * 1000), "k" * 64),
        (CHAT, b'{"messages": [{"role": "system", "role": "user", "content": "x"}]}', "role"),
    ],
)
def test_r8_a_key_given_twice_is_refused_by_name(live: LiveServer, path: str, body: bytes, key: str) -> None:
    """Issue 25, point 17. Whoever checks requests in front of the server may have looked at the other
    value."""
    before = len(live.engine.added)
    status, answer = live.post(path, body)
    assert (status, answer["error"]["code"]) == (400, "invalid_json")
    assert f"the key {key!r} appears twice in one object." in answer["error"]["message"]
    assert len(live.engine.added) == before


def test_r8_what_only_looks_like_a_key_given_twice_is_taken(live: LiveServer) -> None:
    """Issue 25, point 17."""
    for body in (
        b'{"prompt": "{\\"a\\": 1, \\"a\\": 2}"}',
        b'{"prompt": "a", "x": {"a": {"a": 1}, "b": [{"a": 1}, {"a": 1}]}}',
        b'{"prompt": ":::", "x:y": ["a:b"]}',
    ):
        assert live.post(TEXT, body)[0] == 200, body


def test_r8_nul_as_an_escape_is_text(live: LiveServer) -> None:
    _, answer = live.post(TEXT, b'{"prompt": "a\\u0000b", "max_tokens": 3}')
    assert answer["choices"][0]["text"] == "a\x00b"


def test_r8_whole_numbers_beyond_64_bits_that_nobody_reads_are_ignored(live: LiveServer) -> None:
    response, _ = live.request("POST", TEXT, b'{"prompt": "a", "x": 123456789012345678901234567890}')
    assert response.status == 200
    assert response.getheader("x-penstock-warning") == "ignored unknown field(s): x"


class NoBos(ByteCodec):
    """A model without a token to begin with."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text)[1:]

    def encode_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


def test_r8_an_empty_prompt_begins_with_bos_or_is_refused(live: LiveServer) -> None:
    message = [{"role": "user", "content": ""}]
    assert live.post(TEXT, {"prompt": ""})[0] == 200
    assert live.post(TEXT, {"prompt": ["", " ", "\n\t"]})[0] == 200
    assert live.post(CHAT, {"messages": message})[0] == 200
    with LiveServer(model=fake_model(codec=NoBos())) as bare:
        for path, body in ((TEXT, {"prompt": ["a", ""]}), (CHAT, {"messages": message})):
            status, answer = bare.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "empty_prompt")
        assert bare.engine.added == []
        for path, body in (
            (TEXT, {"prompt": " \n"}),
            (CHAT, {"messages": [{"role": "user", "content": "\t"}]}),
        ):
            assert bare.post(path, body)[0] == 200
        for path, body in ((TEXT, {"prompt": []}), (TEXT, {"prompt": [[]]}), (CHAT, {"messages": []})):
            assert bare.post(path, body)[0] == 400
    assert live.post(TEXT, {"prompt": [EOS]})[0] == 200


@pytest.mark.parametrize("content", [None, "", " ", "\u200b", "\n" * 100, [], [{"type": "text", "text": ""}]])
def test_r8_a_conversation_without_text_is_served(live: LiveServer, content: Any) -> None:
    status, answer = live.post(CHAT, {"messages": [{"role": "user", "content": content}]})
    assert status == 200
    assert answer["usage"]["completion_tokens"] > 0
