"""The process in which grammars of requests are tried: `python -m penstock.grammar.proving_process`.

Some small schemas take the library minutes or gigabytes, which the library's own limits do not prevent. Here
that harms no request. The system ends this process when a grammar has used up its CPU time, and gives it no
memory beyond a limit, so that the library fails. `grammar.proving` takes the end of the process as an answer.

Grammars come as frames on standard input, and answers leave as frames on standard output (`grammar.frames`).
The first answer says whether the model can have structured output at all; if not, the process ends. It also
ends when its input does, or when the thread that started it does.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from penstock.errors import InvalidRequestError
from penstock.grammar.frames import LENGTH_BYTES, ProofAnswer, framed
from penstock.grammar.matcher import Matcher, Vocabulary, load_vocabulary
from penstock.grammar.schema_text import is_lenient
from penstock.request import StructuredOutputs

# The stack for a build is smaller than that of threads of the ranks, so what fits here fits there.
_STACK_BYTES = 2 << 20
_MEMORY_BYTES = 1 << 30  # for grammars, beside what the process has once the vocabulary is read
_PR_SET_PDEATHSIG = 1
# The library's error messages about schemas that are sound, but that it does not support.
_UNSUPPORTED = re.compile(
    r"^(Unimplemented keys|Unknown format|Failed to generate regex for"
    r"|Unable to determine if|can't determine if|the schema has )"
    r"|(not|only) supported|too many digits|are not disjoint"
)
# Left out of the library's messages: how those about a schema within a grammar begin, and advice to set an
# option that requests cannot set.
_NOT_TOLD = re.compile(r"^failed to compile JSON schema: |\.? Enable 'coerce_one_of'.*")
# References lead to places within the document by now, so the library only looks elsewhere for the draft that
# `$schema` names.
_UNKNOWN_DRAFT = re.compile(r"^Resource ('.*') is not present in a registry.*")


def tried(vocabulary: Vocabulary, structured: StructuredOutputs) -> ProofAnswer:
    """Build a grammar and its first mask, as the last stage would, and return whether that was possible."""
    try:
        if is_lenient(structured):  # open objects need no leniency, so that what is not supported is found
            answer = _built(vocabulary, msgspec.structs.replace(structured, open_objects=True))
            if answer.error is not None:
                return answer
        return _built(vocabulary, structured)
    except InvalidRequestError as error:
        return ProofAnswer(error.info())
    except Exception as error:  # not a panic of the library: it ends the process
        return _invalid(str(error))


def _built(vocabulary: Vocabulary, structured: StructuredOutputs) -> ProofAnswer:
    matcher = Matcher(vocabulary, structured)
    mask = matcher.mask()
    if matcher.error:
        return _invalid(matcher.error)
    return ProofAnswer() if any(mask) else _invalid("no text can match it")


def _invalid(reason: str) -> ProofAnswer:
    told = _NOT_TOLD.sub("", reason)
    why = _UNKNOWN_DRAFT.sub(r"the schema has $schema: \1 is not a known draft", told)
    return ProofAnswer(
        InvalidRequestError(
            f"structured output: {why}.",
            remedy="docs/structured-output.md lists the supported features.",
            param="structured_outputs",
            code="unsupported_schema" if _UNSUPPORTED.search(why) else "invalid_grammar",
        ).info()
    )


def _write(stream: BinaryIO, answer: ProofAnswer) -> None:
    stream.write(framed(answer))
    stream.flush()


def _read(stream: BinaryIO) -> StructuredOutputs | None:
    """Read a frame; None at the end of the input."""
    head = stream.read(LENGTH_BYTES)
    content = stream.read(int.from_bytes(head, "little"))
    return msgspec.msgpack.decode(content, type=StructuredOutputs) if len(head) == LENGTH_BYTES else None


def _limit_memory() -> None:
    """Limit the memory to `_MEMORY_BYTES` more than the process has now, and write no core dumps."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(directory: Path, eos_token_ids: list[int], seconds: float) -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    try:
        vocabulary = load_vocabulary(directory, eos_token_ids)
    except InvalidRequestError as error:
        _write(sink, ProofAnswer(error.info()))
        return
    _limit_memory()
    _write(sink, ProofAnswer())
    while (structured_outputs := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # when they are used up, the system ends the process
        answer = tried(vocabulary, structured_outputs)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sink, answer)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--eos", type=int, nargs="*", default=[])
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args(arguments)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(options.directory, options.eos, options.seconds))
    thread.start()
    thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
