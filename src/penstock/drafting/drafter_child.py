"""Starts the process of a draft model, and ends it.

Called where the core is made. Linux ends the process when the thread ends that has started it. Torch-free.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from penstock.drafting.draft_wire import DraftSocket, Guessed, draft_sockets
from penstock.errors import PenstockError, WaitTimeoutError, error_from_info
from penstock.hosts.local_process import spawn
from penstock.process import entry_points
from penstock.process.child import encode_config
from penstock.process.config import DrafterConfig, DrafterProcessConfig
from penstock.process.readiness import await_readable

_POLL_S = 0.1
_END_S = 1.0


class DrafterChild:
    """A child process with a draft model. Implements `model_drafter.DraftingProcess`.

    Args:
        config: the draft model, and how it is run.

    Attributes:
        socket: the core's end of the connection to the process.
    """

    def __init__(self, config: DrafterConfig) -> None:
        with ExitStack() as theirs:
            own, other = draft_sockets()
            theirs.callback(other.close)
            self.socket: DraftSocket[Guessed] = DraftSocket(own, Guessed)
            self._member = spawn(
                entry_points.DRAFTER,
                encode_config(DrafterProcessConfig(drafter=config, parent_pid=os.getpid())),
                name="drafter",
                inherit=[other.fileno()],
                arguments=["--socket-fd", str(other.fileno())],
            )
        self._is_closed = False

    def await_ready(self, limit_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until the model is loaded. The process is ended if that fails.

        Args:
            limit_s: the longest wait, in seconds.
            is_over: returns True when the model is not needed any more; then the call returns.

        Raises:
            PenstockError: the model could not be loaded; the error is the process' own.
            WaitTimeoutError: loading takes longer than `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        while not (self._member.is_ready or is_over()):
            await_readable(list(self._member.sources), _POLL_S)
            if (error := self.why_ended()) is not None:
                raise self._named(error)
            if time.monotonic() > deadline:
                raise self._named(WaitTimeoutError(f"it had not loaded after {limit_s:g} s."))

    def _named(self, error: PenstockError) -> PenstockError:
        """End the process; return the error with the note that the draft model has it, not the main model."""
        self.close()
        message, param = f"the draft model: {error.message}", "speculative_model"
        return error_from_info(msgspec.structs.replace(error.info(), message=message, param=param))

    def why_ended(self) -> PenstockError | None:
        """Return the error that the process has reported, or how it ended; None: it runs."""
        self._member.read_status()
        has_ended = self._member.failure is not None or self._member.exit_code is not None
        return error_from_info(self._member.end()) if has_ended else None

    def close(self) -> None:
        """End the process, whatever it does. May be called twice.

        It waits up to a second for the end: a process that hangs in the kernel does not end at once.
        """
        if not self._is_closed:
            self._is_closed = True
            self._member.kill_now()
            self.socket.close()
            reaping = threading.Thread(target=self._member.close, name="reaps the drafter", daemon=True)
            reaping.start()
            reaping.join(_END_S)
