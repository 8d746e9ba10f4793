"""`/` and the table without JavaScript: who may have them, and what browsers may do with them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator

import msgspec
import pytest

from fake_engine import FakeEngine, Status, fake_model, stats
from live_server import LiveServer
from penstock.batch import StageTimes
from penstock.config.server import ServerConfig
from penstock.process.config import StageShape
from penstock.scheduler.stats import SchedulerStats, SpeculationStats
from penstock.server.routes.page import PAGE_FILES
from penstock.trace.phases import Phase

KEY = "key-1"
TABLE = "/debug/pipeline/table"
HOST = "desk <b>"
TIMES = StageTimes(
    stage=0,
    num_steps=7,
    wall_ns=4_000_000_000,
    busy_ns=1_000_000_000,
    phase_ns=[1_000_000_000 * (phase is Phase.WAIT_TOKEN) for phase in Phase],
    busy_ratio=0.31,
)


def told() -> Status:
    scheduler = SchedulerStats(speculation=SpeculationStats("suffix", 9, 7, 1), num_running=3)
    return Status(stats=msgspec.structs.replace(stats(stage_times=[TIMES]), scheduler=scheduler))


@pytest.fixture(scope="module")
def keyed() -> Iterator[LiveServer]:
    model = fake_model(stages=[StageShape(start_layer=0, end_layer=4, host=HOST)])
    config = ServerConfig(api_keys=[KEY], admin_keys=["admin-1"])
    with LiveServer(FakeEngine(state=told()), config=config, model=model) as live:
        yield live


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + b64encode(f"somebody:{password}".encode()).decode()}


@pytest.mark.parametrize("each", PAGE_FILES, ids=lambda each: each.name)
def test_the_page_is_open_and_says_what_it_may_load(keyed: LiveServer, each: object) -> None:
    response, raw = keyed.request("GET", each.path)  # type: ignore[attr-defined]
    assert response.status == 200
    assert response.getheader("content-type", "").startswith(each.media_type)  # type: ignore[attr-defined]
    policy = response.getheader("content-security-policy", "")
    assert "frame-ancestors 'none'" in policy
    assert "script-src 'self';" in policy
    assert response.getheader("x-content-type-options") == "nosniff"
    assert raw
    assert KEY.encode() not in raw


@pytest.mark.parametrize("path", ["/page", "/page.js.map", "/index.html", "/../page.js", "//", "/page.css/"])
def test_nothing_beside_its_files_is_open(keyed: LiveServer, path: str) -> None:
    assert keyed.request("GET", path)[0].status == 401


def test_a_page_of_another_origin_gets_none_of_it(keyed: LiveServer) -> None:
    assert keyed.request("GET", "/", None, {"Origin": "https://elsewhere.example"})[0].status == 403
    assert keyed.request("GET", "/", None, {"Host": "rebound.example"})[0].status == 403


def test_the_table_takes_the_key_as_a_password_and_shows_the_pipeline(keyed: LiveServer) -> None:
    response, raw = keyed.request("GET", TABLE, None, basic(KEY))
    page = raw.decode()
    assert response.status == 200
    assert "script" not in response.getheader("content-security-policy", "")
    for cell in ("<td>31%</td>", "<td>25%</td>", "<td>0\u20133</td>", "<td>7, 1</td>", "desk &lt;b&gt;"):
        assert cell in page, cell
    assert "<b>" not in page
    assert keyed.request("GET", TABLE, None, {"Authorization": f"Bearer {KEY}"})[0].status == 200
    assert keyed.request("GET", TABLE, None, basic("admin-1"))[0].status == 200


@pytest.mark.parametrize(
    "headers",
    [{}, basic("key-2"), basic(""), {"Authorization": "Basic !"}, {"Authorization": f"Basic {KEY}"}],
    ids=["none", "wrong", "empty", "not base64", "bare"],
)
def test_without_the_key_a_browser_asks_its_user(keyed: LiveServer, headers: dict[str, str]) -> None:
    response, _ = keyed.request("GET", TABLE, None, headers)
    assert response.status == 401
    assert (response.getheader("www-authenticate") or "").startswith("Basic ")


def test_a_password_opens_nothing_else_and_nothing_else_asks_for_one(keyed: LiveServer) -> None:
    for method, path in [
        ("GET", "/debug/pipeline"),
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/pause"),
    ]:
        response, _ = keyed.request(method, path, None, basic(KEY))
        assert response.status == 401
        assert response.getheader("www-authenticate") is None


def test_the_table_of_a_core_that_has_not_spoken(keyed: LiveServer) -> None:
    with LiveServer(FakeEngine(state=Status(ready=False, reason="loading <now>"))) as live:
        page = live.request("GET", TABLE)[1].decode()
    assert "loading &lt;now&gt;" in page
    assert "<td>\u2013</td>" in page
