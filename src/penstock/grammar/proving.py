"""Finds out whether a request's grammar can be used, before the request is sent to the core.

The API process (`server.routes.grammar_checks`) and `llm` call it. To prove a grammar means to build what the
last stage will build, with the same limits of work, and to make the first mask. That happens in another
process, which may fail without harm (`grammar.proving_process`). Such a process is started when a grammar
finds none idle. A thread waits for the answer about each grammar. Answers are kept, unless the next try may
bring another one: after a timeout, or if no process could be started.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.config.limits import GrammarLimits
from penstock.errors import (
    ErrorInfo,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    error_from_info,
)
from penstock.grammar.frames import LENGTH_BYTES, ProofAnswer, framed
from penstock.grammar.schema_bounds import check_bounds, check_schema
from penstock.process import entry_points
from penstock.process.readiness import await_readable
from penstock.request import StructuredOutputs

OPEN_S = 30.0  # for a process to start and read the vocabulary
# For a free thread. A grammar holds its thread for `REAL_SECONDS` times the limit of CPU time at most, beside
# the time that a process takes to start.
TURN_S = 10.0
REAL_SECONDS = 4  # that may pass for one second of CPU time, on a machine with other work
_MAX_ANSWER_BYTES = 1 << 20
_ENTRY_BYTES = 256  # about how much memory a kept answer takes beside its key


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarModel:
    """The model that is to write texts of a grammar: its directory or GGUF file, and what ends its texts."""

    directory: Path
    eos_token_ids: tuple[int, ...]


class ProvingProcess(Protocol):
    """A process in which grammars are tried, one at a time."""

    def open(self) -> ErrorInfo | None:
        """Wait until the process is ready; return why this model cannot have structured output, or None.

        Raises `ProcessEndedError`.
        """
        ...

    def ask(self, structured: StructuredOutputs) -> ErrorInfo | None:
        """Return why a grammar cannot be used; None: it can. Raises `ProcessEndedError`."""
        ...

    def close(self) -> None:
        """End the process, whatever it does."""
        ...


class ProcessEndedError(Exception):
    """The process has ended before it gave an answer, or gave none in time.

    Args:
        is_late: the time was over, be it real time or the process's CPU time.
    """

    def __init__(self, *, is_late: bool) -> None:
        super().__init__("too late" if is_late else "ended")
        self.is_late = is_late


class ChildProcess:
    """A `ProvingProcess` that is a child of this process.

    Args:
        model: the model whose vocabulary the process reads.
        seconds: CPU time for each grammar.
    """

    def __init__(self, model: GrammarModel, seconds: float) -> None:
        eos = [str(token_id) for token_id in model.eos_token_ids]
        options = ["--directory", str(model.directory), "--seconds", str(seconds), "--eos", *eos]
        self._seconds = seconds
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", entry_points.GRAMMAR_PROVING, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's interrupt is for the server, which drains
        )

    def open(self) -> ErrorInfo | None:
        return self._answer(OPEN_S)

    def ask(self, structured: StructuredOutputs) -> ErrorInfo | None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(framed(structured))
            stdin.flush()
        except OSError:
            raise ProcessEndedError(is_late=False) from None
        return self._answer(REAL_SECONDS * self._seconds)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _answer(self, seconds: float) -> ErrorInfo | None:
        deadline = time.monotonic() + seconds
        length = int.from_bytes(self._read(LENGTH_BYTES, deadline), "little")
        if length > _MAX_ANSWER_BYTES:
            raise ProcessEndedError(is_late=False)
        return msgspec.msgpack.decode(self._read(length, deadline), type=ProofAnswer).error

    def _read(self, size: int, deadline: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        received = b""
        while len(received) < size:
            ready = await_readable([stdout], deadline - time.monotonic())
            piece = stdout.read1(size - len(received)) if ready else b""  # type: ignore[attr-defined]
            if not piece:
                raise ProcessEndedError(is_late=not ready or self._was_late())
            received += piece
        return received

    def _was_late(self) -> bool:
        """Return whether the system has ended the process because its CPU time was used up."""
        return self._process.wait() == -signal.SIGPROF


class _Proof:
    """The proof of one grammar, under way. Several requests may wait for it.

    Attributes:
        started: done once a process begins with the grammar, or once `error` is about to be done.
        error: why the grammar cannot be used; None: it can.
    """

    def __init__(self) -> None:
        self.started: Future[None] = Future()
        self.error: Future[ErrorInfo | None] = Future()


class GrammarProver:
    """Proves grammars for one model. Any thread may ask.

    Args:
        model: None if it cannot have structured output.
        limits: limits of the size of a grammar, and of the work to prove grammars.
        make_process: starts a process for this model, with the seconds of CPU time for each grammar.
    """

    def __init__(
        self,
        model: GrammarModel | None,
        limits: GrammarLimits,
        make_process: Callable[[GrammarModel, float], ProvingProcess] = ChildProcess,
    ) -> None:
        self._model = model
        self._limits = limits
        self._make_process = make_process
        self._pool = ThreadPoolExecutor(limits.max_compiling, thread_name_prefix="grammar")
        self._lock = threading.Lock()  # guards all that is assigned below
        self._idle: list[ProvingProcess] = []
        self._is_closed = False
        self._under_way: dict[bytes, _Proof] = {}
        self._known = _Known(limits.grammar_cache_bytes)

    def check_schema(self, schema: str) -> None:
        """Raise `InvalidRequestError` if a schema that becomes part of a grammar is out of bounds.

        Nothing is built. The length of the schema is not checked.
        """
        check_schema(schema, self._limits)

    async def prove(self, structured: StructuredOutputs) -> None:
        """Wait until it is known that a grammar can be used.

        Raises:
            InvalidRequestError: the grammar is too large, wrong, unsatisfiable or not supported, or takes too
                long to build.
            OverloadedError: too many grammars wait, or this one has waited too long.
            UnavailableError: no process for the grammar can be started, or this prover was closed.
        """
        check_bounds(structured, self._limits)
        await self._prove(structured)

    async def prove_made(self, structured: StructuredOutputs) -> None:
        """Prove a grammar that Penstock has made of parts whose bounds were checked, one by one.

        The bounds of the whole are not checked again. Raises as `prove`.
        """
        await self._prove(structured)

    async def _prove(self, structured: StructuredOutputs) -> None:
        proof = self._begin(structured)
        if proof is not None:
            try:
                await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(proof.started)), TURN_S + OPEN_S)
            except TimeoutError:
                raise _busy() from None
            _raise(await asyncio.shield(asyncio.wrap_future(proof.error)))

    def prove_now(self, structured: StructuredOutputs) -> None:
        """Do `prove` for callers without an event loop."""
        check_bounds(structured, self._limits)
        proof = self._begin(structured)
        if proof is not None:
            try:
                proof.started.result(TURN_S + OPEN_S)
            except FutureTimeoutError:
                raise _busy() from None
            _raise(proof.error.result())

    def close(self) -> None:
        """End idle processes now, and others after their answer. Callers that wait still get an answer."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()
        self._pool.shutdown(wait=False)

    def _begin(self, structured: StructuredOutputs) -> _Proof | None:
        """Return the proof to wait for; None if the grammar is known to be usable.

        If it is known that the grammar cannot be used, that error is raised.
        """
        if self._model is None:
            raise InvalidRequestError(
                "this model cannot give structured output: it has no tokenizer.",
                param="structured_outputs",
                code="unsupported_by_model",
            )
        key = msgspec.msgpack.encode(structured)
        with self._lock:
            if key in self._known:
                _raise(self._known.get(key))
                return None
            proof = self._under_way.get(key)
            if proof is None:
                self._require_room()
                proof = _Proof()
                try:
                    self._pool.submit(self._run, key, structured, proof, self._model)
                except RuntimeError as error:  # no thread can be started
                    raise _unstarted(error) from error
                self._under_way[key] = proof  # only now: no request may wait for what no thread does
            return proof

    def _require_room(self) -> None:
        if self._is_closed:
            raise UnavailableError("the engine was shut down; it builds no more grammars.")
        if len(self._under_way) >= self._limits.max_compiling + self._limits.max_compile_waiting:
            raise _busy()

    def _run(self, key: bytes, structured: StructuredOutputs, proof: _Proof, model: GrammarModel) -> None:
        """Prove a grammar, in a thread of the pool, and give the answer to all callers that wait for it."""
        with self._lock:
            if self._under_way.get(key) is not proof:
                return  # `submit` had no thread for it, but left it in the queue; the caller got an error
        is_certain = True
        try:
            error = self._asked(structured, proof, model)
        except ProcessEndedError as ended:
            error = self._too_much(is_late=ended.is_late)
            is_certain = not ended.is_late  # what was slow under load may be tried again
        except Exception as other:  # the process could not be started
            error = _unstarted(other).info()
            is_certain = False
        with self._lock:
            del self._under_way[key]
            if is_certain:
                self._known.put(key, error)
        if not proof.started.done():
            proof.started.set_result(None)
        proof.error.set_result(error)

    def _asked(self, structured: StructuredOutputs, proof: _Proof, model: GrammarModel) -> ErrorInfo | None:
        """Return the answer of an idle process, or of a new one.

        If an idle process ends before its time is over, a new one gets the grammar too: the idle one may have
        ended before, for another reason.
        """
        process = self._idle_process()
        if process is not None:
            proof.started.set_result(None)
            try:
                return self._answer_of(process, structured)
            except ProcessEndedError as ended:
                if ended.is_late:
                    raise
        process = self._make_process(model, self._limits.compile_timeout_s)
        try:
            error = process.open()
        except BaseException as failed:
            process.close()
            if isinstance(failed, ProcessEndedError):
                raise RuntimeError("it ended while it read the vocabulary") from None
            raise
        if error is not None:
            process.close()
            return error
        if not proof.started.done():
            proof.started.set_result(None)
        return self._answer_of(process, structured)

    def _idle_process(self) -> ProvingProcess | None:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("it was closed")
            return self._idle.pop() if self._idle else None

    def _answer_of(self, process: ProvingProcess, structured: StructuredOutputs) -> ErrorInfo | None:
        """Return the answer of a process; keep the process for the next grammar if it lives."""
        is_good = False
        try:
            error = process.ask(structured)
            is_good = True
        finally:
            self._give_back(process, is_good)
        return error

    def _give_back(self, process: ProvingProcess, is_good: bool) -> None:
        with self._lock:
            is_kept = is_good and not self._is_closed
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            process.close()

    def _too_much(self, *, is_late: bool) -> ErrorInfo:
        seconds = self._limits.compile_timeout_s
        what = f"takes longer than {seconds:g} s to build" if is_late else "takes too much memory to build"
        return InvalidRequestError(
            f"structured output: the grammar {what}.",
            remedy="Simplify the grammar: fewer alternatives and patterns, smaller numbers, less nesting.",
            param="structured_outputs",
            code="grammar_too_complex",
        ).info()


class _Known:
    """The known answers about grammars; the longest unused is forgotten when they take too much room."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._errors: OrderedDict[bytes, ErrorInfo | None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._errors

    def get(self, key: bytes) -> ErrorInfo | None:
        self._errors.move_to_end(key)
        return self._errors[key]

    def put(self, key: bytes, error: ErrorInfo | None) -> None:
        self._errors[key] = error
        self._num_bytes += len(key) + _ENTRY_BYTES
        while self._num_bytes > self._max_bytes:
            oldest, _ = self._errors.popitem(last=False)
            self._num_bytes -= len(oldest) + _ENTRY_BYTES


def _raise(error: ErrorInfo | None) -> None:
    if error is not None:
        raise error_from_info(error)


def _unstarted(why: Exception) -> UnavailableError:
    return UnavailableError(f"the process that builds grammars cannot start: {why}.")


def _busy() -> OverloadedError:
    return OverloadedError("too many grammars are being built or waiting.", remedy="Try again later.")
