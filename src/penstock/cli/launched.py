"""Decides whether a `penstock worker` that SLURM or another launcher started becomes the head or a worker.

The first process becomes the head: it runs `penstock serve` with the words that its user has put behind `--`,
and with flags that follow from the launcher. The other processes join it as workers. They get the token from
the file that the head writes, which all hosts must see. They wait `AWAIT_HEAD_S` for the head to start, and
end when it has been away for `HEAD_AWAY_S` or `--away-limit`, since a launcher waits for all that it has
started. Used by `cli.worker`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.cli.terminal import Invocation
from penstock.config.hosts import DEFAULT_PORT, own_host_name, parse_address
from penstock.errors import UsageError
from penstock.hosts.launchers.places import Launcher, Place, place_of
from penstock.trust.token_prompt import AwaitedTokens, GivenTokens, Tokens, environment_token

AWAIT_HEAD_S = 600.0  # the head's host may be the last to be ready
HEAD_AWAY_S = 30.0  # longer than a head takes to restart, and short for a user who waits for the job's end

Run = Callable[[Sequence[str], Invocation], int]


class Launched:
    """One process of `penstock worker`, which a launcher has started among several, or a user alone.

    Args:
        launcher: the launcher that the command line names; None: a user has started the process.
        environment: environment of the process.
        join: address of the head, as the user gives it; "": the launcher's first host is the head.
        discover: whether to look for the head in the local network.

    Raises:
        UsageError: the environment is not that of the launcher, or the head's address is not known.

    Attributes:
        head: address of the head; None: look for it in the local network.
        patience_s: seconds to wait for the head to start.
        away_limit_s: seconds without the head after which the worker ends, once it has joined.
    """

    def __init__(
        self, launcher: Launcher | None, environment: Mapping[str, str], join: str, discover: bool = False
    ) -> None:
        self._place = Place(1, 2) if launcher is None else place_of(launcher, environment)
        self._is_launched = launcher is not None
        self._environment = environment
        self.patience_s = AWAIT_HEAD_S if self._is_launched else 0.0
        self.away_limit_s = HEAD_AWAY_S if self._is_launched else math.inf
        self.head: tuple[str, int] | None = None
        if discover:
            _refuse_beside_discover(launcher, join)
        else:
            address = join or self._place.first_host or _refuse_without_head(launcher)
            self.head = parse_address(address, "--join")

    @property
    def is_head(self) -> bool:
        return self._place.number == 0

    def name(self) -> str:
        """Return this host's name: the launcher's, or the machine's with the process's number if launched."""
        own = self._place.host or own_host_name("")
        return own if self._place.host or not self._is_launched else f"{own}-{self._place.number}"

    def tokens(self, path: Path | None, settle: Callable[[], object]) -> Tokens:
        """Return the source of the join token: the named file, else the environment, else the user.

        A process that was launched cannot ask a user. It needs the token in a file, for which it waits, or in
        the environment.

        Args:
            path: the named file; None: no file is named.
            settle: returns when all output so far is written, as for `GivenTokens`.
        """
        if token := environment_token(path, self._environment):
            return token
        return AwaitedTokens(_shared(path), AWAIT_HEAD_S) if self._is_launched else GivenTokens(path, settle)

    def require_no_words(self, words: Sequence[str]) -> None:
        """Raise `UsageError` for words behind `--`, unless a launcher has started this process."""
        if words and not self._is_launched:
            raise UsageError(
                f"`penstock worker` takes no {words[0]!r}: the head decides what is served.",
                remedy="Leave that out; see `penstock worker --help`.",
            )

    def serve(self, words: Sequence[str], token_file: Path | None, run: Run, invocation: Invocation) -> int:
        """Run `penstock serve` as the head, and return its exit code. A host that is alone has no workers.

        Args:
            words: the words behind `--`, the model first.
            token_file: file that the head writes the join token to.
            run: runs a command line of `penstock`.
        """
        if not words:
            raise UsageError(
                "this is the first host, and no model to serve is given.",
                remedy="Name the model after `--`: `penstock worker --slurm --join-token-file F -- MODEL "
                "--pp 2`.",
            )
        own: list[str] = []
        if self._place.num_hosts > 1:
            assert self.head is not None
            own += ["--hosts", str(self._place.num_hosts), "--join-token-file", str(_shared(token_file))]
            own += ["--listen-workers", f"0.0.0.0:{self.head[1]}"]
        return run(["serve", *words, *own], replace(invocation, origins={}))


def _shared(token_file: Path | None) -> Path:
    """Return the token's file. Raises `UsageError` if there is none: no user can be asked on these hosts."""
    if token_file is None:
        raise UsageError(
            "no join token is given.",
            remedy="Name a file that all hosts can read with --join-token-file; the first host writes it.",
            param="join_token_file",
        )
    return token_file


def _refuse_beside_discover(launcher: Launcher | None, join: str) -> None:
    """Raise `UsageError` if the head's address is given, by `--join` or by a launcher."""
    given = "--join" if join else f"--{launcher}"
    if join or launcher:
        raise UsageError(
            f"--discover and {given} are both given.",
            remedy=f"Leave --discover out: {given} names the head.",
            param="discover",
        )


def _refuse_without_head(launcher: Launcher | None) -> str:
    if launcher is None:
        raise UsageError(
            "no head is given.",
            remedy="Use `penstock worker --join ADDRESS:PORT`, as the head shows it; or --discover.",
            param="join",
        )
    raise UsageError(
        f"{launcher} does not name the host of the first process.",
        remedy=f"Name that host on all hosts: `penstock worker --{launcher} --join HOST:{DEFAULT_PORT}`.",
        param="join",
    )
