"""What a machine can check of the language of docstrings: plain sentences that are understood alone.

Functions say in the imperative what they do; classes, properties and modules say what they are. `ALLOWED` is
a ratchet: the offences of rooms that are not rewritten yet, by number. A number may only sink.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import penstock

PACKAGE = Path(penstock.__file__).parent

# Offences by room, a folder of `src/penstock` ("" has the files beside the folders). A room that is not here
# has none, and may get none.
ALLOWED: dict[str, int] = {}

# The verbs that docstrings of functions begin with.
VERBS_OF_FUNCTIONS = """
    Abort Accept Add Adopt Allow Answer Append Apply Ask Assert Attend Become Begin Bind Block Bound
    Bring Build Call Carry Check Choose Claim Close Compare Compute Connect Continue Copy Count Create
    Cut Decide Decode Delete Describe Dial Do Download Draw Drop Encode End Estimate Evict Fail Fetch
    Fill Find Finish Forget Free Gather Generate Get Give Go Group Guess Handle Hash Hide Hold Join Keep
    Kill Learn Leave Let List Listen Load Log Look Lose Make Mark Measure Move Multiply Name Normalise
    Note Open Order Pack Parse Pass Place Pool Post Prepack Prepare Print Project Prove Put Quantise
    Queue Raise Read Reap Rebuild Record Refuse Register Release Remember Remove Repeat Replace Replay
    Report Resolve Return Revoke Rotate Run Sample Say Seal See Send Serve Set Settle Show Shut Start
    Stop Store Submit Take Tell Tick Time Treat Turn Use Verify Wait Withdraw Write Yield
"""
# The verbs that sentences about modules and classes begin with.
VERBS_ABOUT_THINGS = """
    Aborts Accepts Adds Allocates Announces Answers Applies Asks Asserts Assigns Brings Builds Calls Carries
    Checks Chooses Computes Connects Copies Counts Cuts Decides Decodes Dials Draws Ends Exchanges Fetches
    Fills Finds Gathers Gets Gives Guesses Hears Holds Implements Joins Keeps Knows Learns Lets Limits Listens
    Loads Looks Makes Measures Names Normalises Orders Plans Proves Pulls Puts Reads Receives Records Refuses
    Removes Renders Replaces Replays Reports Reuses Rewrites Runs Secures Sends Settles Shows Sizes Skips
    Splits Spreads Starts Streams Submits Takes Teaches Tells Tracks Translates Turns Waits Watches Writes
"""

VERBS = frozenset(VERBS_OF_FUNCTIONS.split())
ABOUT = frozenset(VERBS_ABOUT_THINGS.split())

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Function = ast.FunctionDef | ast.AsyncFunctionDef

NO_BEGINNING = re.compile(
    r"(Of|Those|That|The same|Who|Whom|Whose|Whoever|What|Whatever|How|And|As|Args:|Attributes:)(?!\w)"
)
NOUN_PHRASE = re.compile(r"(A|An|The|One|All) |`")
IS_NO = re.compile(r"(?<!\bthere )\b(is|are|was|were) no\s+(?!longer|more|less|fewer)", re.IGNORECASE)
PERSON = re.compile(r"\b(who|whom|whoever)\b", re.IGNORECASE)
FINITE_VERB = re.compile(r"\b(is|are|was|has|have|does|do|can|may|must|cannot|goes|holds|says)\b")


def faults_of(node: Documented, docstring: str) -> Iterator[str]:
    """Yield what is wrong with the docstring of a module, class, property or function."""
    first_line = docstring.splitlines()[0]
    first_word = re.split(r"[\s,.:;(]", first_line, maxsplit=1)[0]
    if not first_line.endswith((".", ":")):
        yield "its first line is not a sentence"
    if NO_BEGINNING.match(first_line):
        yield f"begins with {first_word!r}"
    if IS_NO.search(docstring):
        yield "'is no' instead of 'is not a'"
    if PERSON.search(docstring):
        yield "'who' for a thing"
    if isinstance(node, Function) and not _is_property(node):
        if first_word not in VERBS:
            yield f"does not begin with a verb in the imperative: {first_word!r}"
    elif isinstance(node, Function):
        if not NOUN_PHRASE.match(first_line) and first_word not in {"Whether", "Always"} | VERBS:
            yield f"begins neither with a noun phrase nor a verb: {first_word!r}"
    elif not (NOUN_PHRASE.match(first_line) or first_word in ABOUT | VERBS or FINITE_VERB.search(first_line)):
        yield "its first line has neither a verb nor a noun phrase"


def _is_property(node: Function) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def documented(tree: ast.Module) -> Iterator[tuple[str, Documented]]:
    """Yield what strangers read of a module: itself, and its public classes, functions and methods."""
    yield "the module", tree
    inside: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    for prefix, parent in inside:
        for node in parent.body:
            if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
                yield prefix + node.name, node
                if isinstance(node, ast.ClassDef):
                    inside.append((f"{prefix}{node.name}.", node))


def offences() -> Iterator[tuple[str, str]]:
    """Yield the room of each offence, and a line about it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        room = place.parts[0] if len(place.parts) > 1 else ""
        for name, node in documented(ast.parse(path.read_text(encoding="utf-8"))):
            docstring = ast.get_docstring(node)
            for fault in faults_of(node, docstring) if docstring else ():
                yield room, f"{place}: {name}: {fault}"


def faults_in(source: str) -> list[str]:
    """Return the faults of all public docstrings of a module."""
    return [
        fault
        for _, node in documented(ast.parse(source))
        if (docstring := ast.get_docstring(node))
        for fault in faults_of(node, docstring)
    ]


def test_docstrings_are_sentences_that_are_understood_alone() -> None:
    found = list(offences())
    counts = Counter(room for room, _ in found)
    worse = {room for room, count in counts.items() if count > ALLOWED.get(room, 0)}
    assert not worse, "\n".join(line for room, line in found if room in worse)
    better = {room: counts[room] for room, allowed in ALLOWED.items() if counts[room] < allowed}
    assert not better, f"lower ALLOWED, which may only sink: {better} (0: leave the room out)"


def test_each_rule_finds_what_it_is_for() -> None:
    assert faults_in('"""The rows of a plan."""') == []
    assert faults_in('def take():\n    """Return the oldest row."""') == []
    assert faults_in('class Row:\n    """A row that is nobody\'s."""') == []
    for docstring in (
        "Of one kind.",
        "The blocks that are found",
        "Return who waits.",
        "Return whether it is no directory.",
        "It has lost its row.",
        "Args:\n    rows: all of them.",
    ):
        assert faults_in(f'def take():\n    """{docstring}"""'), docstring
    assert faults_in('class Row:\n    """Args:\n    rows: all of them."""')
    assert faults_in('class Row:\n    """Blocks, one after the other."""')
    of_property = 'class Row:\n    @property\n    def size(self):\n        """{}"""'
    assert faults_in(of_property.format("Tokens of it."))
    assert faults_in(of_property.format("The tokens of a row.")) == []
    assert faults_in('class Row:\n    def _size(self):\n        """Of a row."""') == []
