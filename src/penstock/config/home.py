"""Expands `~` in paths, even where there is no home directory, as in a container.

Used for folders that Penstock needs. Where a folder may be absent, `os.path.expanduser` is enough.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import UsageError


def home_path(path: str | os.PathLike[str], remedy: str) -> Path:
    """Return a path with the home directory in place of `~`.

    Args:
        remedy: how to do without a home directory.

    Raises:
        UsageError: the path needs a home directory, and there is none, as in a container.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"{os.fspath(path)} is not known: HOME is not set, or there is no such user.",
            remedy=remedy,
            code="no_home",
        ) from error
