"""The route `GET /debug/pipeline/table`: the pipeline as a plain table, for browsers without JavaScript.

It shows the view of `/debug/pipeline` as HTML that loads itself again every few seconds. Such a browser
cannot send a key in a header. Here, and nowhere else, it may send the key as the password of HTTP Basic
(`http.access`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from starlette.responses import Response

from penstock.server.routes.page import page_headers
from penstock.server.routes.pipeline_view import PipelineView, ReplicaView, StageView

RENEW_S = 5
TABLE_POLICY = (
    "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)

_HEAD = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="{RENEW_S}">
<title>Penstock: pipeline</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="../../page.css">
</head>
<body>
<header><h1>Penstock</h1></header>
<main class="plain">"""
_TAIL = "</main></body></html>"
_DASH = "\u2013"


class PipelineTableRoute:
    """Shows the pipeline as a table.

    Args:
        view: returns the pipeline as it is now.
    """

    def __init__(self, view: Callable[[], PipelineView]) -> None:
        self._view = view

    async def table(self) -> Response:
        """Return stages, bubbles by cause, queues and KV use, as a page of plain tables."""
        return Response(table_page(self._view()), media_type="text/html", headers=page_headers(TABLE_POLICY))


def table_page(view: PipelineView) -> str:
    """Return the page of a view."""
    body = "".join(_replica(replica, len(view.replicas) > 1) for replica in view.replicas)
    return f"{_HEAD}<p>{escape(view.model)}, Penstock {escape(view.version)}</p>{body}{_TAIL}"


def _replica(replica: ReplicaView, is_one_of_several: bool) -> str:
    title = f"Replica {replica.replica}" if is_one_of_several else "Pipeline"
    state = "ready" if replica.ready else replica.reason or "not ready"
    numbers: list[tuple[str, object]] = [
        ("health", state),
        ("epoch", replica.epoch),
        ("running", replica.running),
        ("waiting", replica.waiting),
        ("plans in flight", replica.inflight),
        ("generated tokens", replica.generated_tokens),
    ]
    if replica.kv is not None:
        pool = replica.kv.l1
        numbers += [
            ("KV blocks in use", f"{pool.used_blocks} of {pool.num_blocks}"),
            ("prompt tokens found in the cache", f"{pool.hit_tokens} of {pool.query_tokens}"),
            ("bytes of KV in host memory", replica.kv.l2.bytes_used),
            ("KV blocks stored and loaded", f"{replica.kv.l3.stored_blocks}, {replica.kv.l3.loaded_blocks}"),
        ]
    if replica.drafts is not None and replica.drafts.drafter:
        drafts = replica.drafts
        numbers.append(("drafts accepted, cancelled", f"{drafts.accepted}, {drafts.cancelled}"))
    facts = "".join(f"<tr><th scope=row>{escape(name)}</th>{_cell(value)}</tr>" for name, value in numbers)
    return f"<h2>{title}</h2><table>{facts}</table>{_stages(replica.stages)}"


def _stages(stages: Iterable[StageView]) -> str:
    stages = list(stages)
    causes = sorted({cause for stage in stages for cause in stage.bubble_s})
    bubbles = [f"bubble: {cause.replace('_', ' ')}" for cause in causes]
    names = ["stage", "host", "layers", "ranks", "restarts", "busy", *bubbles]
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in names)
    rows = "".join(f"<tr>{''.join(map(_cell, _stage(stage, causes)))}</tr>" for stage in stages)
    return f"<div class=scroll><table><tr>{head}</tr>{rows}</table></div>"


def _stage(stage: StageView, causes: Iterable[str]) -> list[object]:
    layers = None if stage.layers is None else f"{stage.layers[0]}{_DASH}{stage.layers[1] - 1}"
    wall_s = stage.wall_s or 1.0
    shares = [f"{stage.bubble_s.get(cause, 0.0) / wall_s:.0%}" for cause in causes]
    busy = f"{stage.busy_ratio:.0%}"
    return [stage.stage, stage.host, layers, stage.num_ranks, stage.restarts, busy, *shares]


def _cell(value: object) -> str:
    return f"<td>{_DASH if value is None else escape(str(value))}</td>"
