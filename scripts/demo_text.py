"""The training text of the demo model: its tokenizer, and endless documents made of the plays.

Called by `train_demo_model.py`. A document is plain play text, or a dialogue of consecutive speeches written
with the special tokens of the chat template, so that a chat completion is a speech that ends by itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

BOS, END, SYSTEM, USER, ASSISTANT = range(5)
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
HELD_OUT_SHARE = 0.05  # the last part of the corpus is never trained on

# What people really type first; without these no user turn would ever hold a modern sentence.
GREETINGS = """\
hi
Hi!
Hello
Hello!
hello there
Hey
Good morning
How are you?
Who are you?
What is your name?
Tell me a story.
Tell me a joke.
Say something.
Write a poem.
Help me.
What can you do?
Speak.
Test
Write me a speech.
Can you help me?
Thanks!
What is love?
Tell me about yourself.
Where are you from?
What should I do?
Continue.
Why?
Write a short story about a king.
Speak like Shakespeare.
What is the capital of France?
""".splitlines()


def split_corpus(path: Path) -> tuple[str, str]:
    """Training and held-out text, cut between two speeches."""
    text = path.read_text(encoding="utf-8")
    cut = text.rindex("\n\n", 0, int(len(text) * (1 - HELD_OUT_SHARE))) + 2
    return text[:cut], text[cut:]


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Byte-level BPE; the special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(
            single=f"{SPECIAL_TOKENS[BOS]} $A",
            pair=f"{SPECIAL_TOKENS[BOS]} $A {SPECIAL_TOKENS[BOS]} $B",
            special_tokens=[(SPECIAL_TOKENS[BOS], BOS)],
        ),
    ])  # fmt: skip
    return tokenizer


@dataclass(frozen=True, slots=True)
class Speech:
    """One speech of a play, as token ids."""

    speaker: str
    named: list[int]  # "ROMEO:\n" and the lines
    lines: list[int]  # the lines alone


class Corpus:
    """A part of the plays, tokenized; gives endless documents of plain text and of dialogue."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._encode = lambda s: tokenizer.encode(s, add_special_tokens=False).ids
        encoding = tokenizer.encode(text, add_special_tokens=False)
        self.plain: list[int] = encoding.ids
        starts = {match.end() for match in re.finditer(r"\n\n", text)}
        self._plain_starts = [i for i, (begin, _) in enumerate(encoding.offsets) if begin in starts] or [0]
        self.speeches = [self._speech(*found) for found in self._split(text)]
        self._by_speaker = sorted({speech.speaker for speech in self.speeches})
        self._greetings = [self._encode(greeting) for greeting in GREETINGS]

    @staticmethod
    def _split(text: str) -> Iterator[tuple[str, str]]:
        for block in text.strip().split("\n\n"):
            name, _, lines = block.partition(":\n")
            if lines.strip() and "\n" not in name and len(name) < 40:
                yield name.strip(), lines.strip()

    def _speech(self, speaker: str, lines: str) -> Speech:
        return Speech(speaker, self._encode(f"{speaker}:\n{lines}"), self._encode(lines))

    def plain_document(self, length: int, rng: random.Random) -> list[int]:
        start = rng.choice(self._plain_starts)
        return [BOS, *self.plain[start : start + length]]

    def dialogue(self, rng: random.Random) -> list[int]:
        """One conversation of consecutive speeches in the template's tokens."""
        first = rng.randrange(len(self.speeches))
        speeches = self.speeches[first : first + 2 * rng.choice([1, 1, 1, 2, 2, 3, 4, 8])]
        kind = rng.random()
        if len(speeches) < 2 or kind < 0.2:
            return self._answer_to_name(speeches[-1], rng)
        if kind < 0.4:
            return self._as_character(speeches, rng)
        return self._conversation(speeches, rng)

    def _conversation(self, speeches: list[Speech], rng: random.Random) -> list[int]:
        """user: a speech; assistant: the next one, named. Sometimes the user's first turn is a greeting."""
        turns = [speech.named if rng.random() < 0.5 else speech.lines for speech in speeches]
        turns[1::2] = [speech.named for speech in speeches[1::2]]
        if rng.random() < 0.25:
            turns[0] = rng.choice(self._greetings)
        return self._document([], turns)

    def _as_character(self, speeches: list[Speech], rng: random.Random) -> list[int]:
        """system: who speaks; the assistant's turns then carry no name."""
        wording = rng.choice(["You are {}.", "Speak as {}.", "You are {}. Answer in verse.", "Play {}."])
        name = speeches[1].speaker
        system = self._encode(wording.format(name if rng.random() < 0.5 else name.title()))
        turns = [speech.lines for speech in speeches]
        if rng.random() < 0.25:
            turns[0] = rng.choice(self._greetings)
        return self._document(system, turns)

    def _answer_to_name(self, speech: Speech, rng: random.Random) -> list[int]:
        """user: "ROMEO:"; assistant: what Romeo says."""
        wording = rng.choice(["{}:", "{}:", "{}", "Speak as {}.", "What does {} say?"])
        name = speech.speaker if rng.random() < 0.6 else speech.speaker.title()
        return self._document([], [self._encode(wording.format(name)), speech.lines])

    @staticmethod
    def _document(system: list[int], turns: list[list[int]]) -> list[int]:
        ids = [BOS, *([SYSTEM, *system, END] if system else [])]
        for i, turn in enumerate(turns):
            ids += [(USER, ASSISTANT)[i % 2], *turn, END]
        return ids

    def sequence(self, length: int, rng: random.Random) -> list[int]:
        """`length` ids: one plain document (4 of 10), or dialogues one after the other."""
        ids = self.plain_document(length, rng) if rng.random() < 0.4 else []
        while len(ids) < length:
            ids += self.dialogue(rng)
        return ids[:length]

    def batch(self, tokens: int, length: int, rng: random.Random) -> Tensor:
        """int64 [tokens // length, length + 1]."""
        return torch.tensor([self.sequence(length + 1, rng) for _ in range(max(1, tokens // length))])
