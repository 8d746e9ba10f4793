"""The flags of the reports that all benchmarks make, and their delivery as an HTML file or printed JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock import __version__
from penstock.cli.bench.results import write_text
from penstock.cli.flags import flag
from penstock.cli.terminal import Invocation
from penstock.config.engine import EngineConfig
from penstock.errors import PenstockError
from penstock.reports.figures import FailedRun, PredictedFigures, Report, RunFigures, report_json

HERE, OFF = "here", "off"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFlags:
    """The reports that are made of a benchmark besides the lines that it prints."""

    html: Annotated[Path | None, flag("file for a report with charts", "--html", group="report")] = None
    json: Annotated[bool, flag("print only the report, as JSON", "--json", group="report")] = False
    predict: Annotated[
        str, flag("compare with predictions: here, off, DEVICES", "--predict", group="report")
    ] = OFF

    @property
    def are_wanted(self) -> bool:
        """Whether a report is made."""
        return self.json or self.html is not None

    @property
    def wants_predictions(self) -> bool:
        """Whether what was measured is to be compared with predictions."""
        return self.predict.strip().lower() != OFF

    def say(self, invocation: Invocation) -> Callable[[str], None]:
        """Return the function that prints a line for people, and nothing if the output is to be JSON."""
        return (lambda line: None) if self.json else invocation.say

    def predictions(
        self,
        config: Callable[[], EngineConfig],
        concurrencies: Sequence[int],
        lengths: tuple[int, int],
        invocation: Invocation,
        layers: Sequence[int] | None = None,
    ) -> dict[int, PredictedFigures]:
        """Return predictions by the number of requests at once. If they fail, warn and return none.

        Args:
            config: returns the engine's config. It may raise, since the model of a server need not be here.
            concurrencies: the numbers of requests at once.
            lengths: tokens of a typical prompt and output.
            layers: number of layers of each stage; None: as the partition says.
        """
        if not self.wants_predictions:
            return {}
        from penstock.cli.bench.predicting import predictions

        try:
            return predictions(
                config(), self.predict, concurrencies, lengths, self.say(invocation), layers=layers
            )
        except PenstockError as error:
            invocation.warn(f"predictions are not available: {error}")
            return {}

    def deliver(self, report: Report, invocation: Invocation) -> None:
        """Write the HTML file and print the JSON, as wanted. Raises `UsageError` if writing fails."""
        if self.html is not None:
            from penstock.reports.page import report_page

            write_text(self.html, report_page(report))
        if self.json:
            invocation.say(report_json(report))
        elif self.html is not None:
            invocation.say(f"Report: {self.html}")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReportFlags(ReportFlags):
    """The reports of a benchmark whose engine runs on this machine."""

    predict: Annotated[
        str, flag("compare with predictions: here, off, DEVICES", "--predict", group="report")
    ] = HERE


def new_report(
    title: str,
    model: str,
    settings: Mapping[str, object],
    runs: Sequence[RunFigures],
    *,
    failed: Sequence[FailedRun] = (),
    notes: Sequence[str] = (),
) -> Report:
    """Return a report that is dated now. Values of `settings` are shown as text."""
    return Report(
        title=title,
        model=model,
        version=__version__,
        made_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        settings={name: str(value) for name, value in settings.items()},
        runs=list(runs),
        failed=list(failed),
        notes=list(notes),
    )
