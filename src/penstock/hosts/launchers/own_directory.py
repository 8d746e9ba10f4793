"""Makes a directory for the identity and the certificates of an engine whose workers Ray starts.

Every process of such an engine may be killed, and Ray always ends its actors like that. What they leave is
deleted by the next engine on the same host.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from penstock.trust.held_directories import HeldDirectory, delete_unheld
from penstock.trust.private_files import make_private_directory


def own_directory(name: str) -> HeldDirectory:
    """Make and hold the directory of this name among the temporary files; delete others that nobody holds.

    Raises:
        UsageError: the directory cannot be used, or other users may enter it.
    """
    parent = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    make_private_directory(parent)
    make_private_directory(parent / "ray")
    held = HeldDirectory(parent / "ray" / name)
    delete_unheld(parent / "ray")
    return held
