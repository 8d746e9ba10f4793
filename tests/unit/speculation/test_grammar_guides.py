"""What is guessed of texts that follow a grammar: what it forces, and nothing that it forbids."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from random import Random

import pytest

from masks import DEMO, EOS
from penstock.grammar.matcher import Matcher, Vocabulary, load_vocabulary
from penstock.request import StructuredOutputs
from penstock.speculation.drafter import NO_DRAFT, Draft
from penstock.speculation.grammar_guides import MOST_KEPT, GrammarGuides, NoGuides

PROMPT = [1, 403]
NAMES = StructuredOutputs(
    json=json.dumps(
        {
            "type": "object",
            "properties": {"name": {"enum": ["Ann", "Bob"]}, "available": {"type": "boolean"}},
            "required": ["name", "available"],
        }
    )
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(DEMO, [EOS])


class Guided:
    """One request of some guides, and what a stage would allow."""

    def __init__(self, vocabulary: Vocabulary, structured: StructuredOutputs = NAMES) -> None:
        self.guides = GrammarGuides(lambda: vocabulary, 1024)
        self.structured = structured
        self.oracle = Matcher(vocabulary, structured)
        self.tokens = list(PROMPT)
        self.ask()
        self.guides._built[next(iter(self.guides._built))].result(20.0)

    def ask(self, draft: Draft = NO_DRAFT, most: int = 8, request: int = 3) -> Draft:
        return self.guides.guided(request, self.structured, len(PROMPT), self.tokens, draft, most)

    def say(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids
        self.oracle.accept(token_ids)

    def allowed(self) -> list[int]:
        mask = self.oracle.mask()
        return [bit for bit in range(8 * len(mask)) if mask[bit // 8] >> bit % 8 & 1]


def test_what_is_forced_is_guessed(vocabulary: Vocabulary) -> None:
    guided = Guided(vocabulary)
    texts = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    spelt = {token_id: text for text, token_id in texts.items()}
    draft = guided.ask(most=30)
    assert "".join(spelt[token_id] for token_id in draft.token_ids) == '{"name":"'
    assert draft.chance > 0.9
    assert guided.ask(most=2).token_ids == draft.token_ids[:2]
    guided.say(draft.token_ids)
    assert guided.ask() == NO_DRAFT, "a name is anybody's guess"


def test_where_no_thread_starts_there_is_no_guess_and_no_error(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes once threads start has guesses, and what was refused is not built before it."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    guides, draft, built = GrammarGuides(lambda: vocabulary, 1024), Draft([5], 0.9), []
    build = guides._build

    def noted_build(structured: StructuredOutputs) -> Matcher:
        built.append(structured)
        return build(structured)

    monkeypatch.setattr(guides, "_build", noted_build)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for request, structured in enumerate((NAMES, StructuredOutputs(choice=["the cat"]), NAMES)):
            assert guides.guided(request, structured, len(PROMPT), PROMPT, draft, 8) == NO_DRAFT
    for request in (2, 3):
        guides.guided(request, NAMES, len(PROMPT), PROMPT, draft, 8)
    guides._building.submit(int).result(20.0)
    assert built == [NAMES]
    assert guides.guided(2, NAMES, len(PROMPT), PROMPT, draft, 8) == NO_DRAFT, "it came before"
    assert guides.guided(3, NAMES, len(PROMPT), PROMPT, draft, 8).is_forced


@pytest.mark.parametrize("seed", range(12))
def test_no_guess_is_forbidden_whatever_was_said(vocabulary: Vocabulary, seed: int) -> None:
    random, guided, num_guessed = Random(seed), Guided(vocabulary), 0
    while True:
        allowed = guided.allowed()
        if not allowed or guided.oracle.error:
            break
        drafted = [random.choice(allowed), *(random.randrange(1024) for _ in range(3))]
        draft = guided.ask(Draft(drafted, random.choice([0.1, 0.9])))
        ahead = guided.oracle.copy()
        for token_id in draft.token_ids:
            mask = ahead.mask()
            assert mask[token_id // 8] >> token_id % 8 & 1, "the grammar forbids it"
            ahead.accept([token_id])
        num_guessed += len(draft.token_ids)
        said = [random.choice(allowed)]
        if said[0] in vocabulary.ends:
            break
        guided.say(said)
    assert num_guessed > 5


def test_a_draft_is_cut_where_the_grammar_forbids_it(vocabulary: Vocabulary) -> None:
    guided = Guided(vocabulary, StructuredOutputs(regex="[a-z]{1,9}"))
    letters = [token_id for token_id in guided.allowed() if token_id not in vocabulary.ends]
    other = next(token_id for token_id in range(3, 1024) if token_id not in letters)
    assert list(guided.ask(Draft([letters[0], other, letters[0]], 0.5)).token_ids) == letters[:1]
    assert not guided.ask(Draft([other], 0.9)).token_ids


def test_what_is_forced_is_all_that_the_mask_allows(vocabulary: Vocabulary) -> None:
    guided, num_forced = Guided(vocabulary), 0
    while guided.allowed()[:1] != [EOS]:
        for token_id in guided.ask(most=40).token_ids:
            assert guided.allowed() == [token_id]
            guided.say([token_id])
            num_forced += 1
        guided.say(guided.allowed()[:1] if guided.allowed()[0] != EOS else [])
    assert num_forced > 10


def test_a_token_that_the_model_has_not_is_not_guessed(vocabulary: Vocabulary) -> None:
    whole = Guided(vocabulary).ask(most=20).token_ids
    guided = Guided(vocabulary)
    guided.guides._vocab_size = max(whole)
    assert list(guided.ask(most=20).token_ids) == list(whole[: whole.index(max(whole))])


def test_until_it_is_built_nothing_is_guessed(vocabulary: Vocabulary) -> None:
    guides = GrammarGuides(lambda: vocabulary, 1024)
    gate = threading.Event()
    held = guides._building.submit(gate.wait, 20.0)
    assert guides.guided(1, NAMES, 2, PROMPT, Draft([5], 0.9), 4) == NO_DRAFT
    gate.set()
    assert held.result(20.0)


def test_behind_the_end_nothing_is_guessed(vocabulary: Vocabulary) -> None:
    guided = Guided(vocabulary, StructuredOutputs(choice=["the cat"]))
    while not set(draft := guided.ask(most=20).token_ids) & vocabulary.ends:
        if not draft:
            break
        guided.say(draft)
    guided.say([next(iter(vocabulary.ends))])
    guided.say([300])
    assert guided.ask(Draft([5], 0.9)) == NO_DRAFT


def test_what_cannot_be_built_is_left_alone(vocabulary: Vocabulary) -> None:
    guides = GrammarGuides(lambda: vocabulary, 1024)
    bad = StructuredOutputs(grammar="start: nothing of the kind")
    assert guides.guided(1, bad, 2, PROMPT, Draft([5], 0.9), 4) == NO_DRAFT
    next(iter(guides._built.values())).exception(20.0)
    assert guides.guided(1, bad, 2, PROMPT, Draft([5], 0.9), 4) == NO_DRAFT
    assert guides.guided(1, bad, 2, PROMPT, Draft([5], 0.9), 4) == NO_DRAFT


def test_grammars_are_shared_and_few_are_kept(vocabulary: Vocabulary) -> None:
    guides = GrammarGuides(lambda: vocabulary, 1024)
    for number in range(MOST_KEPT + 5):
        guides.guided(number, StructuredOutputs(choice=[f"cat{number % 3}"]), 2, PROMPT, NO_DRAFT, 4)
    assert len(guides._built) == 3
    for number in range(MOST_KEPT + 5):
        guides.guided(100 + number, StructuredOutputs(choice=[f"dog{number}"]), 2, PROMPT, NO_DRAFT, 4)
    assert len(guides._built) == MOST_KEPT
    for number in range(300):
        guides.forget(number)
    assert not guides._guides


def test_without_guides_a_draft_is_as_it_was() -> None:
    draft = Draft([5], 0.9)
    assert NoGuides().guided(1, NAMES, 2, PROMPT, draft, 4) is draft
