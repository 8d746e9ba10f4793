"""The process of a draft model: `python -m penstock.drafting.drafter_process`.

Loads the model as a rank with all layers, says that it is ready, and guesses (`drafting.draft_turns`)
whatever the core asks for over its socket, until that is closed. Started by `drafting.drafter_child`. Sets up
the process before torch is imported.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.drafting.draft_turns import DraftTurns
from penstock.drafting.draft_wire import MOST_GUESSES, Ask, Asked, DraftSocket, Guessed
from penstock.errors import LinkClosedError
from penstock.process import entry_points
from penstock.process.child import Ready, StatusWriter, bound_thread_pools, enter_child, leave, run_child
from penstock.process.config import DrafterProcessConfig

SOCKET_OPTION = "--socket-fd"
_FEW_TOKENS = 16  # of a step: it is bound by reading weights, and tells what one token takes
# Of the newest step. What counts is the time while the stages wait for guesses; beside them it takes longer.
_FASTER_WEIGHT, _SLOWER_WEIGHT = 0.5, 0.03
_NUM_TRIALS = 3  # tokens, before the first request

Returned = TypeVar("Returned")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one core; return the exit code."""
    return run_child(entry_points.DRAFTER, arguments, DrafterProcessConfig, _serve, more=[SOCKET_OPTION])


def _serve(config: DrafterProcessConfig, status: StatusWriter, options: argparse.Namespace) -> int:
    enter_child("penstock drafter", config)
    bound_thread_pools(config.drafter.rank.threads)
    # Here and not above: torch reads its environment when it is imported.
    from penstock.drafting.draft_model import open_turns

    turns = open_turns(config.drafter)
    token_s = _warm_up(turns)
    connection = DraftSocket(socket.socket(fileno=options.socket_fd), Asked)
    status.write(Ready())
    try:
        connection.send(Guessed(token_s=token_s))
        while True:
            for asked in connection.receive(wait=not turns.has_work):
                turns.take(asked)
                if not turns.has_work:  # the guesses that there are do, or there can be no more
                    connection.send(Guessed(turns.take_refused(), token_s))
            if turns.has_work:
                seconds, (guesses, num_tokens) = _timed(turns.turn)
                if 0 < num_tokens <= _FEW_TOKENS:
                    token_s += (_FASTER_WEIGHT if seconds < token_s else _SLOWER_WEIGHT) * (seconds - token_s)
                guesses += turns.take_refused()
                for first in range(MOST_GUESSES, len(guesses), MOST_GUESSES):
                    connection.send(Guessed(guesses[first : first + MOST_GUESSES], token_s, is_idle=False))
                connection.send(Guessed(guesses[:MOST_GUESSES], token_s, not turns.has_work))
    except LinkClosedError:
        return 0


def _warm_up(turns: DraftTurns) -> float:
    """Guess behind a made-up text; return the seconds of a token then."""
    text = [0] * _FEW_TOKENS
    turns.take(Asked([Ask(request=-1, start=0, token_ids=text, wanted=_NUM_TRIALS, prompt_len=len(text))]))
    seconds = [_timed(turns.turn)[0] for _ in range(_NUM_TRIALS)]
    turns.take(Asked(forgotten=[-1]))
    return min(seconds)


def _timed(call: Callable[[], Returned]) -> tuple[float, Returned]:
    began = time.perf_counter()
    returned = call()
    return time.perf_counter() - began, returned


if __name__ == "__main__":
    leave(main())
