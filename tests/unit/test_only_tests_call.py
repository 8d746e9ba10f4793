"""The package has no function, class or constant that only tests use.

A name counts as used where its word stands in the source, a script, an example or a benchmark, apart from its
definitions, docstrings and comments. A name that something else has too is therefore not found.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from paths import REPOSITORY

PACKAGE = "src/penstock"
USERS = (PACKAGE, "scripts", "examples", "benchmarks")

UVICORN = "called by uvicorn"
USERS_OF_LLM = "a method of penstock.LLM and penstock.AsyncLLM, for programs of users"
BULK = "how a rank will use bulk channels: docs/adding-a-carrier.md"
PARTS = "how a layout will split contexts: docs/architecture.md"

ALLOWED = {
    "capture_signals": UVICORN,
    "main_loop": UVICORN,
    "eof_received": "called by asyncio",
    "get_chat_template": USERS_OF_LLM,
    "get_default_sampling_params": USERS_OF_LLM,
    "open_bulk": BULK,
    "BulkSender": BULK,
    "send_payload": BULK,
    "BulkReceiver": BULK,
    "receive_payload": BULK,
    "ByteRate": BULK,
    "SEGMENT_TOKENS": PARTS,
    "attention_parts": PARTS,
    "merge_parts": PARTS,
}

# A docstring; a string, which stays, since some strings name commands or hold code; or a comment.
TEXT = re.compile(
    r'^\s*"""[\s\S]*?"""|("""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|#[^\n]*', re.MULTILINE
)
DEFINITION = re.compile(r"^\s*(?:async )?(?:def|class) (\w+)|^(\w+)(?:: [^=\n]+)? = ", re.MULTILINE)
WORD = re.compile(r"[^\W\d]\w*")


def code_below(directory: str) -> Iterator[str]:
    """Yield the text of each file, without docstrings and comments."""
    for path in (REPOSITORY / directory).rglob("*.py"):
        yield TEXT.sub(lambda found: found[1] or "", path.read_text(encoding="utf-8"))


def test_only_names_on_the_list_are_used_by_tests_alone() -> None:
    defined = Counter(
        name for code in code_below(PACKAGE) for names in DEFINITION.findall(code) for name in names if name
    )
    words = Counter(word for user in USERS for code in code_below(user) for word in WORD.findall(code))
    assert defined["main_loop"] == 1
    assert words["LLM"] > 1
    unused = {name for name, count in defined.items() if words[name] == count}
    assert {name for name in unused if not name.startswith("__")} == ALLOWED.keys()
