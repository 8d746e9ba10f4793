"""Imports every script under `benchmarks/`, and asks those with a command line for its help.

A program of `unit/test_benchmarks.py`, in a process of its own: scripts have the names of common words, and
some set up the process for themselves. Writes, as one JSON object, what came of each: "help", "imported",
"needs NAME" for one that is for an environment with other libraries, or the error.

    python tests/support/benchmark_help.py
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import traceback
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FOLDERS = (BENCHMARKS, BENCHMARKS / "peers")
OTHERS = ("gguf", "llama_cpp", "openvino", "vllm")  # in environments of peers, never in ours


def outcome(script: Path) -> str:
    """Import it by its name; `main` must answer `--help` before it does anything. Scripts of peers read
    requests from their input, and are imported only."""
    sys.argv = [str(script), "--help"]
    text = io.StringIO()
    try:
        module = importlib.import_module(script.stem)
        assert module.__file__ == str(script), f"{script.stem} is {module.__file__}"
        if script.parent != BENCHMARKS or not hasattr(module, "main"):
            return "imported"
        with contextlib.redirect_stdout(text):
            module.main()
    except ModuleNotFoundError as error:
        return f"needs {error.name}" if error.name in OTHERS else traceback.format_exc()
    except SystemExit as done:
        if done.code in (0, None) and text.getvalue().startswith("usage:"):
            return "help"
        return f"ended with {done.code}: {text.getvalue()}"
    except BaseException:
        return traceback.format_exc()
    return "went on after --help"


if __name__ == "__main__":
    sys.path[:0] = map(str, FOLDERS)
    scripts = [script for folder in FOLDERS for script in sorted(folder.glob("*.py"))]
    print(json.dumps({str(script.relative_to(BENCHMARKS)): outcome(script) for script in scripts}))
