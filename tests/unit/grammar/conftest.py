from __future__ import annotations

import pytest

from masks import DEMO, EOS
from penstock.grammar.matcher import Vocabulary, load_vocabulary


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(DEMO, [EOS])
