"""Lets errors name the fields of the client's own request, although it was translated to a chat request.

What several APIs have in common is checked only once, in the chat request that their requests become. Used
for errors and warnings by `responses_input` and `anthropic.messages_input`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import RequestError


class MessageOrigin(NamedTuple):
    """The names of the parts of a request from which a message of the chat was made.

    Attributes:
        where: name of the part with which the message begins.
        call: name of the part with the message's first call of a tool; empty if it has no call.
    """

    where: str
    call: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWords:
    """The words of an API for things that a chat has too.

    Attributes:
        fields: the API's name of a field, by the chat's name, which is translated wherever it stands.
        params: as `fields`, for names that are ordinary words too: they are translated in the `param` of an
            error, and not in its message.
        call: the API's word for a call.
        parameters: the API's word for the schema of a tool's arguments.
    """

    fields: Mapping[str, str]
    params: Mapping[str, str]
    call: str
    parameters: str


class OwnNames:
    """Translates texts about a chat request into the names of the request from which it was made.

    Args:
        words: the words of the request's API.
        messages: the origin of each message of the chat.
        tools: the request's own name of each tool of the chat.
    """

    def __init__(self, words: OwnWords, messages: Sequence[MessageOrigin], tools: Sequence[str]) -> None:
        self._words = words
        self._messages = messages
        self._tools = tools
        names = "|".join(map(re.escape, sorted(words.fields, key=len, reverse=True)))
        self._pattern = re.compile(  # what follows a quotation mark is quoted from the client, and stays
            r"(?<!['\"])\bmessages\[(?P<message>\d{1,9})\](?P<calls>(?:\.| has )tool_calls\b)?"
            r"|\btools\[(?P<tool>\d{1,9})\]\.function(?P<parameters>\.parameters\b)?"
            rf"|(?<!['\"])\b(?:{names})\b"
        )

    def of(self, text: str) -> str:
        """Return the text with the request's own names."""
        return self._pattern.sub(self._own_name, text)

    def renamed(self, error: RequestError) -> RequestError:
        """Return an error of the chat with the request's own names."""
        param = error.param
        if param is not None:
            param = self._words.params.get(param) or self.of(param)
        return type(error)(self.of(error.message), remedy=self.of(error.remedy), param=param, code=error.code)

    def _own_name(self, match: re.Match[str]) -> str:
        if match["message"] is not None:
            return self._own_message(match)
        if match["tool"] is not None:
            index = int(match["tool"])
            if index >= len(self._tools):  # no tool of the chat: quoted from the client
                return match[0]
            return self._tools[index] + (f".{self._words.parameters}" if match["parameters"] else "")
        return self._words.fields[match[0]]

    def _own_message(self, match: re.Match[str]) -> str:
        index = int(match["message"])
        if index >= len(self._messages):  # no message of the chat: quoted from the client
            return match[0]
        origin, calls = self._messages[index], match["calls"] or ""
        if not (calls and origin.call):
            return origin.where + calls
        return origin.call if calls.startswith(".") else f"{origin.call} is a {self._words.call}"
