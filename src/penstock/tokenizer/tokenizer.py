"""The tokenizer: text to token ids, and the detokenizers for the way back.

`load_tokenizer(model)` reads `tokenizer.json` with the tokenizers library; for vocabularies in another form
`sources.model_files` writes its content. A directory without a vocabulary gives a `Tokenizer` that refuses to
encode text: prompts must be token ids. Special tokens in text that a user wrote are encoded as text. Only
`encode_trusted` recognises them; it is for text that a chat template or the program's author wrote.

Called by `tokenizer.chat_template`, `llm`, `engine.client.async_engine` and the server. `detokenizer` streams
text, and `chat_template` renders chats.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import msgspec
import tokenizers

from penstock.errors import InvalidRequestError, ModelConfigError
from penstock.tokenizer.detokenizer import (
    EACH_BYTE,
    ByteDetokenizer,
    Detokenizer,
    NoText,
    PieceTable,
    WindowDetokenizer,
    byte_fallback_piece,
    byte_level_alphabet,
    byte_level_piece,
)
from penstock.tokenizer.sources.model_files import tokenizer_content, vocabulary_file

_NONE: frozenset[int] = frozenset()
_CONTEXT_TOKENS = 6  # ids of the prompt that a window detokenizer looks at


class AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class DecoderSpec(msgspec.Struct, frozen=True):
    """The part of a `tokenizer.json` decoder that tells which kind it is."""

    type: str
    decoders: list[DecoderSpec] = []
    pattern: dict[str, str] = {}
    content: str = ""
    start: int = 0


class TokenizerFile(msgspec.Struct, frozen=True):
    added_tokens: list[AddedToken] = []
    decoder: DecoderSpec | None = None


class Tokenizer(Protocol):
    """The part of a tokenizer that the server and `LLM` need. Several threads may call it at once."""

    @property
    def special_tokens(self) -> list[str]: ...

    @property
    def added_token_ids(self) -> dict[str, int]:
        """The id of each token that was added to the vocabulary, special or not, by its text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of text that a user wrote; special tokens in it are text.

        Args:
            add_special_tokens: put the ids around the text that the tokenizer wants there, such as the
                beginning-of-sequence id.
        """
        ...

    def encode_trusted(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of text in which special tokens mean themselves."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence, without that of special tokens if they are skipped."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, also a special one; log-probabilities show them."""
        ...

    def detokenizer(
        self, prompt_token_ids: list[int], *, skip_special_tokens: bool = True, shown: Sequence[str] = ()
    ) -> Detokenizer:
        """Return a detokenizer for the sequence that follows this prompt.

        Args:
            shown: special tokens that are not skipped; other names are ignored.
        """
        ...


class AbsentTokenizer:
    """A model directory without a vocabulary: prompts are token ids, texts are empty."""

    special_tokens: list[str] = []
    added_token_ids: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise InvalidRequestError(
            "this model has no tokenizer, so text cannot be encoded.",
            remedy="Give the prompt as token ids.",
            param="prompt",
        )

    encode_trusted = encode

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def detokenizer(
        self, prompt_token_ids: list[int], *, skip_special_tokens: bool = True, shown: Sequence[str] = ()
    ) -> Detokenizer:
        return NoText()


class JsonTokenizer:
    """A `tokenizer.json` of the Hugging Face tokenizers library.

    Args:
        data: content of the file.
        name: what errors call the file.
    """

    def __init__(self, data: bytes, name: str = "tokenizer.json") -> None:
        self._data = data
        try:
            self._file = msgspec.json.decode(data, type=TokenizerFile)
            self._untrusted = self._load()
        except Exception as error:  # the library raises bare Exception
            raise ModelConfigError(
                f"{name} cannot be read: {error}.", remedy="Download the model's tokenizer again."
            ) from error
        self._untrusted.encode_special_tokens = True
        self._decoding = _Decoding(self._untrusted, self._file)

    @property
    def special_tokens(self) -> list[str]:
        return [token.content for token in self._file.added_tokens if token.special]

    @cached_property
    def added_token_ids(self) -> dict[str, int]:
        return {token.content: token.id for token in self._file.added_tokens}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return _encode(self._untrusted, text, add_special_tokens)

    def encode_trusted(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return _encode(self._trusted, text, add_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer([], skip_special_tokens=skip_special_tokens)
        return detokenizer.feed(token_ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        return self._decoding.token_bytes(token_id)

    def detokenizer(
        self, prompt_token_ids: list[int], *, skip_special_tokens: bool = True, shown: Sequence[str] = ()
    ) -> Detokenizer:
        return self._decoding.detokenizer(prompt_token_ids, skip_special_tokens, shown)

    @cached_property
    def _trusted(self) -> tokenizers.Tokenizer:
        # A second object, since the library's switch may not be turned while another thread encodes.
        return self._load()

    def _load(self) -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer.from_buffer(self._data)
        # Left over from training in some files: prompts would be cut, or filled up, without a word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


class _Decoding:
    """The way from ids to text: a simple decoder joins the tokens' bytes, any other one is the library's."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, file: TokenizerFile) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_steps(file.decoder)
        self._is_byte_join = kinds == ["ByteLevel"] or kinds[:3] == ["Replace", "ByteFallback", "Fuse"]
        self._errors = "replace" if kinds == ["ByteLevel"] else EACH_BYTE
        self._strip_spaces = _leading_strip(file.decoder)
        self._alphabet = byte_level_alphabet() if kinds == ["ByteLevel"] else {}
        self._special = {token.content: token.id for token in file.added_tokens if token.special}
        self._added = {token.id: token.content for token in file.added_tokens}
        self._all_pieces = PieceTable(self._piece)
        self._skipping: dict[tuple[str, ...], tuple[frozenset[int], PieceTable]] = {}  # by `shown`

    def token_bytes(self, token_id: int) -> bytes:
        return self._all_pieces[token_id]

    def detokenizer(self, prompt: list[int], skip_special: bool, shown: Sequence[str]) -> Detokenizer:
        hidden, pieces = self._without_special(tuple(shown)) if skip_special else (_NONE, self._all_pieces)
        if not self._is_byte_join:
            return WindowDetokenizer(partial(self._decode, hidden=hidden), prompt[-_CONTEXT_TOKENS:])
        at_start = bool(self._strip_spaces) and not any(pieces[token_id] for token_id in prompt)
        return ByteDetokenizer(pieces, self._errors, self._strip_spaces if at_start else 0)

    def _without_special(self, shown: tuple[str, ...]) -> tuple[frozenset[int], PieceTable]:
        """Return the ids without text, and the bytes of all ids.

        The result is kept: few choices of shown tokens occur.
        """
        entry = self._skipping.get(shown)
        if entry is None:
            hidden = frozenset(token_id for name, token_id in self._special.items() if name not in shown)
            entry = self._skipping[shown] = (hidden, PieceTable(self._piece, hidden))
        return entry

    def _decode(self, token_ids: list[int], hidden: frozenset[int]) -> str:
        kept = [token_id for token_id in token_ids if token_id not in hidden]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def _piece(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""  # models may pad their vocabulary beyond the tokenizer's
        if self._alphabet:
            added = self._added.get(token_id)  # its name is text, and not a spelling of bytes
            return byte_level_piece(token, self._alphabet) if added is None else added.encode()
        if self._is_byte_join:
            return byte_fallback_piece(token)
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _decoder_steps(decoder: DecoderSpec | None) -> list[str]:
    """Return the kinds of a decoder's steps; only "foreign" if `detokenizer` cannot do one of them."""
    if decoder is None:
        return []
    steps = decoder.decoders if decoder.type == "Sequence" else [decoder]
    known = all(_is_plain(step) for step in steps)
    return [step.type for step in steps] if known else ["foreign"]


def _is_plain(step: DecoderSpec) -> bool:
    if step.type == "Replace":
        return step.pattern == {"String": "\u2581"} and step.content == " "
    if step.type == "Strip":
        return step.content == " "
    return step.type in ("ByteLevel", "ByteFallback", "Fuse")


def _leading_strip(decoder: DecoderSpec | None) -> int:
    steps = decoder.decoders if decoder is not None else []
    return sum(step.start for step in steps if step.type == "Strip")


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    except (TypeError, UnicodeError) as error:
        raise InvalidRequestError(
            "the prompt is not valid Unicode text (it may hold a lone surrogate).", param="prompt"
        ) from error


def special_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern of all special tokens longer than one character; without any, it matches nothing."""
    tokens = sorted((token for token in tokenizer.special_tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


def load_tokenizer(model: Path) -> Tokenizer:
    """Return the tokenizer of a model; raises `ModelError` if the file of its vocabulary is bad.

    Args:
        model: its directory, or a GGUF file.
    """
    content = tokenizer_content(model)
    if content is None:
        return AbsentTokenizer()
    return JsonTokenizer(content, str(vocabulary_file(model)))
