"""Pulling from a hub on this machine: what is taken, what is checked, and what an interruption leaves."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from fake_hub import FakeHub, blob_of, fake_hub, own_model_folders
from penstock.errors import (
    DiskSpaceError,
    HubAccessError,
    HubContentError,
    HubError,
    HubMissingError,
    HubUnreachableError,
    UsageError,
)
from penstock.hub.client import HubAddress, HubClient
from penstock.hub.pulling import FreeBytes, Pulled, Puller, free_bytes_at
from penstock.hub.repository import HubFile
from penstock.hub.transfer import MAX_FRUITLESS, PAUSE_S
from penstock.local_models.hub_cache import CachedRepository
from penstock.local_models.locating import locate_model
from penstock.local_models.model_name import ModelName
from penstock.tokenizer.sources.model_files import vocabulary_file

NAME = "org/some-model"
WEIGHTS = bytes(range(256)) * 1000
SHARDS = {f"model-0000{n}-of-00002.safetensors": WEIGHTS + bytes([n]) for n in (1, 2)}
INDEX = {"metadata": {}, "weight_map": dict(zip("abc", [*SHARDS, *SHARDS], strict=False))}
TEXTS = {"config.json": b"{}", "tokenizer.json": b'{"x": 1}', "chat_template.jinja": b"{{ x }}"}
PLAIN = {**TEXTS, "model.safetensors": WEIGHTS}
SHARDED = {**TEXTS, **SHARDS, "model.safetensors.index.json": json.dumps(INDEX).encode()}
UNUSABLE = {
    "README.md": b"text",
    "modeling_own.py": b"import os",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same again",
    "onnx/model.onnx": b"the same again",
    "original/consolidated.00.pth": b"the same again",
    "tf_model.h5": b"the same again",
}
QUANTISED = {f"some-{label}.gguf": label.encode() * 99 for label in ("Q4_K_M", "Q8_0")}
SPLIT = {f"BF16/some-BF16-0000{n}-of-00002.gguf": bytes([n]) * 50 for n in (1, 2)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    own_model_folders(monkeypatch, tmp_path)
    with fake_hub() as hub:
        yield hub


@dataclass
class Told:
    """Keeps what a progress is told, and may interrupt."""

    files: list[tuple[str, int]] = field(default_factory=list)
    num_bytes: int = 0
    interrupts_in: str = ""

    def begin(self, file: HubFile, num_bytes: int) -> None:
        self.files.append((file.path, num_bytes))
        self.num_bytes += num_bytes

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.interrupts_in and self.files[-1][0] == self.interrupts_in:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


def pull(
    hub: FakeHub,
    name: str = NAME,
    revision: str = "main",
    *,
    told: Told | None = None,
    token: str | None = None,
    free_bytes: FreeBytes = free_bytes_at,
    pauses: list[float] | None = None,
    timeout_s: float = 20.0,
) -> Pulled:
    with HubClient(HubAddress(endpoint=hub.url, token=token, timeout_s=timeout_s)) as client:
        pause = (pauses if pauses is not None else []).append
        puller = Puller(client, told or Told(), free_bytes=free_bytes, pause=pause)
        return puller.pull(ModelName.of_hub(name), revision)


def files_in(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def blobs() -> list[str]:
    return sorted(path.name for path in CachedRepository.of(ModelName.of_hub(NAME)).blobs.glob("*"))


# --- what is taken ----------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [PLAIN, SHARDED], ids=["plain", "sharded"])
def test_safetensors_and_what_describes_them_are_taken_and_nothing_else(
    hub: FakeHub, files: dict[str, bytes]
) -> None:
    commit = hub.add(NAME, files | UNUSABLE)
    pulled = pull(hub)
    assert files_in(pulled.path) == files
    assert pulled.commit == pulled.path.name == commit
    assert pulled.size == pulled.downloaded == sum(map(len, files.values()))
    assert pulled.to_serve == NAME
    assert locate_model(NAME).path == pulled.path


@pytest.mark.parametrize("file", ["tokenizer.model", "tiktoken.model", "qwen.tiktoken", "tekken.json"])
def test_every_kind_of_vocabulary_is_taken(hub: FakeHub, file: str) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"weights", file: b"words"}
    hub.add(NAME, files)
    pulled = pull(hub)
    assert files_in(pulled.path) == files
    assert vocabulary_file(pulled.path) == pulled.path / file


def test_the_second_pull_asks_for_nothing_but_the_list(hub: FakeHub) -> None:
    hub.add(NAME, SHARDED)
    first = pull(hub)
    hub.asked.clear()
    again = pull(hub)
    assert (again.path, again.downloaded) == (first.path, 0)
    assert [asked.path for asked in hub.asked] == [f"/api/models/{NAME}/revision/main"]


def test_a_new_commit_brings_only_what_has_changed(hub: FakeHub) -> None:
    hub.add(NAME, PLAIN)
    old = pull(hub)
    hub.add(NAME, PLAIN | {"config.json": b'{"new": 1}'})
    hub.asked.clear()
    new = pull(hub)
    assert [path for path, _ in hub.contents_asked()] == ["config.json"]
    assert (old.path / "config.json").read_bytes() == b"{}"
    assert locate_model(NAME).path == new.path != old.path


def test_another_revision_leaves_main_alone(hub: FakeHub) -> None:
    main, other = hub.add(NAME, PLAIN), hub.add(NAME, PLAIN | {"config.json": b"[1]"}, "refs/pr/1")
    pull(hub)
    pulled = pull(hub, revision="refs/pr/1")
    assert pulled.commit == other
    assert pulled.to_serve == str(pulled.path)
    cache = CachedRepository.of(ModelName.of_hub(NAME))
    assert (cache.commit_of("main"), cache.commit_of("refs/pr/1")) == (main, other)
    by_commit = pull(hub, revision=other)
    assert by_commit.path == pulled.path
    assert cache.revisions_of(other) == ["refs/pr/1"]


@pytest.mark.parametrize(
    ("file", "taken"),
    [
        ("Q8_0", ["some-Q8_0.gguf"]),
        ("q4_k_m", ["some-Q4_K_M.gguf"]),
        ("some-Q4_K_M.gguf", ["some-Q4_K_M.gguf"]),
        ("BF16", list(SPLIT)),
        ("BF16/some-BF16-00002-of-00002.gguf", list(SPLIT)),
    ],
)
def test_a_gguf_file_is_named_by_itself_or_its_quantisation(
    hub: FakeHub, file: str, taken: list[str]
) -> None:
    hub.add(NAME, PLAIN | QUANTISED | SPLIT | {"mmproj-Q8_0.gguf": b"pictures"})
    pulled = pull(hub, f"{NAME}:{file}")
    assert [path for path, _ in hub.contents_asked()] == taken
    snapshot = CachedRepository.of(ModelName.of_hub(NAME)).snapshot(pulled.commit)
    assert sorted(files_in(snapshot)) == sorted(taken)
    assert pulled.path == snapshot / taken[0]
    assert locate_model(f"{NAME}:{file}").path == pulled.path
    assert locate_model(NAME).path == pulled.path


def test_a_repository_of_gguf_files_lists_them_and_says_what_to_type(hub: FakeHub) -> None:
    hub.add(NAME, QUANTISED | SPLIT | {"config.json": b"{}"})
    with pytest.raises(HubMissingError) as caught:
        pull(hub)
    for label in ("Q4_K_M", "Q8_0", "BF16"):
        assert f"{NAME}:{label} (0.0 GB)" in caught.value.message
    assert caught.value.remedy == f"Choose one: `penstock pull {NAME}:BF16`."
    assert hub.contents_asked() == []


@pytest.mark.parametrize(
    ("files", "file", "told"),
    [
        (QUANTISED, "Q5_K_M", f"none is Q5_K_M: {NAME}:Q4_K_M"),
        (QUANTISED | {"other-Q8_0.gguf": b"x"}, "Q8_0", f"2 fit Q8_0: {NAME}:other-Q8_0.gguf"),
        (PLAIN, "Q8_0", "has no GGUF files, and so has no Q8_0"),
        ({"some-Q8_0-00002-of-00002.gguf": b"x"}, "Q8_0", "lacks 1 of the 2 parts of some-Q8_0"),
        (
            {"pytorch_model.bin": b"x", "config.json": b"{}"},
            "",
            "can run code; only safetensors are supported",
        ),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, "", "is an adapter"),
        ({"README.md": b"x"}, "", "has neither model.safetensors nor"),
        ({"model.safetensors": b"x"}, "", "has weights but no config.json"),
        (
            SHARDED.keys() - set(SHARDS),
            "",
            "lacks 2 of the files that its model.safetensors.index.json names",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_any_weights_come(
    hub: FakeHub, files: dict[str, bytes] | set[str], file: str, told: str
) -> None:
    hub.add(NAME, files if isinstance(files, dict) else {path: SHARDED[path] for path in files})
    with pytest.raises(HubMissingError, match=told) as caught:
        pull(hub, f"{NAME}:{file}" if file else NAME)
    assert caught.value.remedy
    assert caught.value.exit_code == 3
    assert {path for path, _ in hub.contents_asked()} <= {"model.safetensors.index.json"}


# --- interruptions ------------------------------------------------------------------------------------


def test_an_interrupted_pull_goes_on_where_it_stopped(hub: FakeHub) -> None:
    hub.add(NAME, PLAIN)
    hub.cuts = [None, None, None, 100_000]
    with pytest.raises(KeyboardInterrupt):
        pull(hub, told=Told(interrupts_in="model.safetensors"))
    cache = CachedRepository.of(ModelName.of_hub(NAME))
    assert cache.main_snapshot() is None
    (partial,) = cache.incomplete_files()
    assert partial.name == hashlib.sha256(WEIGHTS).hexdigest() + ".incomplete"
    come = partial.stat().st_size
    assert 0 < come < len(WEIGHTS)

    hub.asked.clear()
    told = Told()
    pulled = pull(hub, told=told)
    assert hub.contents_asked() == [("model.safetensors", f"bytes={come}-")]
    assert told.files == [("model.safetensors", come)]
    assert told.num_bytes == len(WEIGHTS)
    assert pulled.downloaded == len(WEIGHTS) - come
    assert files_in(pulled.path) == PLAIN
    assert cache.incomplete_files() == []


def test_a_connection_that_is_cut_is_taken_up_in_the_same_pull(hub: FakeHub) -> None:
    hub.add(NAME, PLAIN)
    hub.cuts = [None, None, None, 1000, 2000]
    pauses: list[float] = []
    pulled = pull(hub, pauses=pauses)
    asked = [range_ for path, range_ in hub.contents_asked() if path == "model.safetensors"]
    assert asked == ["", "bytes=1000-", "bytes=3000-"]
    assert pauses == [PAUSE_S] * 2
    assert files_in(pulled.path) == PLAIN


def test_a_server_without_ranges_begins_again(hub: FakeHub) -> None:
    hub.add(NAME, PLAIN)
    hub.cuts, hub.knows_ranges = [None, None, None, 1000], False
    told = Told()
    assert files_in(pull(hub, told=told).path) == PLAIN
    assert told.num_bytes == sum(map(len, PLAIN.values()))


def test_attempts_that_bring_nothing_come_to_an_end(hub: FakeHub) -> None:
    hub.add(NAME, PLAIN)
    hub.cuts = [None, None, None, 1000, *[0] * MAX_FRUITLESS]
    with pytest.raises(HubUnreachableError, match=f"could not be downloaded in {MAX_FRUITLESS} attempts"):
        pull(hub)
    (partial,) = CachedRepository.of(ModelName.of_hub(NAME)).incomplete_files()
    assert partial.stat().st_size == 1000
    assert files_in(pull(hub).path) == PLAIN


# --- what is checked ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("change", [lambda text: bytes([text[0] ^ 1]) + text[1:], lambda text: text + b"x"])
def test_a_file_that_is_not_what_was_announced_is_refused_and_removed(
    hub: FakeHub, path: str, change: object
) -> None:
    hub.add(NAME, PLAIN)
    assert callable(change)
    hub.sends_other = {path: change(PLAIN[path])}
    with pytest.raises(HubContentError, match=f"{path}: expected .*; the download was removed"):
        pull(hub)
    assert not any(blob_of(path, PLAIN[path]) in name for name in blobs())
    assert CachedRepository.of(ModelName.of_hub(NAME)).main_snapshot() is None
    hub.sends_other = {}
    assert files_in(pull(hub).path) == PLAIN


def test_leftovers_of_other_bytes_are_found_out_by_the_hash(hub: FakeHub) -> None:
    hub.add(NAME, PLAIN)
    cache = CachedRepository.of(ModelName.of_hub(NAME))
    cache.blobs.mkdir(parents=True)
    partial = cache.blobs / f"{blob_of('model.safetensors', WEIGHTS)}.incomplete"
    partial.write_bytes(b"something else")
    with pytest.raises(HubContentError):
        pull(hub)
    assert not partial.exists()
    partial.write_bytes(bytes(len(WEIGHTS) + 1))
    assert files_in(pull(hub).path) == PLAIN


def test_too_little_room_is_said_before_the_weights_come(hub: FakeHub) -> None:
    hub.add(NAME, PLAIN)
    needed = sum(map(len, PLAIN.values()))
    with pytest.raises(DiskSpaceError, match=r"needs 0\.00 GB more") as caught:
        pull(hub, free_bytes=lambda _: needed - 1)
    assert caught.value.exit_code == 4
    assert hub.contents_asked() == []
    pull(hub, free_bytes=lambda _: needed)


def test_room_is_needed_for_what_is_not_here_alone(hub: FakeHub) -> None:
    hub.add(NAME, PLAIN)
    hub.cuts = [None, None, None, 200_000]
    with pytest.raises(KeyboardInterrupt):
        pull(hub, told=Told(interrupts_in="model.safetensors"))
    (partial,) = CachedRepository.of(ModelName.of_hub(NAME)).incomplete_files()
    rest = len(WEIGHTS) - partial.stat().st_size
    assert pull(hub, free_bytes=lambda _: rest).downloaded == rest


def test_a_file_that_another_program_downloads_is_left_to_it(hub: FakeHub) -> None:
    hub.add(NAME, PLAIN)
    lock = CachedRepository.of(ModelName.of_hub(NAME)).lock_directory
    lock.mkdir(parents=True)
    with (lock / f"{blob_of('config.json', b'{}')}.lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(HubError, match=r"another program is downloading config.json") as caught:
            pull(hub)
        assert caught.value.code == "hub_busy"
    pull(hub)


@pytest.mark.parametrize("path", ["../../../evil", "/etc/evil", "a//b", "a\\b", "a\nb"])
def test_a_path_that_leads_elsewhere_is_refused(hub: FakeHub, path: str) -> None:
    hub.add(NAME, PLAIN | {path: b"x"})
    with pytest.raises(HubContentError, match="is not the path of a file"):
        pull(hub)
    assert hub.contents_asked() == []


@pytest.mark.parametrize("revision", ["..", "a/../b", "", "a\nb", "ä", "a//b"])
def test_a_revision_that_leads_elsewhere_is_not_asked_for(hub: FakeHub, revision: str) -> None:
    with pytest.raises(UsageError, match="--revision"):
        pull(hub, revision=revision)
    assert hub.asked == []


# --- what the hub answers -----------------------------------------------------------------------------


def test_no_such_model_and_no_such_revision(hub: FakeHub) -> None:
    with pytest.raises(HubMissingError, match=f"has no model {NAME} for this account") as caught:
        pull(hub)
    assert "HF_TOKEN" in caught.value.remedy
    hub.add(NAME, PLAIN)
    with pytest.raises(HubMissingError, match="no branch, tag or commit v9"):
        pull(hub, revision="v9")


def test_a_gated_model_needs_the_right_token_which_is_shown_nowhere(hub: FakeHub) -> None:
    hub.add(NAME, PLAIN)
    hub.needs_token[NAME] = "hf_right"
    for token in (None, "hf_wrong"):
        with pytest.raises(HubAccessError, match=f"{NAME} is gated") as caught:
            pull(hub, token=token)
        assert f"Accept them at {hub.url}/{NAME}" in caught.value.remedy
        assert "hf_wrong" not in str(caught.value)
    assert files_in(pull(hub, token="hf_right").path) == PLAIN


def test_the_kept_token_goes_to_the_hub_it_is_for_alone(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, PLAIN)
    monkeypatch.setenv("HF_TOKEN", "hf_kept")
    pull(hub)
    assert not any("authorization" in asked.headers for asked in hub.asked)
    hub.asked.clear()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    pull(hub)
    assert {asked.headers.get("authorization") for asked in hub.asked} == {"Bearer hf_kept"}


def test_a_token_does_not_follow_to_the_store_of_large_files(hub: FakeHub) -> None:
    hub.add(NAME, PLAIN)
    hub.needs_token[NAME] = "hf_right"
    with fake_hub() as store:
        store.models, hub.store = hub.models, store.url
        hub.cuts = [None, None, None]
        store.cuts = [1000]
        assert files_in(pull(hub, token="hf_right").path) == PLAIN
        assert [asked.headers.get("range") for asked in store.asked] == [None, "bytes=1000-"]
        assert not any("authorization" in asked.headers for asked in store.asked)


@pytest.mark.parametrize(
    ("status", "code", "kind", "told"),
    [
        (401, "", HubAccessError, "refuses"),
        (403, "", HubAccessError, "refuses org/some-model, file model.safetensors to this account"),
        (404, "EntryNotFound", HubMissingError, "does not have model.safetensors"),
        (416, "", HubContentError, "fewer bytes of model.safetensors"),
        (429, "", HubUnreachableError, "at present"),
        (500, "", HubUnreachableError, "at present"),
        (503, "", HubUnreachableError, "at present"),
        (418, "", HubError, "answered 418"),
    ],
)
def test_refusals_become_errors_with_a_remedy(
    hub: FakeHub, status: int, code: str, kind: type[HubError], told: str
) -> None:
    hub.add(NAME, PLAIN)
    hub.refusals["resolve/"] = (200, "")
    hub.refusals = {"model.safetensors": (status, code)}
    with pytest.raises(kind, match=told) as caught:
        pull(hub)
    assert type(caught.value) is kind
    assert caught.value.remedy


def test_nobody_there_and_no_answer_in_time(hub: FakeHub) -> None:
    with fake_hub() as gone:
        address = gone.url
    with (
        pytest.raises(HubUnreachableError, match="cannot be reached"),
        HubClient(HubAddress(endpoint=address)) as c,
    ):
        c.repository(NAME, "main")
    hub.add(NAME, PLAIN)
    hub.stalled = threading.Event()
    with pytest.raises(HubUnreachableError, match="it did not answer in time"):
        pull(hub, timeout_s=0.02)


def test_offline_mode_is_obeyed_and_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, PLAIN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachableError, match="HF_HUB_OFFLINE forbids"):
        pull(hub)
    assert hub.asked == []


@pytest.mark.parametrize("endpoint", ["", "hub", "ftp://hub", "http://", "https://hub?x=1"])
def test_an_endpoint_is_an_address(endpoint: str) -> None:
    with pytest.raises(UsageError, match="--endpoint"):
        HubAddress(endpoint=endpoint)


def test_a_token_goes_over_plain_http_to_this_machine_only() -> None:
    HubAddress(endpoint="http://127.0.0.1:1", token="x")
    with pytest.raises(UsageError, match="plain HTTP") as caught:
        HubAddress(endpoint="http://mirror.example", token="hf_secret")
    assert "hf_secret" not in str(caught.value)


# --- the same cache for huggingface_hub ----------------------------------------------------------------


def test_huggingface_hub_finds_what_was_pulled(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(NAME, PLAIN)
    pulled = pull(hub)
    hub.asked.clear()
    path = huggingface_hub.snapshot_download(NAME, cache_dir=tmp_path / "cache", local_files_only=True)
    assert Path(path) == pulled.path
    scanned = huggingface_hub.scan_cache_dir(tmp_path / "cache")
    assert not scanned.warnings
    assert [(repo.repo_id, repo.size_on_disk) for repo in scanned.repos] == [(NAME, pulled.size)]
    assert hub.asked == []


def test_what_huggingface_hub_has_downloaded_is_not_downloaded_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(NAME, PLAIN)
    try:
        for path in PLAIN:
            huggingface_hub.hf_hub_download(NAME, path, endpoint=hub.url, cache_dir=tmp_path / "cache")
    finally:
        huggingface_hub.close_session()
    assert pull(hub).downloaded == 0


@pytest.mark.parametrize("url", ["http://[::1", "http://hub.example:99999", "http://hub.example:x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a hub"):
        HubAddress(endpoint=url)


def test_a_cache_that_cannot_be_written_is_named(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, PLAIN)
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(in_the_way))
    with pytest.raises(DiskSpaceError, match=f"{in_the_way}.* cannot be read or written: ") as refused:
        pull(hub)
    assert "HF_HUB_CACHE" in refused.value.remedy


@pytest.mark.parametrize("step", ["replace", "symlink"])
@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "Free space, or set HF_HUB_CACHE"), (errno.EACCES, "Make the folder")],
)
def test_a_full_disk_has_another_remedy_than_a_folder_that_is_not_the_user_s(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, step: str, number: int, remedy: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    hub.add(NAME, PLAIN)
    monkeypatch.setattr(os, step, refuse)
    with pytest.raises(DiskSpaceError, match="cannot be read or written: ") as refused:
        pull(hub)
    assert refused.value.remedy.startswith(remedy)
