"""The table of other engines' flags names flags that are there, and none that we have ourselves (issue 25,
point 13)."""

from __future__ import annotations

import re

from penstock.config import foreign_flags
from penstock.config.declared import ENGINE, SERVER, declared
from penstock.config.foreign_flags import FOREIGN_FLAGS
from penstock.config.refused_settings import _REFUSED

OURS = {flag for each in declared(*ENGINE, *SERVER) for flag in (*each.flags, each.setting.off)}
OF_THE_PROGRAM = {"--download"}  # not a setting of engine or server


def test_every_flag_that_the_table_points_to_is_there() -> None:
    for name, foreign in FOREIGN_FLAGS.items():
        named = {foreign.ours} | set(re.findall(r"--[a-z-]+", foreign.remark)) - {""}
        assert named <= OURS | OF_THE_PROGRAM | {""}, name
        assert foreign.ours or foreign.remark, name


def test_no_flag_of_the_table_is_one_of_ours_or_refused_elsewhere() -> None:
    refused = {"--" + name.replace("_", "-") for name in _REFUSED}
    assert FOREIGN_FLAGS.keys().isdisjoint(OURS | refused)


def test_a_flag_of_several_engines_has_one_answer() -> None:
    answers: dict[str, tuple[str, str]] = {}
    for table in (foreign_flags._OF_VLLM, foreign_flags._OF_SGLANG, foreign_flags._OF_LLAMA_CPP):
        for name, answer in table.items():
            assert answers.setdefault(name, answer) == answer, name
