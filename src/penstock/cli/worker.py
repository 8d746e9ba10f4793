"""`penstock worker`: lets this host serve stages for an engine whose head is another host.

A launcher (`torchrun`, `srun`, `mpirun` or a LeaderWorkerSet) may start it on all hosts at once. The first
process then becomes the head: it runs `penstock serve` with the words behind `--`. Called by
`cli.program`. `hosts.worker` runs in the main thread, since child processes end with the thread that started
them.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from penstock.cli.flags import flag
from penstock.cli.launched import Launched
from penstock.cli.terminal import Invocation, one_line
from penstock.config.checks import MAX_AGE_S, above_zero
from penstock.config.hosts import state_directory
from penstock.errors import UsageError
from penstock.hosts.launchers.places import LAUNCHERS, Launcher
from penstock.process.link_ports import DEFAULT_LINK_PORTS, PortRange
from penstock.process.output_thread import OutputThread

if TYPE_CHECKING:
    from penstock.hosts.station import WorkerSettings

_GROUP = "worker"


def worker(
    *serve: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    join: Annotated[str, flag("ADDRESS:PORT of the head (--listen-workers)", "--join", group=_GROUP)] = "",
    discover: Annotated[
        bool, flag("find the head in the local network (mDNS)", "--discover", group=_GROUP)
    ] = False,
    join_token_file: Annotated[
        Path | None,
        flag("file of the join token; default: ask for it", "--join-token-file", group=_GROUP),
    ] = None,
    name: Annotated[str, flag("name of this host in the cluster", "--name", group=_GROUP)] = "",
    address: Annotated[str, flag("address of this host for links", "--address", group=_GROUP)] = "",
    link_ports: Annotated[str, flag("ports for links", "--link-ports", group=_GROUP)] = str(
        DEFAULT_LINK_PORTS
    ),
    models_dir: Annotated[
        Path | None, flag("directory with models, in it or below", "--models-dir", group=_GROUP)
    ] = None,
    weights_cache: Annotated[
        Path | None, flag("directory for fetched weights", "--weights-cache", group=_GROUP)
    ] = None,
    kv_store: Annotated[
        str | None,
        flag("store for KV blocks, if the head uses one of its kind", "--kv-store", group=_GROUP),
    ] = None,
    insecure_links: Annotated[
        bool, flag("links in plain text; the head must allow it too", "--insecure-links", group=_GROUP)
    ] = False,
    state_dir: Annotated[
        Path | None, flag("directory of this host's certificate", "--state-dir", group=_GROUP)
    ] = None,
    away_limit: Annotated[
        float | None,
        flag("seconds without the head after which this worker ends", "--away-limit", group=_GROUP),
    ] = None,
    torchrun: Annotated[
        bool,
        flag("started by torchrun; host 0 serves the model after --", "--torchrun", group=_GROUP),
    ] = False,
    slurm: Annotated[bool, flag("the same, started by srun", "--slurm", group=_GROUP)] = False,
    mpi: Annotated[bool, flag("the same, started by mpirun", "--mpi", group=_GROUP)] = False,
    lws: Annotated[bool, flag("the same, in the pods of a LeaderWorkerSet", "--lws", group=_GROUP)] = False,
    invocation: Annotated[Invocation, Parameter(parse=False)],
) -> int:
    """Run the command. Returns when it is told to end: SIGTERM and Ctrl-C are not failures."""
    from penstock.cli.program import run
    from penstock.hosts.network.interfaces import own_address
    from penstock.hosts.station import WorkerSettings

    launched = Launched(
        _launcher(torchrun=torchrun, slurm=slurm, mpi=mpi, lws=lws), invocation.environ, join, discover
    )
    if launched.is_head:
        return launched.serve(serve, join_token_file, run, invocation)
    launched.require_no_words(serve)
    if away_limit is not None:
        above_zero("--away-limit", away_limit, MAX_AGE_S)
    settings = WorkerSettings(
        head=launched.head or ("", 0),
        name=name or launched.name(),
        state=state_directory(state_dir),
        address=own_address(address) if address else "",
        ports=PortRange.parse(link_ports),
        models=[] if models_dir is None else [models_dir],
        weights=weights_cache,
        store=kv_store,
        is_plain=insecure_links,
        threads_ahead=len(os.sched_getaffinity(0)),
        patience_s=launched.patience_s,
        away_limit_s=launched.away_limit_s if away_limit is None else away_limit,
    )
    return _work(settings, launched, join_token_file, invocation)


def _launcher(**is_given: bool) -> Launcher | None:
    """Return the launcher that a flag names, or None. Raises `UsageError` if two flags name one."""
    named = [launcher for launcher in LAUNCHERS if is_given[launcher]]
    if len(named) > 1:
        raise UsageError(
            f"--{named[0]} and --{named[1]} are both given.", remedy="Give the one that starts this process."
        )
    return named[0] if named else None


def _work(
    settings: WorkerSettings, launched: Launched, token_file: Path | None, invocation: Invocation
) -> int:
    from penstock.hosts.network.followed_head import found_nowhere
    from penstock.hosts.network.head_search import found_head, head_elsewhere
    from penstock.hosts.worker import Worker
    from penstock.kvstore.own_store import require_usable
    from penstock.process.child import show_threads_on_request
    from penstock.process.service_manager import service_notifier
    from penstock.process.signals import signals_of_the_end
    from penstock.trust.peer_names import require_host_name
    from penstock.trust.token_prompt import JOIN_TOKEN

    require_host_name(settings.name)
    os.environ.pop(JOIN_TOKEN, None)  # ranks need none
    if settings.store is not None:
        require_usable(settings.store)
    show_threads_on_request()
    with signals_of_the_end() as stop, closing(OutputThread(invocation.stdout, invocation.stderr)) as output:
        beside = invocation.beside(output)
        tokens = launched.tokens(token_file, output.settle)
        manager = service_notifier(invocation.environ)

        def tell(line: str) -> None:
            beside.say(one_line(line))
            manager.status(line)

        manager.ready()  # before the worker joins: its head may come hours later, or be away
        head = launched.head or found_head(tokens, tell, stop)
        if head is not None:
            find = head_elsewhere if launched.head is None else found_nowhere
            Worker(msgspec.structs.replace(settings, head=head), tokens, tell, stop, find=find).run()
    return 0
