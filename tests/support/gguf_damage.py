"""Damages small GGUF files: in their bytes, in the fields of their layout, and in what their values say.

Each function takes a source of chance, so that a number names a case, and calls nothing of what reads files.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from gguf_files import Stored, Typed, gguf_bytes

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_NUMBERS = (0, 1, 2, 7, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**48, 2**62, 2**63, 2**64 - 1)
_TYPES = (*range(42), 99, 2**31)
_VALUES: tuple[Any, ...] = (
    *(Typed(kind=kind, value=number) for kind, number in ((0, 0), (1, -1), (2, 65535), (5, -(2**31)))),
    *(Typed(kind=10, value=number) for number in (2**63, 2**64 - 1)),
    *(Typed(kind=11, value=number) for number in (-1, -(2**63), 2**40)),
    *(Typed(kind=12, value=number) for number in (math.nan, math.inf, -math.inf, 1e308, 5e-324)),
    *(0, 1, 2, 3, 2**20, 2**31 - 1, 2**32 - 1),
    *(0.0, -1.0, 1e38, math.nan, math.inf),
    *(True, False, "", "x", "llama", "qwen2", "gpt2", "\0", "{{ x", "{% for %}", "\u2581" * 40, b"\xff\xfe"),
    *([], [""], ["a", "a"], ["a b", "b c"], [[1], [2]], [[["x"]]], [b"\xc3"], ["a"] * 96, ["a b"] * 3),
    np.zeros(96, "<f4"),
    np.full(96, np.nan, "<f4"),
    np.full(96, -1, "<i4"),
    np.array([64, 64], "<i4"),
    np.array([2**64 - 1, 1], "<u8"),
    np.zeros(0, "<i4"),
    np.array([True, False]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a file is written from."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    def file(self, offsets: Mapping[str, int] | None = None) -> bytes:
        """Return the file."""
        return gguf_bytes(self.metadata, self.tensors, offsets=offsets)


@dataclass(slots=True)
class Layout:
    """Where the fields of a sound file are: (start, bytes). `data` is where the tensors' bytes begin."""

    lengths: list[tuple[int, int]] = field(default_factory=list)  # of strings and arrays, counts, dimensions
    types: list[tuple[int, int]] = field(default_factory=list)
    numbers: list[tuple[int, int]] = field(default_factory=list)  # single values
    offsets: list[tuple[int, int]] = field(default_factory=list)
    texts: list[tuple[int, int]] = field(default_factory=list)  # keys, strings, names
    names: list[tuple[int, int]] = field(default_factory=list)  # of tensors, length included
    keys: list[tuple[int, int]] = field(default_factory=list)  # length included
    data: int = 0

    @property
    def borders(self) -> list[int]:
        """Return where any field begins or ends."""
        every = self.lengths + self.types + self.numbers + self.offsets + self.texts
        return sorted({place for start, size in every for place in (start, start + size)})


class _Walk:
    def __init__(self, content: bytes) -> None:
        self.content, self.at, self.layout = content, 4, Layout()

    def number(self, size: int, places: list[tuple[int, int]]) -> int:
        places.append((self.at, size))
        self.at += size
        return int.from_bytes(self.content[self.at - size : self.at], "little")

    def text(self, places: list[tuple[int, int]] | None = None) -> None:
        start = self.at
        length = self.number(8, self.layout.lengths)
        self.layout.texts.append((self.at, length))
        self.at += length
        if places is not None:
            places.append((start, 8 + length))

    def value(self, kind: int) -> None:
        if kind == _STRING:
            self.text()
        elif kind == _ARRAY:
            inner, count = self.number(4, self.layout.types), self.number(8, self.layout.lengths)
            if inner in _SIZES:
                self.layout.texts.append((self.at, _SIZES[inner] * count))
                self.at += _SIZES[inner] * count
            else:
                for _ in range(count):
                    self.value(inner)
        else:
            self.number(_SIZES[kind], self.layout.numbers)


def layout_of(content: bytes) -> Layout:
    """Return where the fields of a sound file are."""
    walk = _Walk(content)
    layout = walk.layout
    walk.number(4, layout.numbers)
    num_tensors, num_keys = walk.number(8, layout.lengths), walk.number(8, layout.lengths)
    for _ in range(num_keys):
        walk.text(layout.keys)
        walk.value(walk.number(4, layout.types))
    for _ in range(num_tensors):
        walk.text(layout.names)
        for _ in range(walk.number(4, layout.lengths)):
            walk.number(8, layout.lengths)
        walk.number(4, layout.types)
        walk.number(8, layout.offsets)
    layout.data = -(-walk.at // 32) * 32
    return layout


# --- Damage of bytes ------------------------------------------------------------------------------------


def _flipped(content: bytearray, layout: Layout, rng: Random) -> None:
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(layout.data)] ^= 1 << rng.randrange(8)


def _flipped_weights(content: bytearray, layout: Layout, rng: Random) -> None:
    for _ in range(rng.randint(1, 40)):
        content[rng.randrange(layout.data, len(content))] ^= 1 << rng.randrange(8)


def _other_length(content: bytearray, layout: Layout, rng: Random) -> None:
    _set_number(content, rng.choice(layout.lengths), rng, _NUMBERS)


def _other_type(content: bytearray, layout: Layout, rng: Random) -> None:
    _set_number(content, rng.choice(layout.types), rng, _TYPES)


def _other_number(content: bytearray, layout: Layout, rng: Random) -> None:
    _set_number(content, rng.choice(layout.numbers), rng, _NUMBERS)


def _other_offset(content: bytearray, layout: Layout, rng: Random) -> None:
    place = rng.choice(layout.offsets)
    if rng.random() < 0.4:  # where another tensor is
        start, size = rng.choice(layout.offsets)
        content[place[0] : place[0] + 8] = content[start : start + size]
    else:
        _set_number(content, place, rng, (*_NUMBERS, len(content), len(content) - layout.data, 33))


def _set_number(content: bytearray, place: tuple[int, int], rng: Random, values: tuple[int, ...]) -> None:
    start, size = place
    before = int.from_bytes(content[start : start + size], "little")
    value = rng.choice((*values, before + 1, before - 1, before * 2, before ^ 1 << rng.randrange(8 * size)))
    content[start : start + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")


def _truncated(content: bytearray, layout: Layout, rng: Random) -> None:
    place = rng.choice(layout.borders) if rng.random() < 0.7 else rng.randrange(len(content))
    del content[max(0, place + rng.choice((-1, 0, 0, 1))) :]


def _no_utf8(content: bytearray, layout: Layout, rng: Random) -> None:
    start, size = rng.choice([place for place in layout.texts if place[1]])
    content[start + rng.randrange(size)] = rng.choice((0xFF, 0xC3, 0x80, 0))


def _same_name(content: bytearray, layout: Layout, rng: Random) -> None:
    places = rng.choice([layout.names, layout.keys])
    (start, size), (source, length) = rng.choice(places), rng.choice(places)
    content[start : start + size] = content[source : source + length]


def _cut_out(content: bytearray, layout: Layout, rng: Random) -> None:
    start = rng.choice(layout.borders)
    del content[start : start + rng.choice((1, 4, 8, 40))]


def _put_in(content: bytearray, layout: Layout, rng: Random) -> None:
    start, source = rng.choice(layout.borders), rng.choice(layout.borders)
    content[start:start] = content[source : source + rng.choice((1, 4, 8, 12, 40))]


def _nested(content: bytearray, layout: Layout, rng: Random) -> None:
    start, _ = rng.choice(layout.types)
    content[start : start + 4] = struct.pack("<I", _ARRAY) + struct.pack("<IQ", _ARRAY, 1) * rng.randint(1, 6)


_OF_BYTES: tuple[Callable[[bytearray, Layout, Random], None], ...] = (
    _flipped,
    _flipped_weights,
    _other_length,
    _other_type,
    _other_number,
    _other_offset,
    _truncated,
    _no_utf8,
    _same_name,
    _cut_out,
    _put_in,
    _nested,
)


# --- Damage of what the file says -----------------------------------------------------------------------


def _other_value(content: Content, rng: Random) -> Content:
    key = rng.choice(list(content.metadata))
    return Content(metadata={**content.metadata, key: rng.choice(_VALUES)}, tensors=content.tensors)


def _another_key(content: Content, rng: Random) -> Content:
    name = content.metadata.get("general.architecture", "llama")
    key = rng.choice(
        [
            *(f"{name}.{each}" for each in _KEYS_OF_MODELS),
            *(f"tokenizer.ggml.{each}" for each in _KEYS_OF_VOCABULARIES),
            *("general.alignment", "split.count", "split.no", "split.tensors.count"),
            *("tokenizer.chat_template", "tokenizer.chat_templates", "tokenizer.chat_template.x"),
        ]
    )
    return Content(metadata={**content.metadata, key: rng.choice(_VALUES)}, tensors=content.tensors)


_KEYS_OF_MODELS = (
    *("attention.key_length", "attention.value_length", "attention.sliding_window", "attention.scale"),
    *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "embedding_scale", "logit_scale"),
    *("expert_shared_feed_forward_length", "attn_logit_softcapping", "final_logit_softcapping"),
    *("attention.kv_lora_rank", "attention.q_lora_rank", "attention.key_length_mla", "block_count"),
    *("attention.value_length_mla", "attention.temperature_scale", "attention.sliding_window_pattern"),
    *("expert_group_count", "expert_group_used_count", "expert_gating_func", "expert_shared_count"),
    *("expert_weights_scale", "leading_dense_block_count", "nextn_predict_layers"),
    *("rope.scaling.yarn_log_multiplier",),
)
_KEYS_OF_VOCABULARIES = (
    *("bos_token_id", "eos_token_id", "eot_token_id", "unknown_token_id", "padding_token_id", "model", "pre"),
    *("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces"),
    *("precompiled_charsmap", "scores", "token_type", "merges", "tokens"),
)


def _no_key(content: Content, rng: Random) -> Content:
    gone = rng.choice(list(content.metadata))
    rest = {key: value for key, value in content.metadata.items() if key != gone}
    return Content(metadata=rest, tensors=content.tensors)


def _no_tensor(content: Content, rng: Random) -> Content:
    gone = rng.choice(list(content.tensors))
    rest = {name: tensor for name, tensor in content.tensors.items() if name != gone}
    return Content(metadata=content.metadata, tensors=rest)


def _other_tensor(content: Content, rng: Random) -> Content:
    """A name with the shape, type and bytes of another tensor, or with a shape of its own."""
    name, source = rng.choice(list(content.tensors)), rng.choice(list(content.tensors.values()))
    shape = rng.choice(
        (source.shape, source.shape[::-1], (1, *source.shape), source.shape[:-1], (math.prod(source.shape),))
    )
    if rng.random() < 0.3:  # no values, but maybe many rows of none
        shape = (rng.choice((0, 2, 2**40)), 0, *shape)[-4:]
    other = Stored(shape=shape, kind=source.kind, content=source.content)
    return Content(metadata=content.metadata, tensors={**content.tensors, name: other})


def _another_tensor(content: Content, rng: Random) -> Content:
    name = rng.choice(
        (
            *("rope_freqs.weight", "rope_factors_short.weight", "output.weight", "blk.9.attn_q.weight", ""),
            *("blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate_exps.weight", "x" * 1024),
            *("blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight", "blk.0.attn_kv_b.weight"),
            *("blk.0.ffn_gate_up_exps.weight", "blk.0.exp_probs_b.bias", "blk.2.nextn.eh_proj.weight"),
            *("blk.999999.attn_q.weight", "blk.0.attn_qkv.weight", "blk.0.ffn_gate_inp_shexp.weight"),
        )
    )
    tensors = {**content.tensors, name: rng.choice(list(content.tensors.values()))}
    return Content(metadata=content.metadata, tensors=tensors)


def _swapped(content: Content, rng: Random) -> Content:
    names = list(content.tensors)
    first, second = rng.choice(names), rng.choice(names)
    tensors = {**content.tensors, first: content.tensors[second], second: content.tensors[first]}
    return Content(metadata=content.metadata, tensors=tensors)


_OF_CONTENT: tuple[Callable[[Content, Random], Content], ...] = (
    *(_other_value, _other_value, _another_key, _another_key),
    *(_no_key, _no_tensor, _other_tensor, _another_tensor, _swapped),
)


def damaged(content: Content, rng: Random) -> bytes:
    """Return the file with damage of one or several kinds."""
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            content = rng.choice(_OF_CONTENT)(content, rng)
        return content.file()
    whole = content.file()
    layout, raw = layout_of(whole), bytearray(whole)
    rng.choice(_OF_BYTES)(raw, layout, rng)
    if rng.random() < 0.2:
        end = min(layout.data, len(raw))
        if end:
            raw[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(raw)
