"""Row R8 on a real model: every bad input that we have, and a neighbour whose tokens do not change.

The neighbour's stream is read between bad requests. As soon as one stream has ended, the next begins, so that
there is always one in the pipe; each must be what it is without company.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from itertools import islice
from typing import Any

import pytest

from bad_inputs import is_taken, json_suite, naughty_strings
from depth import depth
from disturbed import Server
from served import Served

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
NEIGHBOUR = {
    "prompt": [5, 6, 7],
    "max_tokens": 250,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def demo(demo_server: Server) -> Server:
    return demo_server


class Client:
    """Requests over one connection that stays open."""

    def __init__(self, served: Served) -> None:
        self.connection = HTTPConnection("127.0.0.1", int(served.url.rsplit(":", 1)[1]), timeout=60)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request("POST", path, raw)
        response = self.connection.getresponse()
        return response.status, json.loads(response.read())


class Neighbour:
    """Streams of the same request, one after the other, each read line by line."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.answers: list[list[int]] = []
        self._begin()

    def read(self) -> None:
        """The next event."""
        while not (line := self._response.readline()).startswith(b"data: "):
            assert line, "the stream ended without its last event"
        if line != b"data: [DONE]\n":
            self.answers[-1] += json.loads(line[6:])["choices"][0]["token_ids"]
        else:
            self._response.read()
            self._begin()

    def read_to_end(self) -> None:
        """All of the stream that is open."""
        num_answers = len(self.answers)
        while len(self.answers) == num_answers:
            self.read()
        self.answers.pop()

    def _begin(self) -> None:
        self._client.connection.request("POST", TEXT, json.dumps(NEIGHBOUR | {"stream": True}))
        self._response = self._client.connection.getresponse()
        assert self._response.status == 200
        self.answers.append([])


def undisturbed(client: Client) -> list[int]:
    _, answer = client.post(TEXT, NEIGHBOUR)
    token_ids = answer["choices"][0]["token_ids"]
    assert len(token_ids) == NEIGHBOUR["max_tokens"]
    return list(token_ids)


def bad_requests() -> Iterator[tuple[str, bytes]]:
    """Path and body of what is no request, with every file and string that we have."""
    for index, (name, body) in enumerate(json_suite().items()):
        path = (TEXT, CHAT)[index % 2]
        yield path, body
        if not is_taken(name):
            yield path, b'{"messages": [], "prompt": "a", "max_tokens": 1, "x": ' + body + b"}"
    for index, text in enumerate(naughty_strings()):
        yield (TEXT, CHAT)[index % 2], text.encode()
        yield TEXT, json.dumps({"prompt": "a", "model": text or "none"}).encode()


@pytest.mark.deep
def test_r8_bad_bodies_beside_a_stream_change_none_of_its_tokens(demo: Served) -> None:
    with Client(demo) as calm, Client(demo) as bad, Client(demo) as other:
        expected = undisturbed(calm)
        neighbour = Neighbour(calm)
        statuses = set()
        for path, body in islice(bad_requests(), 0, None, depth(3, 1)):
            status, answer = bad.post(path, body)
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            statuses.add(status)
            neighbour.read()
        assert statuses == {400, 404}
        assert len(neighbour.answers) > depth(1, 4)
        neighbour.read_to_end()
        assert neighbour.answers == [expected] * len(neighbour.answers)
        assert undisturbed(other) == expected


@pytest.mark.deep
def test_r8_naughty_prompts_beside_a_stream_change_none_of_its_tokens(demo: Served) -> None:
    with Client(demo) as calm, Client(demo) as naughty:
        expected = undisturbed(calm)
        neighbour = Neighbour(calm)
        strings = naughty_strings()
        for at in range(0, len(strings), depth(30, 10)):
            texts = strings[at : at + 10]
            parts = [{"type": "text", "text": text} for text in texts]
            path, asked, num_choices = (
                (TEXT, {"prompt": texts}, len(texts)),
                (CHAT, {"messages": [{"role": "user", "content": parts}]}, 1),
            )[at // 10 % 2]
            status, answer = naughty.post(path, asked | {"max_tokens": 1})
            assert status == 200, answer
            assert len(answer["choices"]) == num_choices
            for _ in texts:
                neighbour.read()
        neighbour.read_to_end()
        assert neighbour.answers == [expected] * len(neighbour.answers)


def test_r8_special_tokens_in_a_clients_text_are_text(demo: Served) -> None:
    with Client(demo) as client:
        asked = {"max_tokens": 1, "return_token_ids": True}
        text = "<|begin|><|end|><|system|><|user|><|assistant|>"
        _, answer = client.post(TEXT, asked | {"prompt": text})
        begin, *ids = answer["choices"][0]["prompt_token_ids"]
        assert begin == 0
        assert min(ids) > 4  # 0 to 4 are the special tokens
        _, answer = client.post(CHAT, asked | {"messages": [{"role": "user", "content": text}]})
        ids = answer["prompt_token_ids"]
        assert [token_id for token_id in ids if token_id <= 4] == [0, 3, 1, 4]  # the template's own


@pytest.mark.parametrize("text", ["", " ", "\n\n\t", "\u200b"])
def test_r8_prompts_without_words_are_served(demo: Served, text: str) -> None:
    with Client(demo) as client:
        status, answer = client.post(TEXT, {"prompt": text, "max_tokens": 2, "ignore_eos": True})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "ignore_eos": True}
        status, answer = client.post(CHAT, body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
