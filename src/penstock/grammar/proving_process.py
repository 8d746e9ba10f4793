"""The process in which grammars of requests are tried: `python -m penstock.grammar.proving_process`.

Some small schemas take the library minutes or gigabytes, and its own limits do not see it. Here that harms
no request: this process has a limit of CPU time per grammar and one of memory, by which the system ends it,
and `grammar.proving`, which has asked, takes its end as an answer.

Frames on standard input and output are a length of four bytes and a message; the first one out says whether
the model can have structured output at all. Ends with its input, or with its parent.
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

# Less than what threads of the ranks have: what fits here fits there.
_STACK_BYTES = 2 << 20
_MEMORY_BYTES = 1 << 30  # beside what the vocabulary takes
_PR_SET_PDEATHSIG = 1
# Of the library's words: those on schemas that are sound, and that it does not support.
_UNSUPPORTED = re.compile(
    r"^(Unimplemented keys|Unknown format|Failed to generate regex for"
    r"|Unable to determine if|can't determine if|the schema has )"
    r"|(not|only) supported|too many digits|are not disjoint"
)
# What stands before those on a schema within a grammar, and an option that nobody has.
_NOT_TOLD = re.compile(r"^failed to compile JSON schema: |\.? Enable 'coerce_one_of'.*")
# References are within the document; what the library looks for outside is what `$schema` names.
_UNKNOWN_DRAFT = re.compile(r"^Resource ('.*') is not present in a registry.*")


def tried(vocabulary: Vocabulary, structured: StructuredOutputs) -> ProofAnswer:
    """Do with this grammar what the last stage would do first, and return the result."""
    try:
        if is_lenient(structured):  # what is not supported is found without bounds for open objects
            answer = _built(vocabulary, msgspec.structs.replace(structured, open_objects=True))
            if answer.error is not None:
                return answer
        return _built(vocabulary, structured)
    except InvalidRequestError as error:
        return ProofAnswer(error.info())
    except Exception as error:  # a panic of the library ends the process
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
    """Limit the memory to a little more than there is now."""
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
        signal.setitimer(signal.ITIMER_PROF, seconds)  # at its end the system ends the process
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
