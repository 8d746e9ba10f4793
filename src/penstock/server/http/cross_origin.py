"""The web pages of other origins that may use the server: those that are named, and by default none.

The CORS protocol of the Fetch standard. An origin is on the list word for word, or it is foreign: there are
no patterns and no `*`, and `null`, which any page can have, is none. Pages send their key as every client
does; credentials of the browser (cookies, certificates) are never asked for. `access` refuses the origins
that are not here; `gate` answers the questions of browsers (preflights) before it asks for a key, since they
bring none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Scope

from penstock.process.listening import refuse_bad_origins
from penstock.server.http.access import Headers, header_value

PREFLIGHT_MAX_AGE_S = 600

_TOKENS = re.compile(rb"[A-Za-z0-9!#$%&'+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'+.^_`|~-]+)*")
_METHODS = b"GET, HEAD, POST"
_SHOWN = b"retry-after, x-penstock-warning, x-request-id"  # beside those that every page may read

HeaderList = list[tuple[bytes, bytes]]


class CrossOrigin:
    """Tells browsers which pages of other origins may use the server.

    Args:
        origins: whose pages may use the server.

    Raises:
        UsageError: one of them is not an origin.
    """

    def __init__(self, origins: Sequence[str] = ()) -> None:
        refuse_bad_origins(origins)
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, request: Headers) -> HeaderList:
        """Return the headers that tell a browser whether a page may read an answer, an error too.

        There are none if no page on the list has sent the request.
        """
        origin = header_value(request, b"origin")
        if origin not in self._origins:
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _SHOWN),
            (b"vary", b"Origin"),
        ]

    def preflight(self, scope: Scope) -> Response | None:
        """Return the answer to a browser that asks whether a page on the list may send a request.

        None if that is not the question. The answer is the same for every path, there or not.
        """
        headers = scope["headers"]
        is_question = scope["method"] == "OPTIONS" and header_value(headers, b"access-control-request-method")
        if not is_question or header_value(headers, b"origin") not in self._origins:
            return None
        answer = Response(status_code=204)
        answer.raw_headers.append((b"access-control-allow-methods", _METHODS))
        wanted = header_value(headers, b"access-control-request-headers")
        if _TOKENS.fullmatch(wanted):
            answer.raw_headers.append((b"access-control-allow-headers", wanted))
        answer.raw_headers.append((b"access-control-max-age", b"%d" % PREFLIGHT_MAX_AGE_S))
        return answer
