"""The files of the web page: small, nothing of another host, nothing that its policy would have to allow."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from penstock.server.http.access import PAGE_PATHS
from penstock.server.routes.page import PAGE_FILES, PAGE_POLICY

FOLDER = files("penstock") / "assets" / "page"
TEXTS = {each.name: (FOLDER / each.name).read_text(encoding="utf-8") for each in PAGE_FILES}
MAX_BYTES = 150_000


def test_all_files_of_the_folder_are_served_and_open() -> None:
    assert {each.name for each in PAGE_FILES} == {path.name for path in FOLDER.iterdir()}
    assert {each.path for each in PAGE_FILES} == PAGE_PATHS


def test_they_are_small() -> None:
    assert sum(len(text.encode()) for text in TEXTS.values()) < MAX_BYTES


ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://|[\"'(=\s]//[a-z0-9]|@import|\burl\(|\bimport\(")
LINK = re.compile(r"(?:href|src)=\"([^\"]*)\"")


@pytest.mark.parametrize("name", TEXTS)
def test_no_address_of_another_host_is_in_them(name: str) -> None:
    assert ADDRESS.findall(TEXTS[name]) == []
    links = [link for link in LINK.findall(TEXTS[name]) if link != "data:,"]
    assert [link for link in links if link.startswith("/") or ":" in link] == []


@pytest.mark.parametrize("text", ["'https://a.example'", '"//a.example"', "url(x)", "@import 'x'", "ws://a"])
def test_an_address_of_another_host_would_be_found(text: str) -> None:
    assert ADDRESS.search(f"x = {text};")


def test_the_policy_need_not_allow_more_than_it_does() -> None:
    page, script = TEXTS["index.html"], TEXTS["page.js"]
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son[a-z]+=|javascript:", page) == []
    unsafe = r"\beval\(|new Function|(?:inner|outer)HTML|insertAdjacentHTML|document\.write"
    assert re.findall(unsafe, script) == []
    assert 'setAttribute("style"' not in script
    assert "unsafe" not in PAGE_POLICY
    assert "frame-ancestors 'none'" in PAGE_POLICY
    assert "default-src 'none'" in PAGE_POLICY


def test_every_control_has_a_label() -> None:
    page = TEXTS["index.html"]
    labelled = set(re.findall(r"<label[^>]*\sfor=\"([^\"]+)\"", page))
    controls = re.findall(r"<(?:input|textarea|select)\b[^>]*\sid=\"([^\"]+)\"", page)
    assert len(controls) > 5
    assert set(controls) <= labelled


def test_the_script_asks_for_nothing_but_elements_of_the_page() -> None:
    ids = set(re.findall(r"\sid=\"([^\"]+)\"", TEXTS["index.html"]))
    assert set(re.findall(r"byId\(\"([^\"]+)\"\)", TEXTS["page.js"])) <= ids
