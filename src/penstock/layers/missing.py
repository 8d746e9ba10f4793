"""Stand-in for a part of the model that lives on another stage (row A5). Holds no parameters."""

from __future__ import annotations

from typing import Any

from torch import nn


class MissingLayer(nn.Module):
    """Passes its first argument through.

    Args:
        return_tuple: give `(x,)`, for parts whose callers unpack.
    """

    def __init__(self, *, return_tuple: bool = False) -> None:
        super().__init__()
        self.return_tuple = return_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else next(iter(kwargs.values()))
        return (value,) if self.return_tuple else value
