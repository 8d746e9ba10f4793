"""The options of the executor backend `ray`. Ray itself reads the address of its cluster from RAY_ADDRESS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.errors import UsageError


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options with which Ray places the workers of an engine.

    Attributes:
        placement: spread: each host on a node of its own; pack: on as few nodes as can be.
        resources: what Ray reserves for each host, such as {"CPU": 8, "GPU": 1}; empty: a CPU, and as many
            GPUs as each node has.
        runtime_env: a runtime environment of Ray, for the workers.
        placement_group: hexadecimal id of an existing placement group; the head gets its first bundle, and
            each worker gets another one. "": Penstock makes a group.
        node_address: address of the head's node; Ray needs it only if several nodes run on one machine.
    """

    placement: Literal["spread", "pack"] = "spread"
    resources: Mapping[str, float] = {}
    runtime_env: Mapping[str, Any] = {}
    placement_group: str = ""
    node_address: str = ""


def ray_options(text: str) -> RayOptions:
    """Return the options of a JSON object.

    Args:
        text: the value of `--ray`.

    Raises:
        UsageError: the text is not such an object, or an amount of a resource is not above 0.
    """
    try:
        options = msgspec.json.decode(text, type=RayOptions)
        if any(not 0 < amount < 1e9 for amount in options.resources.values()):
            raise msgspec.ValidationError("an amount of a resource must be above 0")
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"--ray {text!r} cannot be read: {error}.",
            remedy='Write a JSON object, such as {"placement": "pack", "resources": {"CPU": 8, "GPU": 1}}.',
            param="ray",
        ) from error
    return options
