"""`penstock ls` and `penstock rm`: what is shown, what goes, and what is left alone."""

from __future__ import annotations

import errno
import json
import os
import shutil
from io import StringIO
from pathlib import Path

import pytest

import checkpoints
from fake_hub import own_model_folders
from gguf_files import write_gguf
from model_stores import COMMIT, in_hub_cache, in_lm_studio, in_ollama
from penstock.cli.models import listing
from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.errors import ModelError
from penstock.local_models.hub_cache import CachedRepository
from penstock.local_models.model_name import ModelName
from penstock.local_models.removal import plan_removal

QUANTISED = {"some-Q4_0.gguf": bytes(4000), "some-Q8_0.gguf": bytes(8000), "README.md": b"x"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own_model_folders(monkeypatch, tmp_path)
    return tmp_path / "cache"


def penstock(*words: str, answer: str = "") -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    invocation = Invocation(stdout=out, stderr=err, stdin=StringIO(answer), environ={})
    return run(words, invocation), out.getvalue(), err.getvalue()


def known_model(cache: Path, name: str, **changes: object) -> Path:
    """A checkpoint that would run, in the hub's cache."""
    made = checkpoints.make_checkpoint(cache.parent / "made", layers=1)
    config = json.loads((made / "config.json").read_text()) | changes
    (made / "config.json").write_text(json.dumps(config))
    snapshot = in_hub_cache(cache, name, {path.name: path.read_bytes() for path in made.iterdir()})
    shutil.rmtree(made)
    return snapshot


def rows(out: str) -> dict[str, list[str]]:
    head, *lines = out.splitlines()
    assert head.split() == ["name", "revision", "size", "kind", "last", "used", "runs"]
    return {line.split()[0]: line.split() for line in lines}


# --- ls ---------------------------------------------------------------------------------------------


def test_ls_shows_every_model_and_whether_it_would_run(cache: Path, tmp_path: Path) -> None:
    snapshot = known_model(cache, "org/known")
    known_model(cache, "org/foreign", architectures=["MambaForCausalLM"])
    in_hub_cache(cache, "org/quantised", QUANTISED)
    in_ollama(tmp_path / "ollama", "registry.ollama.ai/library/qwen3/8b", {"model": b"GGUF"})
    in_lm_studio(tmp_path / "home/.lmstudio/models", "pub/repo/r.gguf")
    for file in snapshot.iterdir():
        os.utime(file, (1_000_000_000, 1_000_000_000))
    code, out, err = penstock("ls")
    assert (code, err) == (0, "")
    shown = rows(out)
    assert list(shown) == [
        "org/foreign",
        "org/known",
        "org/quantised:Q4_0",
        "org/quantised:Q8_0",
        "qwen3:8b",
        "pub/repo:r.gguf",
    ]
    assert shown["org/known"][1:3] == ["main", COMMIT[:12]]
    assert shown["org/known"][-3:] == ["safetensors", "2001-09-09", "LlamaForCausalLM"]
    assert shown["org/foreign"][7:14] == [
        "no:",
        "config.json",
        "asks",
        "for",
        "architecture",
        "MambaForCausalLM",
    ]
    assert shown["org/quantised:Q8_0"][3:6] == ["8.0", "kB", "GGUF"]
    assert shown["qwen3:8b"][1:6] == ["-", "4", "B", "GGUF,", "Ollama"]
    assert shown["pub/repo:r.gguf"][4:7] == ["GGUF,", "LM", "Studio"]


def test_ls_as_json(cache: Path) -> None:
    snapshot = known_model(cache, "org/known")
    in_hub_cache(cache, "org/quantised", QUANTISED)
    code, out, _ = penstock("ls", "--json")
    known, *quantised = json.loads(out)
    assert code == 0
    assert known["size"] == sum(path.stat().st_size for path in snapshot.iterdir())
    assert known["last_used"].endswith("+00:00")
    assert {key: known[key] for key in ("name", "place", "revision", "commit", "kind", "path")} == {
        "name": "org/known",
        "place": "hub cache",
        "revision": "main",
        "commit": COMMIT,
        "kind": "safetensors",
        "path": str(snapshot),
    }
    assert (known["architecture"], known["runs"], known["reason"]) == ("LlamaForCausalLM", "yes", "")
    assert [(each["name"], each["kind"]) for each in quantised] == [
        ("org/quantised:Q4_0", "GGUF"),
        ("org/quantised:Q8_0", "GGUF"),
    ]


def test_ls_tells_that_shards_are_missing(cache: Path) -> None:
    snapshot = known_model(cache, "org/known")
    weights = snapshot / "model.safetensors"
    for number in (1, 3):
        shutil.copy(weights, snapshot / f"model-{number:05}-of-00003.safetensors")
    weights.unlink()
    (known,) = json.loads(penstock("ls", "--json")[1])
    assert (known["kind"], known["runs"]) == ("incomplete", "no")
    assert known["reason"] == "its download is not complete; pull it again"
    shutil.copy(snapshot / "model-00001-of-00003.safetensors", snapshot / "model-00002-of-00003.safetensors")
    (known,) = json.loads(penstock("ls", "--json")[1])
    assert (known["kind"], known["runs"]) == ("safetensors", "yes")


def test_ls_tells_a_gguf_file_by_its_header(cache: Path) -> None:
    snapshot = in_hub_cache(cache, "org/quantised", {"a-Q8_0.gguf": b"no GGUF", "b-Q8_0.gguf": b"x"})
    write_gguf(snapshot / "b-Q8_0.gguf", {"general.architecture": "qwen3"}, {})
    damaged, sound = json.loads(penstock("ls", "--json")[1])
    assert (damaged["architecture"], damaged["runs"]) == ("", "no")
    assert damaged["reason"].startswith("a-Q8_0.gguf: expected ")
    assert sound["architecture"] == "qwen3"


def test_a_model_with_pickled_weights_alone_does_not_run(cache: Path) -> None:
    (known_model(cache, "org/pickled") / "model.safetensors").rename(cache / "pytorch_model.bin")
    (pickled,) = json.loads(penstock("ls", "--json")[1])
    assert (pickled["kind"], pickled["architecture"], pickled["runs"]) == ("other", "LlamaForCausalLM", "no")
    assert pickled["reason"] == "it has no weights in safetensors or GGUF"


def test_a_model_that_memory_does_not_hold_is_said_to_be_too_large(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_model(cache, "org/known")
    monkeypatch.setattr(listing, "host_available_bytes", lambda: 10)
    (known,) = json.loads(penstock("ls", "--json")[1])
    assert (known["architecture"], known["runs"]) == ("LlamaForCausalLM", "too large")
    assert "memory are free here" in known["reason"]


def test_what_is_damaged_is_warned_of_and_does_not_hide_the_rest(cache: Path, tmp_path: Path) -> None:
    known_model(cache, "org/known")
    files = in_ollama(tmp_path / "ollama", "registry.ollama.ai/library/qwen3/8b", {"model": b"GGUF"})
    files["model"].unlink()
    code, out, err = penstock("ls")
    assert code == 0
    assert "org/known" in out
    assert err.startswith("warning: qwen3:8b of Ollama's store lacks its file")


def test_an_empty_machine_says_where_was_looked(cache: Path) -> None:
    code, out, _ = penstock("ls")
    assert (code, out) == (0, f"no models in {cache}, in Ollama's store or in LM Studio's folder\n")
    assert penstock("ls", "--json")[1] == "[]\n"


def test_a_name_of_a_file_cannot_steer_the_terminal(cache: Path) -> None:
    in_hub_cache(cache, "org/evil", {"a\x1b[31m.gguf": b"x", "b\x1b[31m.gguf": b"x"})
    assert "\x1b" not in penstock("ls")[1]


# --- rm ---------------------------------------------------------------------------------------------


def test_rm_asks_first_and_says_what_it_has_freed(cache: Path) -> None:
    in_hub_cache(cache, "org/some", QUANTISED)
    repository = cache / "models--org--some"
    (cache / ".locks" / "models--org--some").mkdir(parents=True)
    for answer in ("", "n\n", "perhaps\n"):
        code, out, _ = penstock("rm", "org/some", answer=answer)
        assert code == 1
        assert out.splitlines()[0] == f"org/some  12.0 kB  {repository}"
        assert out.endswith("Remove this? [y/N] nothing was removed\n")
    assert len(list(repository.rglob("*.gguf"))) == 2
    code, out, _ = penstock("rm", "org/some", answer="y\n")
    assert code == 0
    assert out.endswith("removed org/some, 12.0 kB\n")
    assert not repository.exists()
    assert not (cache / ".locks" / "models--org--some").exists()
    assert penstock("rm", "org/some", "--yes")[0] == 3


def test_rm_takes_what_an_interrupted_download_has_left(cache: Path) -> None:
    blobs = cache / "models--org--begun" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(bytes(3000))
    assert penstock("rm", "org/begun", "--yes")[:2] == (0, "removed org/begun, 3.0 kB\n")
    assert not blobs.parent.exists()


def test_rm_of_one_file_leaves_the_others_and_what_they_share(cache: Path) -> None:
    snapshot = in_hub_cache(cache, "org/some", QUANTISED)
    old = in_hub_cache(cache, "org/some", {"some-Q8_0.gguf": QUANTISED["some-Q8_0.gguf"]}, "a" * 40, "v1")
    in_hub_cache(cache, "org/some", {"copy.bin": QUANTISED["some-Q4_0.gguf"]}, "b" * 40, "v2")
    code, out, _ = penstock("rm", "org/some:q8_0", "--yes", "--json")
    assert (code, json.loads(out)) == (0, {"removed": ["org/some:q8_0"], "freed_bytes": 8000})
    assert sorted(path.name for path in snapshot.iterdir()) == ["README.md", "some-Q4_0.gguf"]
    assert not old.exists()
    assert penstock("rm", "org/some:Q4_0", "--yes")[:2] == (0, "removed org/some:Q4_0, 0 B\n")
    assert (cache / "models--org--some" / "snapshots" / ("b" * 40) / "copy.bin").read_bytes() == bytes(4000)


@pytest.mark.parametrize(
    ("words", "expected", "told"),
    [
        (["rm"], 2, "no model is given"),
        (["rm", "org/some", "--json"], 2, "--json cannot ask for confirmation"),
        (["rm", "../x", "--yes"], 2, "is not the name of a model on the hub"),
        (["rm", "org/absent", "--yes"], 3, "is not in the hub's cache"),
        (["rm", "org/some:Q5_0", "--yes"], 3, "has no file Q5_0"),
        (["rm", "org/some", "org/absent", "--yes"], 3, "org/absent is not in the hub's cache"),
        (["rm", "pub/repo", "--yes"], 3, "belongs to LM Studio"),
        (["rm", "user/tiny", "--yes"], 3, "belongs to Ollama"),
    ],
)
def test_rm_removes_nothing_that_was_not_named_exactly(
    cache: Path, tmp_path: Path, words: list[str], expected: int, told: str
) -> None:
    in_hub_cache(cache, "org/some", QUANTISED)
    in_lm_studio(tmp_path / "home/.lmstudio/models", "pub/repo/r.gguf")
    in_ollama(tmp_path / "ollama", "registry.ollama.ai/user/tiny/latest", {"model": b"GGUF"})
    code, out, err = penstock(*words)
    assert (code, out) == (expected, "")
    assert told in err
    assert len(list((cache / "models--org--some").rglob("*.gguf"))) == 2


def process(folder: Path, number: int, words: list[str], open_files: list[Path]) -> None:
    """What the kernel shows of a process."""
    (folder / str(number) / "fd").mkdir(parents=True)
    (folder / str(number) / "cmdline").write_bytes("\0".join([*words, ""]).encode())
    for descriptor, path in enumerate(open_files):
        (folder / str(number) / "fd" / str(descriptor)).symlink_to(path)


def test_a_model_that_is_in_use_is_not_removed(cache: Path, tmp_path: Path) -> None:
    snapshot = in_hub_cache(cache, "org/some", QUANTISED)
    in_hub_cache(cache, "org/other", {"config.json": b"{}"})
    processes = tmp_path / "proc"
    process(processes, 7, ["/usr/bin/python", "/usr/bin/penstock", "serve", "org/other", "--pp", "2"], [])
    process(processes, 8, ["reader", "serve"], [(snapshot / "some-Q8_0.gguf").resolve()])
    (processes / "9").mkdir()
    with pytest.raises(ModelError, match=r"org/other is in use: penstock serve \(process 7\)") as caught:
        plan_removal(ModelName.of_hub("org/other"), processes)
    assert caught.value.code == "model_in_use"
    for name in ("org/some", "org/some:Q8_0"):
        with pytest.raises(ModelError, match="process 8 has it open"):
            plan_removal(ModelName.of_hub(name), processes)
    assert plan_removal(ModelName.of_hub("org/some:Q4_0"), processes).freed_bytes == 4000


USED_BY = [
    ("org/some", ["org/some:Q8_0"]),
    ("org/some", ["demo", "--speculative-model=org/some:Q8_0"]),
    ("org/some:Q8_0", ["org/some:some-Q8_0.gguf"]),
    ("org/some:Q8_0", ["demo", "--speculative-model", "org/some:q8_0"]),
    ("org/some:Q8_0", ["org/some"]),
]


@pytest.mark.parametrize(("removed", "served"), USED_BY, ids=str)
def test_a_server_of_one_gguf_file_keeps_that_file(
    cache: Path, tmp_path: Path, removed: str, served: list[str]
) -> None:
    """Its ranks have read the file and closed it; a rank that is started again reads it again."""
    in_hub_cache(cache, "org/some", QUANTISED)
    process(tmp_path / "proc", 7, ["/usr/bin/penstock", "serve", *served], [])
    with pytest.raises(ModelError, match=rf"{removed} is in use: penstock serve \(process 7\)"):
        plan_removal(ModelName.of_hub(removed), tmp_path / "proc")


def test_a_server_of_another_file_or_repository_keeps_nothing(cache: Path, tmp_path: Path) -> None:
    in_hub_cache(cache, "org/some", QUANTISED)
    longer = cache / "models--org--some-2" / "snapshots" / COMMIT
    process(tmp_path / "proc", 7, ["/usr/bin/penstock", "serve", "org/some:Q4_0"], [])
    process(tmp_path / "proc", 8, ["/usr/bin/penstock", "serve", str(longer)], [])
    assert plan_removal(ModelName.of_hub("org/some:Q8_0"), tmp_path / "proc").freed_bytes == 8000


def test_a_file_that_this_very_process_has_open_is_in_use(cache: Path) -> None:
    snapshot = in_hub_cache(cache, "org/some", QUANTISED)
    with (snapshot / "some-Q4_0.gguf").open("rb") as file:
        assert file.read(1)
        code, _, err = penstock("rm", "org/some", "--yes")
    assert code == 3
    assert f"process {os.getpid()} has it open" in err
    assert penstock("rm", "org/some", "--yes")[0] == 0


def test_files_that_the_system_keeps_are_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known_model(cache, "org/some")

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    code, out, err = penstock("rm", "org/some", "--yes")
    assert (code, out) == (3, "")
    assert "org/some could not be removed: " in err
    assert "Permission denied" in err
    assert "bug" not in err


def test_a_model_that_goes_while_it_is_listed_does_not_hide_the_rest(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("org/gone", "org/some"):
        known_model(cache, name)

    def incomplete_files(repository: CachedRepository) -> list[Path]:
        return [cache / "absent"] if repository.name == "org/gone" else []

    monkeypatch.setattr(CachedRepository, "incomplete_files", incomplete_files)
    code, out, err = penstock("ls")
    assert code == 0
    assert "org/some" in out
    assert "warning: org/gone in the hub's cache cannot be read: " in err
    assert "No such file or directory" in err
