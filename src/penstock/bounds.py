"""The bounds on the numbers that another process or host sends: decoding refuses what is beyond them.

JSON has integers of any number of digits. Without a bound, such an integer is noticed only where it is first
divided, shown or sent on, and the error arises there. Every bound here is far above anything that occurs. The
types of messages use the bounds in their annotations.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # bytes too; a float holds each of these exactly
Small = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]  # numbers of members, stages and epochs
LayerNumber = Annotated[int, msgspec.Meta(ge=0, le=(1 << 16) - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]  # -1: there is no token
Port = Annotated[int, msgspec.Meta(ge=0, le=(1 << 16) - 1)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]  # of a monotonic clock: 146 years
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]  # a duration, or the time since 1970
Speed = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]  # bytes a second
Word = Annotated[str, msgspec.Meta(max_length=256)]  # a name, a kind or an address
Sentence = Annotated[str, msgspec.Meta(max_length=2000)]
