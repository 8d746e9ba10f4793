"""The references of a JSON schema by `$id`, `$anchor` or URN, written as JSON pointers.

A schema within a document may have an address (`$id`) and names (`$anchor`). References in that schema are
relative to the address. They are resolved here, so that the bounds are checked on the very schemas of which
the grammar is built. Nothing outside the document is ever opened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urljoin

from penstock.errors import InvalidRequestError
from penstock.grammar.schema_errors import unsupported
from penstock.grammar.subschemas import Steps, pointer_to, steps_of, subschemas, value_at

_SHOWN_CHARACTERS = 128  # of a reference, in a refusal
# Of a pointer: many short references to a place with a long path would make a document grow without bound.
_MAX_POINTER_CHARACTERS = 512


def localize_references(document: dict[str, Any]) -> None:
    """Write every `$ref` of a document as a JSON pointer from its root.

    References that are such pointers already stay as they are. Addresses and names are then removed, unless
    there is at most one address, the root's, and no name.

    Raises:
        InvalidRequestError: a reference leads out of the document, or nowhere.
    """
    index = _Index(document, _address_keyword(document))
    index.read((), document, "", names_count=True)
    root_base = index.schemas[0].base
    position = 0
    while position < len(index.schemas):  # it grows when a reference leads to a place of no keyword
        schema, base = index.schemas[position].schema, index.schemas[position].base
        position += 1
        reference = schema.get("$ref")
        if isinstance(reference, str):
            steps, target_base = index.resolve(reference, base)
            if base != root_base or not (reference == "#" or reference.startswith("#/")):
                schema["$ref"] = _pointer(steps, reference)
            index.read(steps, value_at(document, steps), target_base, names_count=False)
    if len(index.addresses) > 1 or index.names:
        for found in index.schemas:
            for keyword in (index.address_keyword, "$anchor"):
                if isinstance(found.schema.get(keyword), str):
                    del found.schema[keyword]


def _address_keyword(document: dict[str, Any]) -> str:
    draft = document.get("$schema")
    return "id" if isinstance(draft, str) and "/draft-04/" in draft else "$id"


@dataclass(frozen=True, slots=True)
class _Found:
    """A schema of the document, with the address to which references in it are relative."""

    schema: dict[str, Any]
    base: str


@dataclass(slots=True)
class _Index:
    """The schemas of a document, with their addresses and names.

    Attributes:
        address_keyword: `$id`, or `id` in draft 4.
        schemas: all schemas that were read.
        addresses: steps to the schema of each address; the root is there even without one, as "".
        names: steps to the schema of each name; a key is the address in which the name stands, and the name.
        seen: `id()` of each schema that was read.
    """

    document: dict[str, Any]
    address_keyword: str
    schemas: list[_Found] = field(default_factory=list)
    addresses: dict[str, Steps] = field(default_factory=dict)
    names: dict[tuple[str, str], Steps] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def read(self, steps: Steps, value: Any, base: str, *, names_count: bool) -> None:
        """Add the schema at these steps and the schemas within it, unless they were added before.

        Args:
            value: the schema.
            base: the address of the schema around it.
            names_count: references may use the addresses and names in it.
        """
        waiting = [(steps, value, base)]
        while waiting:
            steps, schema, base = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in self.seen:
                continue
            self.seen.add(id(schema))
            base = self._base_of(schema, steps, base, names_count=names_count)
            self.schemas.append(_Found(schema, base))
            waiting += [(steps + more, nested, base) for more, nested in subschemas(schema)]

    def _base_of(self, schema: dict[str, Any], steps: Steps, base: str, *, names_count: bool) -> str:
        """Return the address that holds in a schema; if `names_count`, add the address and the names."""
        names = [schema.get("$anchor"), schema.get("$dynamicAnchor")]
        given = schema.get(self.address_keyword)
        address, _, name = given.partition("#") if isinstance(given, str) else ("", "", "")
        names.append(name or None)  # older drafts write `$anchor` as the fragment of an address
        base = _joined(base, address) if address else base
        if names_count:
            if address or not steps:
                self.addresses.setdefault(base, steps)
            for own in names:
                if isinstance(own, str):
                    self.names.setdefault((base, own), steps)
        return base

    def resolve(self, reference: str, base: str) -> tuple[Steps, str]:
        """Return the steps to the target of a reference, and the address that holds around the target."""
        address, _, fragment = _joined(base, reference).partition("#")
        if address not in self.addresses:
            raise _leads_nowhere(reference, "only references within the document are supported, not")
        steps = self.addresses[address]
        if fragment.startswith("/"):
            steps += steps_of("#" + fragment)
        elif fragment:
            name = (address, unquote(fragment))
            if name not in self.names:
                raise _leads_nowhere(reference, "nothing is at")
            steps = self.names[name]
        try:
            value_at(self.document, steps)
        except KeyError:
            raise _leads_nowhere(reference, "nothing is at") from None
        return steps, address


def _joined(base: str, reference: str) -> str:
    if not reference or reference.startswith("#"):
        return base + reference  # `urljoin` would drop a base that has no path, such as a URN
    try:
        return urljoin(base, reference)
    except ValueError:
        raise _leads_nowhere(reference, "only addresses are supported, not") from None


def _pointer(steps: Steps, reference: str) -> str:
    if sum(map(len, steps)) > _MAX_POINTER_CHARACTERS:
        raise _leads_nowhere(reference, f"its path is longer than {_MAX_POINTER_CHARACTERS} characters:")
    return pointer_to(steps)


def _leads_nowhere(reference: str, why: str) -> InvalidRequestError:
    return unsupported("$ref", f"{why} {reference[:_SHOWN_CHARACTERS]!r}")
