"""The Grafana dashboard and the alert rules of `deploy/monitoring` ask for metrics that a scrape has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

import promql_parser
import pytest
import yaml

from fake_engine import FakeEngine, Status, stats
from live_server import LiveServer
from paths import REPOSITORY
from penstock.batch import StageTimes
from penstock.config.server import ServerConfig
from penstock.process.config import HostLink
from penstock.process.endpoints import Restarts
from penstock.process.pipe_hosts import HostClock, PipeHosts
from penstock.scheduler.stats import SpeculationStats
from penstock.trace.phases import Phase

MONITORING = REPOSITORY / "deploy" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))
GROUPS = yaml.safe_load((MONITORING / "alert-rules.yaml").read_text(encoding="utf-8"))["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
VARIABLES = {"$__rate_interval": "1m", "$model": "fake"}

Samples = dict[str, list[dict[str, str]]]  # labels of the samples of a name


def scraped(config: ServerConfig | None = None) -> str:
    """What `/metrics` says of an engine with two stages on two hosts, after one request and one refusal."""
    phases = [1] * len(Phase)
    times = [
        StageTimes(
            stage=stage, num_steps=3, wall_ns=9, busy_ns=3, busy_ratio=0.5, phase_ns=phases, exchange_ns=1
        )
        for stage in range(2)
    ]
    numbers = stats(
        stage_times=times,
        restarts=Restarts(stages=[0, 1], core=1),
        speculation=SpeculationStats("suffix", 9, 6, 5, num_forced_drafted=2, num_forced_accepted=1),
    )
    hosts = PipeHosts(
        clocks=[HostClock(host="desk", offset_ns=1, error_ns=1)],
        links=[
            HostLink(
                hosts=("desk", "tower"),
                interfaces=("eth0", "eth0"),
                round_trip_s=0.002,
                bytes_per_s_out=1e6,
                bytes_per_s_in=1e6,
            )
        ],
    )
    with LiveServer(FakeEngine(state=Status(stats=numbers, hosts=hosts)), config=config) as live:
        live.post("/v1/completions", {"prompt": "abcd", "max_tokens": 3})
        live.post("/v1/completions", {"prompt": "abcd", "temperature": 9})
        response, raw = live.request("GET", "/metrics")
        assert response.status == 200
        return raw.decode()


def samples_of(text: str) -> Samples:
    found: Samples = {}
    for name, labels in re.findall(r"^([a-z0-9_:]+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        found.setdefault(name, []).append(dict(re.findall(r'(\w+)="([^"]*)"', labels)))
    return found


@cache
def served() -> Samples:
    return samples_of(scraped())


def selectors(query: str) -> Iterator[tuple[str, Any]]:
    """Give the name of each metric that a query asks for, and the matchers of its labels."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    found: list[tuple[str, Any]] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name or "", node.matchers.matchers))

    promql_parser.walk(promql_parser.parse(query), visit)
    assert found, query
    yield from found


def panels() -> list[Any]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


QUERIES = {
    f"{panel['title']} {target['refId']}": target["expr"] for panel in panels() for target in panel["targets"]
} | {rule["alert"]: rule["expr"] for rule in RULES}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_every_query_asks_for_metrics_and_labels_that_a_scrape_has(query: str) -> None:
    for name, matchers in selectors(query):
        assert name in served(), name
        labels = set().union(*served()[name])
        for matcher in matchers:
            assert matcher.name in labels, (name, matcher.name, labels)


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_what_a_legend_names_is_a_label_of_the_result(panel: Any) -> None:
    for target in panel["targets"]:
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert all(label in set().union(*served()[name]) for name, _ in selectors(target["expr"]))


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    cells = [
        {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        for place in (panel["gridPos"] for panel in everything)
    ]
    assert not any(one & other for one, other in combinations(cells, 2))
    assert all(x < 24 for cell in cells for x, _ in cell)


def test_every_alert_says_what_is_wrong_and_where_to_look() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
        grouped = re.search(r"by \(([^)]*)\)", rule["expr"])
        assert grouped is not None
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named <= set(grouped[1].split(", ")), rule["alert"]


def test_vllm_names_are_given_on_request_with_the_same_values() -> None:
    text = scraped(ServerConfig(vllm_metric_names=True))
    names = set(re.findall(r"^# TYPE (vllm:\S+)", text, re.MULTILINE))
    assert {
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds",
        "vllm:request_prompt_tokens",
        "vllm:spec_decode_num_accepted_tokens_total",
    } <= names
    lines = text.splitlines()
    theirs = [line for line in lines if line.startswith("vllm:") and "spec_decode" not in line]
    assert theirs
    assert {"penstock_" + line.removeprefix("vllm:") for line in theirs} <= set(lines)
    assert 'vllm:spec_decode_num_accepted_tokens_total{drafter="suffix",model_name="fake"} 5.0' in lines
    assert "vllm:" not in scraped()


def test_requests_are_counted_by_their_lengths_and_times() -> None:
    text = scraped()
    assert 'penstock_request_prompt_tokens_bucket{le="5.0",model_name="fake"} 1.0' in text  # four and a BOS
    assert 'penstock_request_generation_tokens_sum{model_name="fake"} 3.0' in text
    for name in ("request_time_per_output_token", "request_prefill_time", "request_decode_time"):
        assert f'penstock_{name}_seconds_count{{model_name="fake"}} 1.0' in text
