"""The process of a draft model: `python -m penstock.drafting.drafter_process`.

The process loads the model as a rank with all layers, and reports that it is ready. Then it guesses
(`drafting.draft_turns`) whatever the core asks for over its socket, until the socket is closed. Started by
`drafting.drafter_child`. It sets up the process before it imports torch.
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
from penstock.process.torch_import import cheap_torch_import

SOCKET_OPTION = "--socket-fd"
# A step of so few tokens is bound by reading weights, so its time is that of one token.
_FEW_TOKENS = 16
# Weights of the newest step in the time of a token. Faster steps weigh more: the time that counts is the one
# while stages wait for guesses, and a step takes longer while stages compute beside it.
_FASTER_WEIGHT, _SLOWER_WEIGHT = 0.5, 0.03
_NUM_TRIALS = 3  # tokens that are guessed before the first request, to measure their time

Returned = TypeVar("Returned")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one core; return the exit code."""
    return run_child(entry_points.DRAFTER, arguments, DrafterProcessConfig, _serve, more=[SOCKET_OPTION])


def _serve(config: DrafterProcessConfig, status: StatusWriter, options: argparse.Namespace) -> int:
    enter_child("penstock drafter", config)
    bound_thread_pools(config.drafter.rank.threads)
    # Here and not above: torch reads its environment when it is imported.
    with cheap_torch_import():
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
                if not turns.has_work:  # the text has as many guesses as are wanted, or can have no more
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
    """Guess behind a made-up text; return the least seconds that a token took."""
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
