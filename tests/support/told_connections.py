"""Lets connections under TLS tell where they were made.

That one was not closed is said when the garbage collector finds it, mostly in another test. The warning shows
the connection as `repr` does, and with it the way to the line that has made it.
"""

from __future__ import annotations

import ssl
import sys
from pathlib import Path
from types import FrameType

NUM_PLACES = 6
_ROOT = str(Path(__file__).resolve().parents[2])


class ToldSocket(ssl.SSLSocket):
    """A connection whose `repr` ends with the places in this repository that have led to it."""

    def __new__(cls, *args: object, **kwargs: object) -> ToldSocket:
        made = super().__new__(cls)
        made.places = " < ".join(_places(sys._getframe(1)))
        return made

    places: str

    def __repr__(self) -> str:
        return f"{super().__repr__()} made at {self.places}"


def tell_connections() -> None:
    """Have each context make connections that tell."""
    ssl.SSLContext.sslsocket_class = ToldSocket


def _places(frame: FrameType | None) -> list[str]:
    """Return where the innermost calls of our own are, the innermost first."""
    places: list[str] = []
    while frame is not None and len(places) < NUM_PLACES:
        path = frame.f_code.co_filename
        if path.startswith(_ROOT) and "/.venv/" not in path:
            places.append(f"{path.removeprefix(_ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return places
