"""Speculation: guessing tokens ahead, so that one step yields several.

A `Drafter` guesses what a request says next, `window_sizes` decides how much of that is worth its time, and
the scheduler (`scheduler.windows`) puts it into plans. Whether a guess was right is decided by the last stage
alone (`sample.windows`). docs/speculative-decoding.md explains how the parts fit together.
"""
