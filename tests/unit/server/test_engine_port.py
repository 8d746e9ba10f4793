"""The names under which clients may ask for the model."""

from __future__ import annotations

import asyncio
import json

import pytest

from fake_engine import FakeEngine, fake_model
from penstock.config.server import ServerConfig
from penstock.errors import NotFoundError
from penstock.server.openapi import document_of
from penstock.server.routes.models import ModelsRoute


def test_a_model_answers_to_each_of_its_names_and_to_no_other() -> None:
    """Issue 25, point 13."""
    model = fake_model(aliases=("gpt-4o", "small"))
    for name in ("fake", "gpt-4o", "small"):
        model.require_name(name)
    with pytest.raises(NotFoundError, match="this server has 'fake' or 'gpt-4o' or 'small'") as caught:
        model.require_name("Fake")
    assert caught.value.code == "model_not_found"


def test_every_name_is_listed_and_the_first_one_leads() -> None:
    """Issue 25, point 13."""
    route = ModelsRoute(fake_model(aliases=("gpt-4o",)), FakeEngine())
    listed = json.loads(bytes(asyncio.run(route.list()).body))
    assert [card["id"] for card in listed["data"]] == ["fake", "gpt-4o"]
    assert len({card["max_model_len"] for card in listed["data"]}) == 1


def test_every_name_is_in_the_document() -> None:
    """Issue 25, point 13."""
    document = document_of([], fake_model(aliases=("gpt-4o",)), ServerConfig())
    field = document["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    variants = field.get("anyOf", [field])
    assert [variant["enum"] for variant in variants if "enum" in variant] == [["fake", "gpt-4o", ""]]
