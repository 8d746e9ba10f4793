"""The outermost layer of the app: every request passes here before any route.

The gate gives the request its id, and checks its host, origin and key. It tells browsers which pages may read
the answer, makes an error object of every failure, and writes the request's log line. It knows nothing of
routes: a request for a path that does not exist needs a key too.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.server.http.access import ApiKeys, HostPolicy, refuse_odd_path
from penstock.server.http.cross_origin import CrossOrigin
from penstock.server.http.errors import ErrorAnswers, ErrorForm
from penstock.server.http.keep_alive import Clock
from penstock.server.http.lifecycle import Lifecycle
from penstock.server.http.metrics import Metrics
from penstock.server.http.request_log import RequestLog
from penstock.server.http.request_record import REQUEST_ID_HEADER, RequestRecord, open_record

_SAFETY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]


class Gate:
    """The ASGI app around another one; see the module's docstring.

    Args:
        app: has the routes.
        pages: the web pages of other origins that may read answers.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        hosts: HostPolicy,
        pages: CrossOrigin,
        errors: ErrorAnswers,
        log: RequestLog,
        metrics: Metrics,
        lifecycle: Lifecycle,
        clock: Clock,
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._pages = pages
        self._errors = errors
        self._log = log
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = open_record(scope, self._clock())
        try:
            await self._answer(scope, receive, send, record)
        finally:
            now = self._clock()
            self._metrics.observe(record, now)
            self._log.request_end(record, now)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        form = self._errors.form_of(record.path)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                _complete_head(message, record, form)
                message["headers"] += self._pages.headers(scope["headers"])
                if self._lifecycle.is_draining:  # the next request may find another server
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            self._hosts.check(scope["headers"])
            preflight = self._pages.preflight(scope)
            if preflight is not None:
                await preflight(scope, receive, send_named)
                return
            self._keys.check(scope["path"], scope["headers"])
            refuse_odd_path(scope["path"])
            await self._app(scope, receive, send_named)
        except Exception as error:
            if isinstance(error, PenstockError):
                record.error_code = record.error_code or error.code
            if record.status == 0:
                answer = self._errors.response(record.path, error, record.request_id)
                await answer(scope, receive, send_named)
            if not isinstance(error, PenstockError):
                self._log.bug(record, error)


def _complete_head(message: Message, record: RequestRecord, form: ErrorForm) -> None:
    record.status = message["status"]
    headers = list(message.get("headers", ()))
    present = {name for name, _ in headers}
    headers += [pair for pair in _SAFETY_HEADERS if pair[0] not in present]
    names = (REQUEST_ID_HEADER, form.id_header)
    headers += [(name, record.request_id.encode()) for name in names if name]
    message["headers"] = headers
