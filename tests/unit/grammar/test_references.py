"""References by address and by name, written as pointers into the document (issue 25, point 16)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import InvalidRequestError
from penstock.grammar.references import localize_references

NUMBER = {"type": "integer"}
URN = "urn:uuid:deadbeef-1234-ff00-00ff-4321feebdaed"
ROOT = "http://x.example/folder/root"


def localized(schema: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    localize_references(copy)
    return copy


# A reference at the root, what the definition `d` has beside its type, and what the root has.
FOUND: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "by name": ("#d", {"$anchor": "d"}, {}),
    "by a name as older drafts write it": ("#d", {"$id": "#d"}, {}),
    "by address": ("http://y.example/d", {"$id": "http://y.example/d"}, {}),
    "by an address that is relative": ("d.json", {"$id": "d.json"}, {}),
    "by an address relative to the root's": ("http://x.example/folder/d", {"$id": "d"}, {"$id": ROOT}),
    "by an address and a name": (f"{URN}#d", {"$anchor": "d", "$id": URN}, {}),
    "by a URN and a name": (f"{URN}#d", {"$anchor": "d"}, {"$id": URN}),
    "by a URN and a pointer": (f"{URN}#/$defs/d", {}, {"$id": URN}),
    "by the root's address and a pointer": ("root#/$defs/d", {}, {"$id": ROOT}),
    "by the keyword of draft 4": (
        "d.json",
        {"id": "d.json"},
        {"$schema": "http://json-schema.org/draft-04/schema#"},
    ),
}


@pytest.mark.parametrize(("reference", "own", "root"), FOUND.values(), ids=FOUND)
def test_a_reference_becomes_a_pointer(reference: str, own: dict[str, Any], root: dict[str, Any]) -> None:
    found = localized({**root, "$ref": reference, "$defs": {"d": own | NUMBER}})
    assert found["$ref"] == "#/%24defs/d"
    assert found["$defs"]["d"].keys() - {"$id"} == NUMBER.keys()


def test_references_are_resolved_where_they_stand() -> None:
    """A pointer in a schema with an address begins there, and so do names."""
    found = localized(
        {
            "$ref": "tree",
            "$defs": {
                "tree": {
                    "$id": "tree",
                    "$anchor": "a",
                    "items": {"$ref": "#/$defs/leaf"},
                    "not": {"$ref": "#a"},
                    "$defs": {"leaf": {"$ref": "#"}},
                },
                "other": {"$anchor": "a"},
            },
            "items": {"$ref": "#a"},
        }
    )
    tree = found["$defs"]["tree"]
    assert found["$ref"] == tree["not"]["$ref"] == tree["$defs"]["leaf"]["$ref"] == "#/%24defs/tree"
    assert tree["items"]["$ref"] == "#/%24defs/tree/%24defs/leaf"
    assert found["items"]["$ref"] == "#/%24defs/other"


def test_what_a_pointer_leads_to_is_read_wherever_it_stands() -> None:
    found = localized({"$ref": "#/x/0", "x": [{"$ref": "#d"}], "$defs": {"d": {"$anchor": "d"}}})
    assert found["x"] == [{"$ref": "#/%24defs/d"}]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a~1b/c%20d", "$defs": {"a/b": {"c d": NUMBER}}},
        {"$ref": "#", "$id": ROOT},
        {"properties": {"$ref": NUMBER, "$id": NUMBER}},
        {"const": {"$ref": "http://x.example", "$id": "a"}, "enum": [{"$anchor": "b"}]},
    ],
)
def test_pointers_and_data_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert localized(schema) == schema


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("http://y.example/", "within the document"),
        ("file:///etc/passwd", "within the document"),
        ("other.json", "within the document"),
        ("http://[", "within the document"),
        ("#x", "nothing is at '#x'"),
        ("#in-data", "nothing is at"),
        ("d.json#/x", "nothing is at"),
        ("#/$defs/d/x", "nothing is at"),
        ("#/anyOf/2", "nothing is at"),
        ("#/anyOf/01", "nothing is at"),
        ("#/anyOf/0000000001", "nothing is at"),  # its first nine digits are another index
        ("#/anyOf/\u0661", "nothing is at"),
    ],
)
def test_r8_what_leads_nowhere_is_refused_by_name(reference: str, told: str) -> None:
    schema = {
        "$defs": {"d": {"$id": "d.json"}},
        "const": {"$anchor": "in-data"},
        "anyOf": [{}, {}],
        "properties": {"a": {"$ref": reference}},
    }
    with pytest.raises(InvalidRequestError, match="has \\$ref") as raised:
        localized(schema)
    assert told in raised.value.message
    assert raised.value.code == "unsupported_schema"


@pytest.mark.parametrize("address", ["http://[", "http://[#x"])
def test_r8_what_is_no_address_is_refused(address: str) -> None:
    for schema in ({"$id": ROOT, "$ref": address}, {"$id": ROOT, "items": {"$id": address}}):
        with pytest.raises(InvalidRequestError, match="only addresses"):
            localized(schema)


def test_r8_many_short_references_to_a_long_path_are_refused() -> None:
    """Each would be written as long as the path; 64 KiB of them came to 75 MB."""
    name = "n" * 30_000
    schema = {"$defs": {name: {"$anchor": "a"}}, "prefixItems": [{"$ref": "#a"}] * 2500}
    with pytest.raises(InvalidRequestError, match="longer than 512 characters"):
        localized(schema)
