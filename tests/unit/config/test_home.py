"""A user without a home directory, as in a container: folders are where the user says, or nowhere."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import NoReturn

import pytest

from penstock.config.hosts import state_directory
from penstock.errors import UsageError
from penstock.hosts.model_shelf import ModelShelf
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


@pytest.mark.usefixtures("_homeless")
def test_without_a_home_no_state_is_kept_in_a_folder_named_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in (None, "~/state"):
        with pytest.raises(UsageError, match="HOME is not set") as refused:
            state_directory(given)
        assert "--state-dir" in refused.value.remedy
    assert state_directory(tmp_path) == tmp_path
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_directory(None) == tmp_path / "penstock"


@pytest.mark.usefixtures("_homeless")
def test_without_a_home_a_worker_s_models_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="HOME is not set") as refused:
        ModelShelf([Path("~/models")])
    assert "--models-dir" in refused.value.remedy
    assert ModelShelf([tmp_path]).places == str(tmp_path)
