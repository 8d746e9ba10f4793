"""`/`: the web page with a chat and the live pipeline, and the files that it is made of.

The files are the same for everybody, have no data and need no key; what the page fetches needs the key.
Their content security policy lets a browser load from this server alone, and lets no other page show this one
within itself.
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SAFETY_HEADERS = {"x-frame-options": "DENY", "referrer-policy": "no-referrer"}


class PageFile(NamedTuple):
    """A file of the page.

    Attributes:
        path: path of the URL at which it is served.
        name: its name in the folder `assets/page` of the package.
    """

    path: str
    name: str
    media_type: str


PAGE_FILES = (
    PageFile("/", "index.html", "text/html"),
    PageFile("/page.css", "page.css", "text/css"),
    PageFile("/page.js", "page.js", "text/javascript"),
)


def page_headers(policy: str = PAGE_POLICY) -> dict[str, str]:
    """Return the headers of an answer that a browser shows as a page."""
    return {"content-security-policy": policy, **_SAFETY_HEADERS}


def page_routes() -> list[Route]:
    """Return the routes of the page's files, which are read now and kept."""
    return [_route(each) for each in PAGE_FILES]


def _route(each: PageFile) -> Route:
    content = (files("penstock") / "assets" / "page" / each.name).read_bytes()

    async def serve(_request: Request) -> Response:
        return Response(content, media_type=each.media_type, headers=page_headers())

    return Route(each.path, serve, name=f"page {each.name}")
