"""Requests made from our own OpenAPI document, good and bad ones, against the real HTTP server.

The document must be true: what it calls wrong is refused, every answer has a status, a media type and a shape
that it names, and nothing is a 5xx. Examples are the same in every run.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from live_server import LiveServer
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
GENERATING = ("/v1/chat/completions", "/v1/completions")
PLAIN = (
    "/v1/models",
    "/v1/models/{model_id}",
    "/health",
    "/health/ready",
    "/health/live",
    "/metrics",
    "/version",
    "/debug/trace",
)


def fuzz(live: LiveServer, mode: GenerationMode, path: str, num_examples: int) -> Counter[int]:
    """Send examples of one operation; how often each status came."""
    schema = schemathesis.openapi.from_url(live.url + "/openapi.json")
    (operation,) = [found.ok() for found in schema.get_all_operations() if found.ok().path == path]
    statuses: Counter[int] = Counter()
    with requests.Session() as session:

        @settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            response = case.call(base_url=live.url, session=session)
            case.validate_response(response, checks=CHECKS)
            statuses[response.status_code] += 1

        run()
    return statuses


def test_the_document_is_openapi_and_names_every_route(live: LiveServer) -> None:
    schema = schemathesis.openapi.from_url(live.url + "/openapi.json")
    schema.validate()
    named = [found.ok().path for found in schema.get_all_operations()]
    routes = live.app.routes.routes
    served = {getattr(route, "path", "").replace(":path", "") for route in routes} - {"/openapi.json"}
    assert sorted(named) == sorted(served) == sorted([*GENERATING, *PLAIN])


@pytest.mark.parametrize("path", GENERATING)
def test_r8_good_requests_of_our_document_are_answered_as_it_says(live: LiveServer, path: str) -> None:
    statuses = fuzz(live, GenerationMode.POSITIVE, path, 60)
    assert set(statuses) <= {200, 400, 404}
    assert statuses[200] >= 4, "hardly an example got past the door"


@pytest.mark.parametrize("path", GENERATING)
def test_r8_bad_requests_of_our_document_are_refused(live: LiveServer, path: str) -> None:
    before = len(live.engine.added)
    statuses = fuzz(live, GenerationMode.NEGATIVE, path, 60)
    assert set(statuses) <= {400, 404}  # a model that is not here is named before other faults
    assert len(live.engine.added) == before


@pytest.mark.parametrize("path", PLAIN)
def test_r8_routes_without_bodies_answer_as_our_document_says(live: LiveServer, path: str) -> None:
    statuses = fuzz(live, GenerationMode.POSITIVE, path, 10)
    assert set(statuses) <= {200, 404}
