"""The web page in a real browser: chat, lanes, losses, reloads, the key, the keyboard, and what axe says."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from browser import Visit, started_browser
from paths import REPOSITORY
from served import Served, title_of, wait_until

pytestmark = pytest.mark.doors

SUPPORT = REPOSITORY / "tests" / "support"
KEY = "a key of the page's test"
PHONE = {"width": 390, "height": 844}
STEP_MS = 25  # of the slow stage


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def throttled() -> Iterator[Served]:
    """Two stages, of which the second takes 25 ms more for each step."""
    paths = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    slow = {"THROTTLED_LAYER": "3", "THROTTLED_MS": str(STEP_MS), "PYTHONPATH": os.pathsep.join(paths)}
    program = (str(REPOSITORY / "benchmarks" / "stand_in.py"), "throttled_rank")
    with Served("demo", "--pp", "2", "--threads-per-rank", "1", env=slow, program=program) as server:
        yield server


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with Served("demo", "--pp", "2", "--threads-per-rank", "1", "--api-key", KEY) as server:
        yield server


class Load:
    """Requests that run while a block does. Use as a context manager."""

    def __init__(self, server: Served, num_requests: int, key: str = "") -> None:
        self._server = server
        self._key = key
        self._is_over = Event()
        self._threads = [Thread(target=self._run, args=(index,)) for index in range(num_requests)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        while not self._is_over.is_set():
            ask(self._server, self._key, f"{index} " + "ROMEO: what light? " * (2 + 4 * index), 48, index)


def ask(server: Served, key: str, prompt: str, max_tokens: int, seed: int = 0) -> str:
    """The text of a completion."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "seed": seed}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def say(visit: Visit, text: str, max_tokens: int = 60) -> None:
    visit.page.fill("#limit", str(max_tokens))
    visit.page.fill("#temperature", "0")
    visit.page.fill("#prompt", text)
    visit.page.press("#prompt", "Enter")


ANSWER = "document.querySelector('.turn.assistant:last-of-type .text').textContent"
IS_DONE = "document.querySelector('#stop').hidden"


def answer(visit: Visit) -> str:
    text: str = visit.page.evaluate(f"() => {ANSWER}")
    return text


def whole_answer(server: Served, text: str, max_tokens: int) -> str:
    """What the chat is to say."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
    said: str = server.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    return said


def test_chat_streams_with_its_speed_and_lanes_move(browser: Any, throttled: Served) -> None:
    with Visit(browser, throttled.url) as visit:
        visit.await_text("#health", "ready")
        assert visit.page.inner_text("#model") == "demo"
        say(visit, "Tell me of the king")
        visit.await_true(f"{ANSWER}.length > 5 && !({IS_DONE})")
        begin = answer(visit)
        visit.await_true(IS_DONE)
        assert answer(visit).startswith(begin)
        assert answer(visit) == whole_answer(throttled, "Tell me of the king", 60)
        assert "tokens/s" in visit.page.inner_text(".turn.assistant .stats")
        visit.await_true("document.querySelectorAll('.lane').length === 2")
        drawn = "Array.from(document.querySelectorAll('.lane canvas'), one => one.toDataURL()).join()"
        before = visit.page.evaluate(f"() => {drawn}")
        with Load(throttled, 2):
            visit.page.wait_for_function(f"before => {drawn} !== before", arg=before)
            visit.await_true("!document.querySelector('#rate').textContent.startsWith('0.0')")
            visit.await_true("document.querySelector('#tpot').textContent.includes('ms')")
        assert visit.complaints == []


def test_stop_ends_the_answer_on_the_server_too(browser: Any, throttled: Served) -> None:
    with Visit(browser, throttled.url) as visit:
        visit.page.fill("#limit", "2000")
        visit.page.fill("#prompt", "Speak for long")
        with visit.page.expect_request("**/v1/chat/completions"):
            visit.page.click("#send")
        visit.await_true(f"{ANSWER}.length > 0")
        visit.page.click("#stop")
        visit.await_text(".turn.assistant .stats", "stopped")
        wait_until(lambda: throttled.metric("penstock_num_requests_running") == 0, 20)
        assert visit.complaints == []


def test_an_answer_goes_on_after_a_reload(browser: Any, throttled: Served) -> None:
    with Visit(browser, throttled.url) as visit:
        say(visit, "Who is the queen of this land?", 120)
        visit.await_true(f"{ANSWER}.length > 10 && !({IS_DONE})")
        visit.page.reload()
        visit.await_true(f"{ANSWER}.length > 10")
        begin = answer(visit)
        visit.await_true(IS_DONE)
        whole = whole_answer(throttled, "Who is the queen of this land?", 120)
        assert answer(visit) == whole
        assert len(begin) < len(whole), "the answer was complete before the reload: it has shown nothing"
        assert visit.page.locator(".turn .error:visible").count() == 0
        assert visit.complaints == []


def test_errors_are_shown_plainly(browser: Any, throttled: Served) -> None:
    with Visit(browser, throttled.url) as visit:
        visit.page.fill("#temperature", "9")
        visit.page.fill("#prompt", "hello")
        visit.page.evaluate("document.querySelector('#ask').noValidate = true")
        visit.page.click("#send")
        visit.await_text(".turn.assistant .error", "temperature")
        assert not visit.page.is_disabled("#send")


def test_one_sees_why_a_pipe_with_a_slow_stage_is_slow(browser: Any, throttled: Served) -> None:
    with Load(throttled, 6), Visit(browser, throttled.url) as visit:
        say(visit, "Tell me of the king and his daughter", 100)
        visit.await_text("#why", "Stage 1 is the slowest")
        visit.await_text("#why", "stage 0 waits for it")
        visit.await_text("#why", "throttled")
        visit.page.wait_for_timeout(9000)  # until the lanes have all that is shown
        visit.picture("page-throttled")
        visit.page.hover(".lane:first-child canvas, .lane canvas")
        visit.await_true("!document.querySelector('#tip').hidden")
        with Visit(browser, throttled.url, color_scheme="dark") as dark:
            say(dark, "Who speaks?", 100)
            dark.page.wait_for_timeout(8000)
            dark.picture("page-dark")
        assert visit.complaints == []


def test_lanes_are_read_by_keyboard(browser: Any, throttled: Served) -> None:
    with Load(throttled, 1), Visit(browser, throttled.url) as visit:
        visit.await_true("document.querySelectorAll('.lane').length === 2")
        visit.page.wait_for_timeout(4000)
        lane = visit.page.locator(".lane canvas").nth(1)
        lane.focus()
        told = set()
        for _ in range(12):
            visit.page.keyboard.press("ArrowLeft")
            told.add(lane.get_attribute("aria-valuetext"))
        assert len(told) > 4, told
        assert any("computes step" in text for text in told), told
        assert any("Bubble of" in text for text in told), told
        assert visit.page.get_attribute("#pause", "aria-pressed") == "true"
        visit.page.keyboard.press("Escape")
        assert visit.page.get_attribute("#pause", "aria-pressed") == "false"
        visit.page.focus("body")
        reached, focused = set(), "() => document.activeElement.id || document.activeElement.tagName"
        for _ in range(24):
            visit.page.keyboard.press("Tab")
            reached.add(visit.page.evaluate(focused))
        assert {"trace", "key-open", "prompt", "send", "window", "pause", "CANVAS", "log"} <= reached
        assert visit.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [{"width": 1440, "height": 900}, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing_serious(
    browser: Any, throttled: Served, scheme: str, size: dict[str, int]
) -> None:
    with Load(throttled, 1), Visit(browser, throttled.url, color_scheme=scheme, viewport=size) as visit:
        say(visit, "hello", 12)
        visit.await_true(f"{IS_DONE} && document.querySelectorAll('.lane').length === 2")
        visit.page.wait_for_timeout(3000)
        assert serious(visit) == []
        visit.page.click("#key-open")
        assert serious(visit) == []
        visit.page.keyboard.press("Escape")
        wide = visit.page.evaluate("() => document.scrollingElement.scrollWidth - innerWidth")
        assert wide <= 0, "the page is wider than the screen"
        if size is PHONE and scheme == "light":
            visit.page.wait_for_timeout(3000)
            visit.picture("page-phone", whole=True)


def serious(visit: Visit) -> list[str]:
    """What axe finds on the page that is more than a matter of taste."""
    spec = find_spec("axe_playwright_python")
    assert spec is not None
    assert spec.origin is not None
    visit.page.evaluate((Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = visit.page.evaluate("() => axe.run()")
    return [
        f"{violation['id']}: {node['html'][:120]}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def test_the_trace_is_saved_as_a_file(browser: Any, throttled: Served) -> None:
    with Visit(browser, throttled.url) as visit:
        visit.await_text("#health", "ready")
        with visit.page.expect_download() as download:
            visit.page.click("#trace")
        trace = json.loads(download.value.path().read_text(encoding="utf-8"))
        assert {event["ph"] for event in trace["traceEvents"]} >= {"M", "X"}


def give_key(visit: Visit, key: str) -> None:
    visit.page.fill("#key", key)
    visit.page.press("#key", "Enter")


def test_the_key_is_asked_for_once(browser: Any, keyed: Served) -> None:
    with Visit(browser, keyed.url) as visit:
        visit.await_true("document.querySelector('#key-dialog').open")
        give_key(visit, "another key")
        visit.await_text("#key-why", "does not take this key")
        give_key(visit, KEY)
        visit.await_text("#health", "ready")
        visit.page.reload()
        visit.await_text("#health", "ready")
        assert not visit.page.evaluate("() => document.querySelector('#key-dialog').open")
        assert visit.page.evaluate("() => localStorage.length") == 0, "nobody has said that it is to stay"
        assert KEY not in visit.page.content()


def test_who_gives_no_key_is_not_asked_again_until_he_wants_something(browser: Any, keyed: Served) -> None:
    with Visit(browser, keyed.url) as visit:
        is_open = "document.querySelector('#key-dialog').open"
        visit.await_true(is_open)
        visit.page.keyboard.press("Escape")
        visit.page.wait_for_timeout(2500)  # the feed has tried again meanwhile
        assert not visit.page.evaluate(f"() => {is_open}")
        say(visit, "hello", 8)
        visit.await_true(is_open)
        give_key(visit, KEY)
        visit.await_true(f"{ANSWER}.length > 3 && {IS_DONE}")


def test_without_javascript_there_is_a_table(browser: Any, keyed: Served) -> None:
    password = {"username": "anybody", "password": KEY}
    with Visit(browser, keyed.url, java_script_enabled=False, http_credentials=password) as visit:
        assert "without it" in visit.page.inner_text(".note").lower()
        visit.page.click(".note a")
        rows = visit.page.locator("table").nth(1).locator("tr")
        assert rows.count() == 3
        assert rows.nth(2).locator("td").first.inner_text() == "1"
        assert visit.complaints == []


def test_no_other_page_may_show_it(browser: Any, keyed: Served, tmp_path: Path) -> None:
    frame = tmp_path / "frame.html"
    frame.write_text(f'<iframe src="{keyed.url}/"></iframe>', encoding="utf-8")
    with Visit(browser, keyed.url) as visit:
        visit.page.goto(frame.as_uri())
        visit.page.wait_for_timeout(500)
        assert all("Penstock" not in frame.content() for frame in visit.page.frames[1:])


def test_a_killed_stage_turns_red_and_comes_back(browser: Any, keyed: Served) -> None:
    with Visit(browser, keyed.url) as visit:
        give_key(visit, KEY)
        visit.await_text("#health", "ready")
        visit.await_true("document.querySelectorAll('.lane[data-state=ready]').length === 2")
        epoch = int(visit.page.inner_text("#epoch"))
        with Load(keyed, 2, KEY):
            next(child for child in keyed.family() if "stage 1" in title_of(child)).kill()
            visit.await_true("document.querySelector('.lane[data-state=lost]') !== null")
            assert visit.page.inner_text(".lane[data-state=lost] .title").startswith("Stage 1")
            assert visit.page.get_attribute("#health", "data-state") == "lost"
            visit.picture("page-lost")
            visit.await_true("document.querySelectorAll('.lane[data-state=ready]').length === 2")
            visit.await_text("#events", "Stage 1 was lost and started again")
            visit.await_text("#events", "Ready again after")
            visit.await_text("#epoch", str(epoch + 1))
        say(visit, "Are you back?", 12)
        visit.await_true(f"{ANSWER}.length > 3 && {IS_DONE}")
        assert [text for text in visit.complaints if "401" not in text] == []
