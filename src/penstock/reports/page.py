"""The report of a benchmark as a page: pictures, and below each of them a table with its numbers.

    throughput over concurrency | latencies | where the stages' time went | memory | predicted beside measured

A section is left out if nothing of it was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.reports.charts import Bar, Line, bar_chart, line_chart
from penstock.reports.document import document, paragraph, section, table
from penstock.reports.figures import LATENCIES, Report, RunFigures, StageFigures
from penstock.reports.markup import Markup, element, text

_CONCURRENCY = "requests at once"
_MIB = 1 << 20
_ABSENT = "\u2013"
_MOST_BARS = 32  # of a picture; the table below has all
_PERCENTILES = ("p50", "p90", "p99")
_RUN_HEADINGS = ("layout", _CONCURRENCY)

_Number = Callable[[RunFigures], float | None]


def report_page(report: Report) -> str:
    """Return the report as one HTML file."""
    runs = sorted(report.runs, key=lambda run: run.concurrency)
    runs.sort(key=lambda run: _series(report.runs).index(run.series))
    title = f"{report.title}: {report.model}"
    parts = [
        _head(title, report),
        *([_throughput(runs), *_effects(runs), _latencies(runs), *_stages(runs)] if runs else []),
        *_predicted(runs),
        *_failed(report),
        section(
            "Settings", table("Settings of the run", ("setting", "value"), _settings(report), has_words=True)
        ),
    ]
    return document(title, parts)


def _head(title: str, report: Report) -> Markup:
    about = f"Penstock {report.version}, {report.made_at}"
    best = max(report.runs, key=lambda run: run.output_tokens_per_s, default=None)
    words = [paragraph(about, "muted")]
    if best is not None:
        words.append(
            paragraph(
                f"The highest throughput was {best.output_tokens_per_s:,.1f} output tokens/s, with "
                f"{best.series} and {best.concurrency} requests at once."
            )
        )
    words += [paragraph(note) for note in report.notes]
    return element("header", element("h1", text(title)), *words)


def _settings(report: Report) -> list[tuple[str, str]]:
    return [("model", report.model), *report.settings.items()]


def _throughput(runs: Sequence[RunFigures]) -> Markup:
    chart = line_chart(
        "Throughput against concurrency",
        _CONCURRENCY,
        "output tokens/s",
        _lines(
            runs,
            lambda run: run.output_tokens_per_s,
            lambda run: None if run.predicted is None else run.predicted.tokens_per_s,
        ),
        "throughput",
    )
    headings = (
        *_RUN_HEADINGS,
        *("output tokens/s", "tokens/s in all", "requests/s", "requests", "failed", "seconds"),
    )
    rows = [
        (
            *_named(run),
            f"{run.output_tokens_per_s:,.1f}",
            f"{run.tokens_per_s:,.1f}",
            f"{run.requests_per_s:,.2f}",
            str(run.completed),
            str(run.failed),
            f"{run.duration_s:.2f}",
        )
        for run in runs
    ]
    return section("Throughput", chart, table("Throughput of each run", headings, rows))


def _effects(runs: Sequence[RunFigures]) -> list[Markup]:
    """Return a section with the layouts side by side; nothing if only one ran."""
    if len(_series(runs)) == 1:
        return []
    headings = (
        *_RUN_HEADINGS,
        *("output tokens/s", "first token ms", "time per token ms", "bubble %"),
        *("largest stage MiB", "resident MiB"),
    )
    rows = [
        (
            *_named(run),
            f"{run.output_tokens_per_s:,.1f}",
            _shown(_measured_ms("ttft")(run), ".2f"),
            _shown(_measured_ms("tpot")(run), ".2f"),
            _shown(None if run.bubble is None else 100 * run.bubble, ".1f"),
            _mib(max((size for stage in run.stages if (size := _held_bytes(stage))), default=None)),
            _mib(sum(stage.resident_bytes or 0 for stage in run.stages) or None),
        )
        for run in runs
    ]
    return [
        section(
            "Layouts side by side",
            paragraph(
                "Latencies are medians. The largest stage has the most weights and KV cache; resident "
                "memory is the sum of all stages."
            ),
            table("Layouts side by side", headings, rows),
        )
    ]


def _held_bytes(stage: StageFigures) -> int:
    return (stage.weight_bytes or 0) + (stage.kv_bytes or 0)


def _latencies(runs: Sequence[RunFigures]) -> Markup:
    """Return a section with a picture and a table for each latency that was measured.

    The pictures show percentiles if one layout ran, else the median of each layout.
    """
    parts: list[Markup] = []
    is_one = len(_series(runs)) == 1
    for name, title in LATENCIES.items():
        measured = [run for run in runs if name in run.latencies_ms]
        if not measured:
            continue
        lines = _percentile_lines(measured, name) if is_one else _median_lines(measured, name)
        shown = title if is_one else f"{title}, median"
        parts.append(line_chart(shown, _CONCURRENCY, "ms", lines, f"latency-{name}"))
        headings = (*_RUN_HEADINGS, "mean ms", "p50", "p90", "p99", "longest", "samples")
        parts.append(table(title, headings, [_latency_row(run, name) for run in measured]))
    return section("Latency", *parts) if parts else Markup("")


def _percentile_lines(runs: Sequence[RunFigures], name: str) -> list[Line]:
    return [
        Line(
            name=percent,
            colour=number,
            points=[(run.concurrency, getattr(run.latencies_ms[name], percent)) for run in runs],
        )
        for number, percent in enumerate(_PERCENTILES)
    ]


def _median_lines(runs: Sequence[RunFigures], name: str) -> list[Line]:
    return _lines(runs, lambda run: run.latencies_ms[name].p50, lambda run: None)


def _latency_row(run: RunFigures, name: str) -> tuple[str, ...]:
    own = run.latencies_ms[name]
    values = (own.mean, own.p50, own.p90, own.p99, own.max)
    return (*_named(run), *(f"{value:,.2f}" for value in values), str(own.count))


def _stages(runs: Sequence[RunFigures]) -> list[Markup]:
    """Return sections about the stages' time and memory; nothing if no stage has reported."""
    reported = [run for run in runs if run.stages]
    if not reported:
        return []
    shown = _fullest(reported)
    return [_times(reported, shown), _last_stage(reported), _memory(reported, shown)]


def _times(runs: Sequence[RunFigures], shown: Sequence[RunFigures]) -> Markup:
    causes = list(dict.fromkeys(cause for run in runs for stage in run.stages for cause in stage.causes))
    bars = [
        Bar(
            name=_bar_name(run, stage, shown),
            parts=[
                ("busy", 100 * stage.busy),
                *((cause, 100 * stage.causes.get(cause, 0.0)) for cause in causes),
                ("overhead", 100 * stage.overhead),
            ],
        )
        for run in shown
        for stage in run.stages
    ]
    rows = [
        (
            *_named(run),
            _stage_name(stage),
            f"{100 * stage.busy:.1f}",
            f"{100 * stage.bubble:.1f}",
            *(f"{100 * stage.causes.get(cause, 0.0):.1f}" for cause in causes),
            f"{100 * stage.overhead:.1f}",
            str(stage.num_steps),
            f"{1e3 * stage.step_s:.2f}",
        )
        for run in runs
        for stage in run.stages
    ]
    headings = (
        *_RUN_HEADINGS,
        "stage",
        "busy %",
        "bubble %",
        *causes,
        "overhead %",
        "steps",
        "busy ms a step",
    )
    return section(
        "Where the stages' time went",
        paragraph(
            "Busy is the time in which a stage computed. Bubbles are times in which it waited instead: for "
            "work, a plan, a sampled token, the stage before, copies, or room in the next link. Overhead "
            "is the rest."
        ),
        bar_chart(
            "Busy share and bubbles by cause", "% of the time", bars[:_MOST_BARS], "bubbles", whole=100.0
        ),
        table("Busy share and bubbles by cause, in % of the time", headings, rows),
    )


def _last_stage(runs: Sequence[RunFigures]) -> Markup:
    rows = [
        (
            *_named(run),
            _stage_name(run.stages[-1]),
            f"{100 * run.stages[-1].sampling:.1f}",
            _longer(run.stages),
        )
        for run in runs
        if run.stages[-1].num_steps
    ]
    if not rows:
        return Markup("")
    headings = (
        *_RUN_HEADINGS,
        "stage",
        "head and sampling, % of its computing",
        "step against the longest other",
    )
    return section(
        "The last stage",
        paragraph(
            "The last stage also runs the head and the sampling. The share is their part of its computing "
            "time. If its steps are longer than those of other stages, they wait for it."
        ),
        table("Head and sampling on the last stage", headings, rows),
    )


def _longer(stages: Sequence[StageFigures]) -> str:
    others = [stage.step_s for stage in stages[:-1] if stage.step_s]
    return f"{stages[-1].step_s / max(others):.2f} x" if others else _ABSENT


def _memory(runs: Sequence[RunFigures], shown: Sequence[RunFigures]) -> Markup:
    bars = [
        Bar(
            name=_bar_name(run, stage, shown),
            parts=[
                (name, (size or 0) / _MIB)
                for name, size in (
                    ("weights", stage.weight_bytes),
                    ("KV cache", stage.kv_bytes),
                    ("stranded", stage.stranded_bytes),
                )
            ],
        )
        for run in shown
        for stage in run.stages
        if stage.kv_bytes is not None
    ]
    if not bars:
        return Markup("")
    sizes = ("weight_bytes", "kv_bytes", "stranded_bytes", "resident_bytes")
    rows = [
        (*_named(run), _stage_name(stage), *(_mib(getattr(stage, size)) for size in sizes))
        for run in runs
        for stage in run.stages
    ]
    return section(
        "Memory of the stages",
        paragraph(
            "Stranded memory is unused because the stage with the least memory sets the size of the KV "
            "cache. Resident memory was counted at the end of the run, with its part of shared pages."
        ),
        bar_chart("Weights, KV cache and stranded memory", "MiB", bars[:_MOST_BARS], "memory"),
        table(
            "Memory of each stage in MiB",
            (*_RUN_HEADINGS, "stage", "weights", "KV cache", "stranded", "resident"),
            rows,
        ),
    )


def _predicted(runs: Sequence[RunFigures]) -> list[Markup]:
    both = [run for run in runs if run.predicted is not None]
    if not both:
        return []
    pictures = []
    for name, field in (("ttft", "ttft_s"), ("tpot", "time_per_token_s")):
        lines = _lines(both, _measured_ms(name), _predicted_ms(field))
        if any(not line.is_dashed for line in lines):
            title = f"{LATENCIES[name]}, predicted beside measured"
            pictures.append(line_chart(title, _CONCURRENCY, "ms", lines, f"predicted-{name}"))
    headings = (
        *_RUN_HEADINGS,
        *("first token ms", "predicted", "error", "time per token ms", "predicted", "error"),
        *("output tokens/s", "predicted", "error", "bubble %", "predicted", "points"),
    )
    bases = dict.fromkeys(run.predicted.basis for run in both if run.predicted is not None)
    return [
        section(
            "Predicted beside measured",
            *map(paragraph, bases),
            paragraph(
                "Predictions are for a steady pipe in which all requests decode while one prompt runs. A "
                "real run also has a start and an end, and in a closed loop prompts arrive together."
            ),
            *pictures,
            table("Predicted beside measured", headings, [_comparison(run) for run in both]),
        )
    ]


def _comparison(run: RunFigures) -> tuple[str, ...]:
    predicted = run.predicted
    assert predicted is not None
    bubble = run.bubble
    return (
        *_named(run),
        *_pair(_measured_ms("ttft")(run), 1e3 * predicted.ttft_s),
        *_pair(_measured_ms("tpot")(run), 1e3 * predicted.time_per_token_s),
        *_pair(run.output_tokens_per_s, predicted.tokens_per_s),
        _ABSENT if bubble is None else f"{100 * bubble:.1f}",
        f"{100 * predicted.bubble:.1f}",
        _ABSENT if bubble is None else f"{100 * (predicted.bubble - bubble):+.1f}",
    )


def _pair(measured: float | None, predicted: float) -> tuple[str, str, str]:
    if not measured:
        return _ABSENT, f"{predicted:,.2f}", _ABSENT
    return f"{measured:,.2f}", f"{predicted:,.2f}", f"{100 * (predicted / measured - 1):+.1f} %"


def _measured_ms(name: str) -> _Number:
    """Return a function that gives the median of a latency."""
    return lambda run: run.latencies_ms[name].p50 if name in run.latencies_ms else None


def _predicted_ms(field: str) -> _Number:
    return lambda run: None if run.predicted is None else 1e3 * float(getattr(run.predicted, field))


def _failed(report: Report) -> list[Markup]:
    if not report.failed:
        return []
    rows = [(each.series, str(each.concurrency), each.error) for each in report.failed]
    headings = (*_RUN_HEADINGS, "error")
    return [section("Points that failed", table("Points that failed", headings, rows, has_words=True))]


def _lines(runs: Sequence[RunFigures], measured: _Number, predicted: _Number) -> list[Line]:
    """Return a line for each layout, and a dashed line for its prediction if there is one."""
    lines = []
    for colour, series in enumerate(_series(runs)):
        own = [run for run in runs if run.series == series]
        for number, name, is_dashed in ((measured, series, False), (predicted, f"{series}, predicted", True)):
            points = [(float(run.concurrency), value) for run in own if (value := number(run)) is not None]
            if points:
                lines.append(Line(name=name, points=points, colour=colour, is_dashed=is_dashed))
    return lines


def _fullest(runs: Sequence[RunFigures]) -> list[RunFigures]:
    """Return for each layout the run with most requests at once."""
    return [
        max((run for run in runs if run.series == series), key=lambda run: run.concurrency)
        for series in _series(runs)
    ]


def _series(runs: Sequence[RunFigures]) -> list[str]:
    return list(dict.fromkeys(run.series for run in runs))


def _named(run: RunFigures) -> tuple[str, str]:
    return run.series, str(run.concurrency)


def _bar_name(run: RunFigures, stage: StageFigures, shown: Sequence[RunFigures]) -> str:
    return f"stage {_stage_name(stage)}" if len(shown) == 1 else f"{run.series}, stage {_stage_name(stage)}"


def _stage_name(stage: StageFigures) -> str:
    return f"{stage.replica}.{stage.stage}" if stage.replica else str(stage.stage)


def _shown(value: float | None, form: str) -> str:
    return _ABSENT if value is None else format(value, f",{form}")


def _mib(size: int | None) -> str:
    return _ABSENT if size is None else f"{size / _MIB:,.1f}"
