"""From the name of a model to its files: the hub's cache, Ollama's store and LM Studio's folder."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from model_stores import in_hub_cache, in_lm_studio, in_ollama
from penstock.errors import ModelConfigError, UsageError
from penstock.families.registry import resolve_model_directory
from penstock.local_models import inventory
from penstock.local_models.inventory import Entry, entries
from penstock.local_models.locating import locate_model
from penstock.local_models.model_name import ModelName
from penstock.local_models.ollama import ollama_model, ollama_models

LIBRARY = "registry.ollama.ai/library"
PLAIN = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def cache(home: Path) -> Path:
    return home / ".cache" / "huggingface" / "hub"


@pytest.fixture
def ollama(home: Path) -> Path:
    return home / ".ollama" / "models"


@pytest.fixture
def studio(home: Path) -> Path:
    return home / ".lmstudio" / "models"


# --- names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "a/",
        "/a",
        "a/../b",
        "..",
        "a:",
        "a:..",
        "a:b/../c",
        "a b",
        "a\0b",
        "a/b/c/d/e",
        "x" * 201,
        "~a",
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    assert ModelName.parse(text) is None
    with pytest.raises(UsageError):
        ModelName.of_hub(text)
    with pytest.raises(ModelConfigError, match="neither a directory nor a name"):
        locate_model(text)


def test_names_have_a_repository_and_perhaps_a_file() -> None:
    name = ModelName.of_hub("org/name:Q4_K_M/x.gguf")
    assert (name.repository, name.file, str(name)) == (
        ("org", "name"),
        "Q4_K_M/x.gguf",
        "org/name:Q4_K_M/x.gguf",
    )
    for text in ("name", "a/b/c", "a--b/c", "a/b--c:x"):
        assert ModelName.parse(text) is not None
        with pytest.raises(UsageError, match="not the name of a model on the hub"):
            ModelName.of_hub(text)


# --- the hub's cache --------------------------------------------------------------------------------


def test_a_directory_of_the_hub_s_cache_goes_before_all(cache: Path, studio: Path, ollama: Path) -> None:
    snapshot = in_hub_cache(cache, "org/name", PLAIN | {"name-Q8_0.gguf": b"x"})
    in_lm_studio(studio, "org/name/name-Q8_0.gguf")
    in_ollama(ollama, "registry.ollama.ai/org/name/latest", {"model": b"x"})
    located = locate_model("org/name")
    assert (located.path, located.place, located.is_gguf) == (snapshot, "hub cache", False)
    assert resolve_model_directory("org/name") == snapshot


def test_gguf_files_of_the_hub_s_cache(cache: Path) -> None:
    split = {f"big/n-Q8_0-0000{n}-of-00002.gguf": bytes([n]) for n in (1, 2)}
    snapshot = in_hub_cache(cache, "org/n-GGUF", {"n-Q4_0.gguf": b"4", "config.json": b"{}", **split})
    for file, path in (("q8_0", "big/n-Q8_0-00001-of-00002.gguf"), ("n-Q4_0.gguf", "n-Q4_0.gguf")):
        located = locate_model(f"org/n-GGUF:{file}")
        assert (located.path, located.is_gguf) == (snapshot / path, True)
    with pytest.raises(ModelConfigError) as caught:
        locate_model("org/n-GGUF")
    assert caught.value.code == "model_ambiguous"
    assert "org/n-GGUF:Q4_0 (hub cache: " in caught.value.message
    assert "org/n-GGUF:Q8_0 (hub cache: " in caught.value.message
    with pytest.raises(ModelConfigError, match="penstock pull org/n-GGUF:Q5_0") as caught:
        locate_model("org/n-GGUF:Q5_0")
    assert caught.value.code == "model_absent"


def test_a_split_that_lacks_a_part_is_not_opened(cache: Path, studio: Path) -> None:
    in_hub_cache(cache, "org/n", {"n-Q8_0-00002-of-00002.gguf": b"x"})
    with pytest.raises(ModelConfigError, match="1 of its 2 parts are in") as caught:
        locate_model("org/n:Q8_0")
    assert caught.value.code == "model_incomplete"
    in_lm_studio(studio, "pub/repo/r-00001-of-00003.gguf")
    with pytest.raises(ModelConfigError, match=r"r-00001-of-00003\.gguf is not complete: 1 of its 3"):
        locate_model("pub/repo")


def test_what_lacks_files_does_not_stand_before_what_is_whole(
    cache: Path, studio: Path, ollama: Path
) -> None:
    in_ollama(ollama, "registry.ollama.ai/org/n/Q8_0", {"model": b"x"})["model"].unlink()
    in_lm_studio(studio, "org/n/n-Q8_0-00001-of-00002.gguf")
    snapshot = in_hub_cache(cache, "org/n", {"n-Q8_0.gguf": b"x"})
    assert locate_model("org/n:Q8_0").path == snapshot / "n-Q8_0.gguf"


# --- Ollama -----------------------------------------------------------------------------------------


def test_a_model_of_ollama_is_found_by_its_name_and_tag(ollama: Path) -> None:
    files = in_ollama(ollama, f"{LIBRARY}/qwen3/latest", {"model": b"GGUF1", "template": b"{{ }}"})
    in_ollama(ollama, f"{LIBRARY}/qwen3/8b", {"model": b"GGUF2"})
    located = locate_model("qwen3")
    assert (located.path, located.name, located.place) == (files["model"], "qwen3:latest", "Ollama")
    assert locate_model("qwen3:latest") == located
    assert locate_model("qwen3:8b").path.read_bytes() == b"GGUF2"
    model = ollama_model(ModelName(repository=("qwen3",)))
    assert model is not None
    assert (model.size, model.beside) == (5, {"template": files["template"]})
    for absent in ("qwen3:1b", "qwen4"):
        with pytest.raises(ModelConfigError, match="Ollama's store"):
            locate_model(absent)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("registry.ollama.ai/somebody/tiny/q4", "somebody/tiny:q4"),
        ("hf.co/org/name-GGUF/Q4_K_M", "hf.co/org/name-GGUF:Q4_K_M"),
    ],
)
def test_other_namespaces_and_registries_of_ollama(ollama: Path, place: str, name: str) -> None:
    files = in_ollama(ollama, place, {"model": b"GGUF"})
    assert locate_model(name).path == files["model"]
    assert [model.name for model in ollama_models() if not isinstance(model, ModelConfigError)] == [name]


def test_the_folder_of_ollama_can_be_elsewhere(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_ollama(home / ".ollama" / "models", f"{LIBRARY}/near/latest", {"model": b"x"})
    files = in_ollama(tmp_path / "far", f"{LIBRARY}/far/latest", {"model": b"x"})
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "far"))
    assert locate_model("far").path == files["model"]
    with pytest.raises(ModelConfigError):
        locate_model("near")


def test_a_missing_blob_of_ollama_is_named(ollama: Path) -> None:
    files = in_ollama(ollama, f"{LIBRARY}/qwen3/8b", {"model": b"GGUF"})
    files["model"].unlink()
    with pytest.raises(ModelConfigError) as caught:
        locate_model("qwen3:8b")
    assert str(files["model"]) in caught.value.message
    assert "ollama pull qwen3:8b" in caught.value.remedy
    (error,) = ollama_models()
    assert isinstance(error, ModelConfigError)


def test_a_model_of_ollama_with_an_adapter_is_not_served_without_it(ollama: Path) -> None:
    in_ollama(ollama, f"{LIBRARY}/tuned/latest", {"model": b"GGUF", "adapter": b"GGUF of a few matrices"})
    with pytest.raises(ModelConfigError, match="tuned:latest of Ollama's store has an adapter") as caught:
        locate_model("tuned")
    assert "Merge the adapter" in caught.value.remedy
    (error,) = ollama_models()
    assert isinstance(error, ModelConfigError)


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"{",
        b"[]",
        b'{"layers": 1}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../x"}]}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.tensor", "digest": "sha256:%s"}]}'
        % (b"0" * 64),
        b"\xff" * 10,
    ],
)
def test_a_bad_manifest_of_ollama_is_an_error_of_that_model(ollama: Path, manifest: bytes) -> None:
    in_ollama(ollama, f"{LIBRARY}/good/latest", {"model": b"x"})
    bad = ollama / "manifests" / LIBRARY / "bad" / "latest"
    bad.parent.mkdir(parents=True)
    bad.write_bytes(manifest)
    with pytest.raises(ModelConfigError, match="bad:latest of Ollama's store"):
        locate_model("bad")
    assert locate_model("good")
    assert sum(isinstance(each, ModelConfigError) for each in ollama_models()) == 1


# --- LM Studio --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["pub/Repo-GGUF:q4_0", "pub/repo:Q4_0", "Repo-GGUF:Q4_0", "repo:r-Q4_0.gguf", "r-Q4_0.gguf", "r-q4_0"],
)
def test_a_model_of_lm_studio_has_several_names(studio: Path, name: str) -> None:
    in_lm_studio(
        studio, "pub/Repo-GGUF/r-Q4_0.gguf", "pub/Repo-GGUF/r-Q8_0.gguf", "pub/Repo-GGUF/mmproj-r.gguf"
    )
    located = locate_model(name)
    assert (located.path, located.place) == (studio / "pub/Repo-GGUF/r-Q4_0.gguf", "LM Studio")
    assert locate_model(located.name) == located
    with pytest.raises(ModelConfigError, match="repo matches 2 models"):
        locate_model("repo")


def test_a_name_that_two_programs_have_lists_both(studio: Path, ollama: Path, cache: Path) -> None:
    in_lm_studio(studio, "org/name/name-Q4_0.gguf")
    in_ollama(ollama, "registry.ollama.ai/org/name/latest", {"model": b"x"})
    in_hub_cache(cache, "org/name", {"name-Q8_0.gguf": b"x"})
    with pytest.raises(ModelConfigError) as caught:
        locate_model("org/name")
    for place in ("hub cache: ", "Ollama: ", "LM Studio: "):
        assert place in caught.value.message
    assert locate_model("org/name:Q4_0").place == "LM Studio"
    assert locate_model("org/name:Q8_0").place == "hub cache"


@pytest.mark.parametrize("how", ["old", "settings", "pointer"])
def test_the_folder_of_lm_studio_can_be_elsewhere(home: Path, how: str) -> None:
    folder = home / ".cache" / "lm-studio" / "models"
    if how == "settings":
        folder = home / "chosen"
        (home / ".lmstudio").mkdir()
        (home / ".lmstudio" / "settings.json").write_text(
            json.dumps({"downloadsFolder": str(folder), "x": 1})
        )
    if how == "pointer":
        folder = home / "moved" / "models"
        (home / ".lmstudio-home-pointer").write_text(f"{home / 'moved'}\n")
    in_lm_studio(folder, "pub/repo/r.gguf")
    assert locate_model("repo").path == folder / "pub/repo/r.gguf"


def test_a_folder_that_cannot_be_listed_hides_no_other(studio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_lm_studio(studio, "pub/closed/c.gguf", "pub/repo/r.gguf")
    names_in = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return names_in(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert locate_model("repo").path == studio / "pub/repo/r.gguf"
    assert list(listed()) == ["pub/repo:r.gguf"]


# --- the inventory ----------------------------------------------------------------------------------


def listed() -> dict[str, Entry]:
    return {entry.name: entry for entry in entries() if isinstance(entry, Entry)}


def test_every_model_of_the_machine_is_listed_once(cache: Path, ollama: Path, studio: Path) -> None:
    old, new = "a" * 40, "b" * 40
    in_hub_cache(cache, "org/plain", PLAIN, old, "v1")
    in_hub_cache(cache, "org/plain", PLAIN | {"config.json": b"{ }"}, new)
    in_hub_cache(cache, "org/many", {"m-Q4_0.gguf": b"12345", "m-Q8_0-00001-of-00002.gguf": b"1"})
    in_hub_cache(cache, "org/text", {"README.md": b"x"})
    (cache / "datasets--org--data" / "snapshots" / old).mkdir(parents=True)
    blobs = cache / "models--org--begun" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(b"123")
    in_ollama(ollama, f"{LIBRARY}/qwen3/8b", {"model": b"GGUF"})
    in_lm_studio(studio, "pub/repo/r.gguf")
    found = listed()
    plain_v1 = str(cache / "models--org--plain" / "snapshots" / old)
    assert {(entry.name, entry.kind, entry.revision, entry.place) for entry in found.values()} == {
        ("org/plain", "safetensors", "main", "hub cache"),
        (plain_v1, "safetensors", "v1", "hub cache"),
        ("org/many:Q4_0", "GGUF", "main", "hub cache"),
        ("org/many:Q8_0", "incomplete", "main", "hub cache"),
        ("org/text", "other", "main", "hub cache"),
        ("org/begun", "incomplete", "", "hub cache"),
        ("qwen3:8b", "GGUF", "", "Ollama"),
        ("pub/repo:r.gguf", "GGUF", "", "LM Studio"),
    }
    assert found["org/plain"].size == len(b"{ }weights")
    assert found["org/many:Q4_0"].size == 5
    assert found["org/begun"].size == 3
    assert found["org/plain"].commit == new
    for name in ("org/plain", "org/many:Q4_0", "qwen3:8b", "pub/repo:r.gguf"):
        assert locate_model(name).path == found[name].path


def test_a_file_that_goes_while_it_is_listed_hides_no_other(
    ollama: Path, studio: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_ollama(ollama, f"{LIBRARY}/gone/latest", {"model": b"GGUF"})
    in_ollama(ollama, f"{LIBRARY}/here/latest", {"model": b"GGUF of another"})
    in_lm_studio(studio, "pub/repo/gone.gguf", "pub/repo/here.gguf")
    models_of = {"ollama_models": inventory.ollama_models, "lm_studio_models": inventory.lm_studio_models}

    def going(name: str) -> Iterator[Any]:
        for index, model in enumerate(models_of[name]()):
            if index == 0:
                model.path.unlink()
            yield model

    for name in models_of:
        monkeypatch.setattr(inventory, name, partial(going, name))
    found = list(entries())
    assert [each.name for each in found if isinstance(each, Entry)] == ["here:latest", "pub/repo:here.gguf"]
    of_ollama, of_studio = (each.message for each in found if isinstance(each, ModelConfigError))
    assert of_ollama.startswith("gone:latest of Ollama's store cannot be read: ")
    assert of_studio.startswith(f"{studio / 'pub/repo/gone.gguf'} of LM Studio cannot be read: ")


def test_an_empty_machine_has_no_models(home: Path) -> None:
    assert home.is_dir()
    assert list(entries()) == []
