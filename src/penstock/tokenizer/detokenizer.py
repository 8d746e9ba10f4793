"""Turns token ids into text, piece by piece, without losing or doubling a byte.

A token is a run of *bytes*, not of characters: one character may be spread over several tokens. A
`Detokenizer` therefore joins bytes, gives out whole characters and keeps an unfinished one until its last
byte has come. The text of a sequence is *defined* as what feeding its ids yields, so that it does not depend
on how the ids were cut into deltas. For valid UTF-8 it equals the `decode` of the tokenizers library.

In a byte-fallback vocabulary each ill-formed byte becomes one U+FFFD, as in that library. But the library
then also replaces the well-formed bytes beside it. Here only ill-formed bytes are replaced, since characters
that were streamed cannot be taken back.

`tokenizer` makes detokenizers, and `engine.client.outputs` feeds them. They know nothing of stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4
EACH_BYTE = "penstock_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


class Detokenizer(Protocol):
    """Turns the ids of one sequence into text as they come."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the characters that these ids complete."""
        ...

    def finish(self) -> str:
        """Return what is left when no more ids come: unfinished bytes, as U+FFFD."""
        ...


class NoText:
    """A detokenizer for requests that want no text, and for models without a tokenizer."""

    def feed(self, token_ids: Iterable[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class PieceTable(dict[int, bytes]):
    """The bytes of each token id, computed when they are first asked for.

    Args:
        piece_of: bytes of an id; called once per id.
        hidden: ids whose text is left out (special tokens).
    """

    def __init__(self, piece_of: Callable[[int], bytes], hidden: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._piece_of = piece_of
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        piece = b"" if token_id in self._hidden else self._piece_of(token_id)
        self[token_id] = piece
        return piece


class ByteDetokenizer:
    """Joins token bytes and gives out whole characters.

    Args:
        pieces: bytes of each id.
        errors: what to do with ill-formed bytes: "replace", or `EACH_BYTE` for byte-fallback vocabularies.
        strip_spaces: number of leading spaces to drop; above 0 only at the very start of a text.
    """

    def __init__(self, pieces: PieceTable, errors: str = "replace", strip_spaces: int = 0) -> None:
        self._pieces = pieces
        self._errors = errors
        self._strip_spaces = strip_spaces
        self._pending = b""

    def feed(self, token_ids: Iterable[int]) -> str:
        pieces = self._pieces
        data = self._pending + b"".join([pieces[token_id] for token_id in token_ids])
        if self._strip_spaces and data:
            data = self._without_leading_spaces(data)
        text, used = codecs.utf_8_decode(data, self._errors, False)
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        text, _ = codecs.utf_8_decode(self._pending, self._errors, True)
        self._pending = b""
        return text

    def _without_leading_spaces(self, data: bytes) -> bytes:
        while self._strip_spaces and data.startswith(b" "):
            data = data[1:]
            self._strip_spaces -= 1
        if data:
            self._strip_spaces = 0
        return data


class WindowDetokenizer:
    """A detokenizer for decoders that do more than join bytes (WordPiece, Metaspace, ...).

    The window has the ids whose text was not given out yet, and before them the ids of the last delta, for
    context. The text that the former add to the text of the latter is the next delta. Text that ends in
    U+FFFD is held back, for as many ids as a character can have bytes.

    Args:
        decode: text of a list of ids.
        context: ids before the sequence (the end of its prompt), whose text is not given out.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: list[int]) -> None:
        self._decode = decode
        self._window = list(context)
        self._read = len(context)  # ids of the window whose text was given out

    def feed(self, token_ids: Iterable[int]) -> str:
        self._window.extend(token_ids)
        delta, whole = self._new_text()
        unfinished = whole.endswith(REPLACEMENT) and len(self._window) - self._read <= MAX_CHARACTER_BYTES
        if not delta or unfinished:
            return ""
        del self._window[: self._read]
        self._read = len(self._window)
        return delta

    def finish(self) -> str:
        delta, _ = self._new_text()
        self._read = len(self._window)
        return delta

    def _new_text(self) -> tuple[str, str]:
        given = self._decode(self._window[: self._read])
        whole = self._decode(self._window)
        return whole[len(given) :], whole


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte for which each character stands in byte-level vocabularies (GPT-2's published map).

    Bytes that print stand for themselves; the others, in order, take the code points from 256 on.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    alphabet = {chr(byte): byte for byte in shown}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


def byte_level_piece(token: str, alphabet: dict[str, int]) -> bytes:
    """Return the bytes of a byte-level token; those of a token with other characters are its UTF-8."""
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def byte_fallback_piece(token: str) -> bytes:
    """Return the bytes of a sentencepiece-like token: `<0xE2>` is that byte, U+2581 is a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()
