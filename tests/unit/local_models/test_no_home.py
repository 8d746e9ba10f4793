"""A user without a home directory, as in a container: models are looked for where the user says."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import NoReturn

import pytest

from penstock.errors import UsageError
from penstock.local_models.hub_cache import hub_cache_directory
from penstock.local_models.inventory import entries


@pytest.fixture
def _homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> NoReturn:
        raise KeyError(number)

    for name in [*os.environ]:
        if name == "HOME" or name.startswith(("HF_", "HUGGINGFACE_", "XDG_", "OLLAMA_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("_homeless")
def test_without_a_home_the_folder_of_models_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="HOME is not set") as refused:
        list(entries())
    assert "HF_HUB_CACHE" in refused.value.remedy
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert hub_cache_directory() == tmp_path
    assert list(entries()) == []
