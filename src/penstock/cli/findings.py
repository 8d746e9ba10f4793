"""What a check of `penstock doctor` has found: a line of its report, and what to do about it."""

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
