"""`penstock worker`: lets this host serve stages of a model whose head is elsewhere.

Called by `cli`; runs `hosts.worker` in the main thread, since children die with the thread that made them.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.cli.flags import flag
from penstock.cli.output_thread import OutputThread
from penstock.cli.terminal import Invocation, one_line
from penstock.config.hosts import own_host_name, parse_address, state_directory
from penstock.errors import UsageError
from penstock.process.link_ports import DEFAULT_LINK_PORTS, PortRange

_GROUP = "worker"


def worker(
    *,
    join: Annotated[str, flag("ADDRESS:PORT of the head (--listen-workers)", "--join", group=_GROUP)] = "",
    join_token_file: Annotated[
        Path | None,
        flag("holds the join token; it is asked for without", "--join-token-file", group=_GROUP),
    ] = None,
    name: Annotated[str, flag("of this host, among all", "--name", group=_GROUP)] = "",
    address: Annotated[str, flag("of this host, for links", "--address", group=_GROUP)] = "",
    link_ports: Annotated[str, flag("ports for links", "--link-ports", group=_GROUP)] = str(
        DEFAULT_LINK_PORTS
    ),
    models_dir: Annotated[
        Path | None, flag("with models, in it or below", "--models-dir", group=_GROUP)
    ] = None,
    weights_cache: Annotated[
        Path | None, flag("where fetched weights are kept", "--weights-cache", group=_GROUP)
    ] = None,
    kv_store: Annotated[
        str | None,
        flag("where KV blocks are kept, if the head has such a store", "--kv-store", group=_GROUP),
    ] = None,
    insecure_links: Annotated[
        bool, flag("links in plain text; the head must say so too", "--insecure-links", group=_GROUP)
    ] = False,
    state_dir: Annotated[
        Path | None, flag("where this host's certificate is kept", "--state-dir", group=_GROUP)
    ] = None,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """The command. Returns when it is told to end, wherever it is: SIGTERM and Ctrl-C are no failure."""
    from penstock.hosts.network.interfaces import own_address
    from penstock.hosts.station import WorkerSettings
    from penstock.hosts.worker import Worker
    from penstock.kvstore.own_store import require_usable
    from penstock.process.child import show_threads_on_request
    from penstock.process.signals import signals_of_the_end
    from penstock.trust.peer_names import require_host_name
    from penstock.trust.token_prompt import GivenTokens

    if not join:
        raise UsageError(
            "no head is given.",
            remedy="Use `penstock worker --join ADDRESS:PORT`, as `penstock serve` shows it on the head.",
            param="join",
        )

    settings = WorkerSettings(
        head=parse_address(join, "--join"),
        name=own_host_name(name),
        state=state_directory(state_dir),
        address=own_address(address) if address else "",
        ports=PortRange.parse(link_ports),
        models=[] if models_dir is None else [models_dir],
        weights=weights_cache,
        store=kv_store,
        is_plain=insecure_links,
        threads_ahead=len(os.sched_getaffinity(0)),
    )
    require_host_name(settings.name)
    if kv_store is not None:
        require_usable(kv_store)
    show_threads_on_request()
    with signals_of_the_end() as stop, closing(OutputThread(invocation)) as output:
        tokens = GivenTokens(join_token_file, output.settle)
        Worker(settings, tokens, lambda line: output.invocation.say(one_line(line)), stop).run()
    return 0
