"""`penstock pull`, and `--download` of `penstock serve`: they download a model of the hub into the cache.

Called by `cli.program` and `cli.serve`. No other command of Penstock opens a connection to a hub. `hub` is
imported only when they download.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.cli.flags import flag
from penstock.cli.models.sizes import size_text
from penstock.cli.settings import read_keys
from penstock.cli.terminal import Invocation, one_line
from penstock.errors import ModelConfigError, UsageError
from penstock.local_models.hub_cache import MAIN
from penstock.local_models.locating import locate_model
from penstock.local_models.model_name import ModelName

if TYPE_CHECKING:
    from penstock.hub.client import HubAddress
    from penstock.hub.pulling import Pulled

_SHOWN_DIGITS = 12


def pull(
    name: str,
    /,
    *,
    revision: Annotated[str, flag("branch, tag or commit", "--revision", group="pull")] = MAIN,
    endpoint: Annotated[
        str,
        flag(
            "base address of a mirror [HF_ENDPOINT]", "--endpoint", group="pull", env="PENSTOCK_HUB_ENDPOINT"
        ),
    ] = "",
    token_file: Annotated[
        Path | None,
        flag("file with a token [HF_TOKEN]", "--token-file", group="pull", env="PENSTOCK_HUB_TOKEN_FILE"),
    ] = None,
    as_json: Annotated[bool, flag("print the result as JSON", "--json", group="pull")] = False,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """Download a model, unless it is here. Returns 0 once all of it is in the cache."""
    wanted = ModelName.of_hub(name)
    pulled = _pulled(wanted, _address(endpoint, token_file, invocation.environ), revision, invocation)
    if as_json:
        invocation.say(json.dumps(_as_values(pulled), ensure_ascii=False))
        return 0
    came = size_text(pulled.downloaded) if pulled.downloaded else "nothing"
    files = f"{len(pulled.files)} file{'s' * (len(pulled.files) > 1)}"
    invocation.say(
        f"{pulled.name} {one_line(revision)} {pulled.commit[:_SHOWN_DIGITS]}: {files}, "
        f"{size_text(pulled.size)}, {came} downloaded now",
        f"in {one_line(str(pulled.path))}",
        f"penstock serve {one_line(pulled.to_serve)}",
    )
    return 0


def download_if_absent(model: str, invocation: Invocation) -> None:
    """Download a model if its name is one of the hub and no model of this name is on this machine.

    Raises:
        HubError, DiskSpaceError: the model is not here, and cannot be downloaded.
    """
    name = ModelName.parse(model)
    if name is None or not name.is_of_hub or os.path.exists(os.path.expanduser(model)):
        return
    try:
        locate_model(model)
    except ModelConfigError as error:
        if error.code == "model_absent":
            _pulled(name, _address("", None, invocation.environ), MAIN, invocation)


def _pulled(name: ModelName, address: HubAddress, revision: str, invocation: Invocation) -> Pulled:
    from penstock.cli.models.progress import progress_on
    from penstock.hub.pulling import pull

    try:
        return pull(name, address, progress_on(invocation.stderr, time.monotonic), revision)
    except KeyboardInterrupt:
        invocation.warn("interrupted; the same command continues where it stopped.")
        raise


def _address(endpoint: str, token_file: Path | None, environ: Mapping[str, str]) -> HubAddress:
    from penstock.hub.client import PUBLIC_HUB, HubAddress

    endpoint = endpoint or environ.get("PENSTOCK_HUB_ENDPOINT") or environ.get("HF_ENDPOINT") or PUBLIC_HUB
    return HubAddress(endpoint=endpoint.rstrip("/"), token=_token(token_file))


def _token(path: Path | None) -> str | None:
    tokens = read_keys(path, "--token-file")
    if len(tokens) > 1:
        raise UsageError(
            f"--token-file {path} holds {len(tokens)} lines.",
            remedy="Write a single token into it.",
            param="token_file",
        )
    return tokens[0] if tokens else None


def _as_values(pulled: Pulled) -> dict[str, object]:
    return {
        "name": str(pulled.name),
        "revision": pulled.revision,
        "commit": pulled.commit,
        "path": str(pulled.path),
        "size": pulled.size,
        "downloaded": pulled.downloaded,
        "files": [{"path": file.path, "size": file.size, "hash": file.blob} for file in pulled.files],
    }
