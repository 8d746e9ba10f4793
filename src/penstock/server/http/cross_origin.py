"""The web pages of other origins that may use the server: by default none, else those on a list.

Implements the CORS protocol of the Fetch standard. An origin must be on the list word for word. There are no
patterns and no `*`, and `null` cannot be listed, as any page can have it. Pages send their key as every other
client does; credentials that a browser keeps (cookies, certificates) are never asked for. `access` refuses
origins that are not on the list. A browser's question whether a page may send a request (a preflight) has no
key, so `gate` answers it before it checks keys.
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
_METHODS = b"DELETE, GET, HEAD, POST"
# Headers that the pages may read too, beside those that every page may read.
_SHOWN = b"request-id, retry-after, x-penstock-resumable, x-penstock-warning, x-request-id"

HeaderList = list[tuple[bytes, bytes]]


class CrossOrigin:
    """Tells browsers which pages of other origins may use the server.

    Args:
        origins: the list of origins whose pages may use the server.

    Raises:
        UsageError: an entry of the list is not an origin.
    """

    def __init__(self, origins: Sequence[str] = ()) -> None:
        refuse_bad_origins(origins)
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, request: Headers) -> HeaderList:
        """Return the headers by which a browser lets a page read the answer, also where it is an error.

        There are none if the request's origin is not on the list.
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
        """Return the answer to a browser that asks whether a page may send a request.

        Return None if the request is not such a question, or its origin is not on the list. The answer is the
        same for every path, whether or not the path exists.
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
