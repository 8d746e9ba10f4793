"""The page of properties explains every row that the source cites, and names tests that exist."""

from __future__ import annotations

import re

import pytest

from named_tests import all_tests_in, fast_tests_in
from paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "properties.md").read_text(encoding="utf-8")
SOURCES = sorted(
    path for path in (REPOSITORY / "src").rglob("*") if path.suffix in {".py", ".cpp", ".h", ".toml"}
)
SIZES = {
    "A": 18,
    "B": 9,
    "C": 13,
    "D": 13,
    "E": 13,
    "F": 10,
    "G": 8,
    "H": 18,
    "I": 14,
    "S": 10,
    "DR": 12,
    "d": 19,
    "R": 16,
}
IDS = [f"{group}{number}" for group, size in SIZES.items() for number in range(1, size + 1)]
MARKS = ("By construction", "In part", "Not built", "Unproven")
MOST_WORDS = 25

ROW = re.compile(r"^\| ([A-Za-z]+[0-9]+) \| (.+?) \| (.+?) \|$", re.MULTILINE)
ROWS: dict[str, tuple[str, str]] = {id_: (says, proofs) for id_, says, proofs in ROW.findall(PAGE)}

ID = r"(?:DR|[A-IRSd])[0-9]{1,2}"
JOINT = r"(?:,? and |, |; | to |-)"
CITED = re.compile(rf"\b[Rr]ows? ({ID}(?:{JOINT}{ID})*)\b|\(({ID}(?:{JOINT}{ID})*)\)|\[({ID})\]")


def cited_ids(text: str) -> set[str]:
    """Return the ids of all citations such as "row D9", "(rows D5-D7)", "(d4)" or "[D9]"."""
    return {id_ for groups in CITED.findall(" ".join(text.split())) for id_ in ids_of("".join(groups))}


def ids_of(citation: str) -> list[str]:
    """Return the ids of one citation; those between the ends of a range too."""
    ids = re.findall(ID, citation)
    for first, last in re.findall(rf"(?=({ID})(?:-| to )({ID}))", citation):
        group = first.rstrip("0123456789")
        ids += [f"{group}{number}" for number in range(int(first[len(group) :]), int(last[len(group) :]))]
    return ids


def sentences(text: str) -> list[str]:
    """Return the sentences of a cell, without its marks."""
    bare = re.sub(r"^\*([A-Z][a-z ]+)\*(?:: | )", "", text)
    return re.split(r"(?<=[.:]) (?=[A-Z*`])", bare)


def is_there(proof: str) -> bool:
    """Whether a proof names a test, a file with tests, or a benchmark."""
    file, _, test = proof.partition("::")
    if file.startswith("benchmarks/"):
        return not test and (REPOSITORY / file).is_file()
    path = REPOSITORY / "tests" / file
    return path.name.startswith("test_") and path.is_file() and (not test or test in all_tests_in(path))


def is_fast(proof: str) -> bool:
    """Whether `./run test` runs a proof."""
    file, _, test = proof.partition("::")
    if file.startswith(("benchmarks/", "doors/")):
        return False
    fast = fast_tests_in(REPOSITORY / "tests" / file)
    return test in fast if test else bool(fast)


def test_every_property_is_on_the_page_once_and_in_order() -> None:
    assert [id_ for id_, _, _ in ROW.findall(PAGE)] == IDS


def test_every_line_of_a_table_is_read() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and "| what holds |" not in line]
    assert len(lines) == len(IDS)


@pytest.mark.parametrize("id_", IDS)
def test_a_property_is_told_in_short_sentences(id_: str) -> None:
    says, _ = ROWS[id_]
    assert says.endswith(".")
    for sentence in sentences(says):
        assert len(sentence.split()) <= MOST_WORDS, sentence
    marks = re.findall(r"\*([A-Z][a-z ]+)\*", says)
    assert set(marks) <= set(MARKS)


@pytest.mark.parametrize("id_", IDS)
def test_what_proves_a_property_is_there(id_: str) -> None:
    says, proofs = ROWS[id_]
    if proofs == "—":
        assert says.startswith("*Not built*")
        return
    named = re.findall(r"`([^`]+)`", proofs)
    assert ", ".join(f"`{proof}`" for proof in named) == proofs
    assert len(set(named)) == len(named)
    assert [proof for proof in named if not is_there(proof)] == []
    assert "*Unproven*" in says or any(map(is_fast, named)), "`./run test` proves it too"


def test_the_page_explains_every_row_that_the_source_cites() -> None:
    cited = {
        (id_, path.relative_to(REPOSITORY).as_posix())
        for path in SOURCES
        for id_ in cited_ids(path.read_text(encoding="utf-8"))
    }
    assert {place for place in cited if place[0] not in ROWS} == set()
    assert len({id_ for id_, _ in cited}) > 60, "citations are read"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the minimum over the stages (row D9).", {"D9"}),
        ("(rows D1, F2; S8); `auto`", {"D1", "F2", "S8"}),
        ("rows B1 to\n    B3, in it", {"B1", "B2", "B3"}),
        ("see rows D5-D7 and no more", {"D5", "D6", "D7"}),
        ("meet (row d4).  Refused (I2, I3)", {"d4", "I2", "I3"}),
        ("(DR5) or [H99]", {"DR5", "H99"}),
        ("the tier (L3) of DDR5, a row A of a table, (V3)", set()),
    ],
)
def test_citations_are_read(text: str, found: set[str]) -> None:
    assert cited_ids(text) == found


@pytest.mark.parametrize(
    "proof",
    [
        "unit/test_properties.py::test_that_nobody_wrote",
        "unit/test_properties.py::cited_ids",
        "unit/test_nowhere.py",
        "support/paths.py",
        "benchmarks/nothing.py",
    ],
)
def test_a_proof_that_is_not_there_is_seen(proof: str) -> None:
    assert not is_there(proof)
    assert is_there("unit/test_properties.py::test_citations_are_read")


def test_proofs_that_take_long_are_told_from_others() -> None:
    assert is_fast("unit/test_properties.py::test_citations_are_read")
    assert not is_fast("pipeline/test_serve.py::test_r1_trace_replay_of_500_requests")
    assert not is_fast("doors/test_network.py")
