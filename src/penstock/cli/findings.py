"""The finding of a check of `penstock doctor`: a line of its report, and its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `remedy` is empty exactly when all is well."""

    level: Level
    subject: str
    text: str
    remedy: str = ""
