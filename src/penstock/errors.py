"""The exceptions that a user, a client or an operator of Penstock can meet.

    PenstockError
    ├── UsageError                 a flag or argument is wrong                 exit 2, HTTP 400
    │   ├── PartitionError         layers cannot be cut as asked
    │   └── DecisionLogError       a file of decisions cannot be replayed
    ├── ModelError                 the model cannot be served                  exit 3
    │   ├── ModelConfigError       config.json (or a sibling) is bad
    │   │   └── UnsupportedModelError   an architecture or format that is not supported
    │   └── CheckpointError        a file of weights is bad: file, tensor, expected, found
    │       └── ModelChangedError  a stage that starts again finds other weights   HTTP 503
    ├── NotEnoughMemoryError       weights or KV cache do not fit              exit 4
    ├── DiskSpaceError             a disk has no room for what is written      exit 4
    ├── HubError                   the hub does not give a model               exit 5, HTTP 503
    │   ├── HubMissingError        it has no such model, revision or file      exit 3
    │   ├── HubAccessError         the account, or its token, may not read the model
    │   ├── HubUnreachableError    no connection, no answer in time, or HF_HUB_OFFLINE is set
    │   └── HubContentError        what came is not what the hub has announced
    ├── PeerError                  a port, process or link fails               exit 5, HTTP 503
    │   ├── PortInUseError
    │   ├── StageLostError         a rank died, hung or failed: stage and first cause
    │   ├── HostMissingError       a host is lost, and the others cannot take over its stages
    │   ├── WaitTimeoutError       a wait passed its deadline: peer and step
    │   ├── LinkClosedError        the other end of a link or channel went away
    │   ├── ProtocolError          a frame, message or plan is not what its receiver must get
    │   └── JoinError              a worker cannot join the cluster of a head
    │       ├── JoinTokenError         the token is wrong, expired, used up or revoked
    │       ├── WrongClusterError      the head is not of the cluster of the token or certificate
    │       ├── OtherVersionError      the two hosts run different versions
    │       ├── NameTakenError         another worker of the cluster has this name
    │       └── CertificateError       a certificate is revoked, expired or of the wrong name
    ├── StoreError                 a store failed; requests go on without it   exit 5, HTTP 503
    └── RequestError               one request is refused or failed; others go on
        ├── InvalidRequestError    HTTP 400: names the field
        ├── AuthenticationError    HTTP 401
        ├── NotFoundError          HTTP 404
        ├── TooLargeError          HTTP 413
        ├── OverloadedError        HTTP 429, with Retry-After
        ├── UnavailableError       HTTP 503, with Retry-After
        ├── AbortedError           HTTP 499: the client or the operator ended it
        ├── ConstraintError        HTTP 400: nothing that the request allows can come next
        ├── NumericalError         HTTP 500: NaN or infinity in the row's logits
        ├── PlanMemoryError        HTTP 503: a stage had no memory for the plan that the row was in
        └── QuarantinedError       HTTP 500: two times in a row a stage was lost while the request ran

Every message says what happened and why; `remedy` says what to do. `ErrorInfo` is the same error on a wire.
This module imports nothing of Penstock but `bounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from penstock.bounds import Small, Word


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it is sent to another process; `kind` is the name of its class in this module."""

    kind: Word
    message: str
    remedy: str = ""
    param: Word | None = None
    code: Word | None = None
    stage: Small | None = None


class PenstockError(Exception):
    """The base of all errors that Penstock raises on purpose.

    Args:
        message: what happened and why, with the numbers.
        remedy: what the reader can do about it, as a sentence.
        param: the request field or flag at fault, if one is.
        code: a stable word for programs, such as `out_of_range`.
        stage: the pipeline stage concerned, if one is.
    """

    exit_code: ClassVar[int] = 70
    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        param: str | None = None,
        code: str | None = None,
        stage: int | None = None,
    ) -> None:
        self.message = _ended_once(message)
        self.remedy = _ended_once(remedy)
        super().__init__(f"{self.message} {self.remedy}" if remedy else self.message)
        self.param = param
        self.code = code or self.default_code
        self.stage = stage

    def info(self) -> ErrorInfo:
        """Return this error in a form that can be sent to another process."""
        return ErrorInfo(
            kind=type(self).__name__,
            message=self.message,
            remedy=self.remedy,
            param=self.param,
            code=self.code,
            stage=self.stage,
        )


def _ended_once(text: str) -> str:
    """Return the text without the second of two full stops at its end.

    Two stand there if a message ends with a quoted sentence. An ellipsis of three is left as it is.
    """
    return text[:-1] if text.endswith("..") and not text.endswith("...") else text


class UsageError(PenstockError, ValueError):
    exit_code = 2
    http_status = 400
    error_type = "invalid_request_error"


class PartitionError(UsageError):
    """The layers of a model cannot be cut into stages as asked."""


class DecisionLogError(UsageError):
    """A recording (a file of `--record-decisions`) cannot be read, or this version cannot replay it.

    It is missing, damaged, or was made by another version or with settings that this version does not know.
    """

    default_code = "decision_log"


class ModelError(PenstockError):
    exit_code = 3


class ModelConfigError(ModelError):
    """`config.json` or a sibling file is missing, malformed or out of range."""


class UnsupportedModelError(ModelConfigError):
    """The model has an architecture, a vocabulary or a type of tensors that this version does not support."""


class CheckpointError(ModelError):
    """A file of weights is not what its header or the model says.

    Args:
        file: name of the file.
        tensor: name of the tensor, or "" when the file as a whole is bad.
        key: key in the metadata of a GGUF file, or "".
        expected, found: the two things that differ, as text.
    """

    def __init__(
        self, *, file: str, tensor: str = "", key: str = "", expected: str, found: str, remedy: str = ""
    ) -> None:
        where = f"{file}: tensor {tensor}" if tensor else f"{file}: key {key}" if key else file
        remedy = remedy or "Download the checkpoint again or convert it again."
        super().__init__(f"{where}: expected {expected}, found {found}.", remedy=remedy)
        self.file = file
        self.tensor = tensor
        self.key = key
        self.expected = expected
        self.found = found


def unreadable(file: str, error: OSError, *, tensor: str = "") -> CheckpointError:
    """Return the error for a file of a model that the system does not let us read."""
    return CheckpointError(
        file=file, tensor=tensor, expected="a readable file", found=error.strerror or "an error"
    )


class ModelChangedError(CheckpointError):
    """A stage that is started again finds other weights than those that the engine loaded at its start.

    Args:
        file: name of the file that differs.
        tensor: name of the tensor whose bytes differ; "" if the difference was seen before a tensor was read.
    """

    http_status = 503
    error_type = "service_unavailable"
    default_code = "model_changed"

    def __init__(self, *, file: str, tensor: str = "") -> None:
        super().__init__(
            file=file,
            tensor=tensor,
            expected="the bytes that the engine loaded at its start",
            found="others",
            remedy="Restore the original file, and the stage restarts by itself; or restart the engine to "
            "serve the changed model.",
        )


class NotEnoughMemoryError(PenstockError):
    exit_code = 4


class DiskSpaceError(PenstockError):
    """A disk has no room: for a download, or for what a command writes."""

    exit_code = 4
    default_code = "disk_full"


class HubError(PenstockError):
    """The Hugging Face Hub, or the mirror in its place, does not give a model that was asked for."""

    exit_code = 5
    http_status = 503
    default_code = "hub_failed"


class HubMissingError(HubError):
    """The hub has no such model, revision or file, or the model has no file that can be used."""

    exit_code = 3
    default_code = "hub_missing"


class HubAccessError(HubError):
    """The hub gives this model only to some accounts, and the account of the token is not one of them."""

    default_code = "hub_access"


class HubUnreachableError(HubError):
    """The hub cannot be reached, does not answer in time, or `HF_HUB_OFFLINE` forbids connections to it."""

    default_code = "hub_unreachable"


class HubContentError(HubError):
    """The hub has sent a file of another hash or size than it announced, or an answer of another protocol."""

    default_code = "hub_content"


class PeerError(PenstockError):
    exit_code = 5
    http_status = 503
    error_type = "service_unavailable"


class PortInUseError(PeerError):
    """The address to listen on is used by another program, or does not belong to this host."""


class StageLostError(PeerError):
    """A rank died, hung or failed; the message carries the first cause."""

    default_code = "stage_lost"


class HostMissingError(PeerError):
    """A host is lost, and the others cannot take over its stages; the message names it."""

    default_code = "host_missing"


class WaitTimeoutError(PeerError, TimeoutError):
    """A wait on a peer passed its deadline; the message names peer and step."""

    default_code = "peer_timeout"


class LinkClosedError(PeerError):
    """The other end of a link or channel went away."""

    default_code = "link_closed"


class ProtocolError(PeerError):
    """A frame, a message or a plan is not what its receiver must get at that point."""

    default_code = "protocol_mismatch"


class JoinError(PeerError):
    """A worker cannot join the head's cluster; the head and the other workers go on."""

    default_code = "join_failed"


class JoinTokenError(JoinError):
    """The head does not take the token; `code` says whether it is wrong, expired, used up or revoked."""

    default_code = "wrong_token"


class WrongClusterError(JoinError):
    """The head does not have the key that the token or the worker's certificate names."""

    default_code = "wrong_cluster"


class OtherVersionError(JoinError):
    """The two hosts run different versions of Penstock."""

    default_code = "other_version"


class NameTakenError(JoinError):
    """A worker of this name is already in the cluster."""

    default_code = "name_taken"


class CertificateError(JoinError):
    """A certificate of the cluster is revoked or expired, or is that of another process than expected."""

    default_code = "certificate_refused"


class StoreError(PenstockError):
    """A store of KV blocks cannot do what it was asked: it is full, read-only, lost, or refuses the user."""

    exit_code = 5
    http_status = 503
    default_code = "store_failed"


class RequestError(PenstockError):
    """One request is refused or has failed; all others go on."""


class InvalidRequestError(RequestError, ValueError):
    exit_code = 2
    http_status = 400
    error_type = "invalid_request_error"
    default_code = "invalid_value"


class AuthenticationError(RequestError):
    http_status = 401
    error_type = "authentication_error"
    default_code = "invalid_api_key"


class NotFoundError(RequestError):
    http_status = 404
    error_type = "invalid_request_error"
    default_code = "not_found"


class TooLargeError(RequestError):
    http_status = 413
    error_type = "invalid_request_error"
    default_code = "body_too_large"


class OverloadedError(RequestError):
    http_status = 429
    error_type = "rate_limit_error"
    default_code = "queue_full"


class UnavailableError(RequestError):
    http_status = 503
    error_type = "service_unavailable"
    default_code = "unavailable"


class AbortedError(RequestError):
    http_status = 499
    error_type = "aborted"
    default_code = "aborted"


class ConstraintError(RequestError):
    """No token may be sampled for this row: its grammar and its other constraints exclude each other."""

    http_status = 400
    error_type = "invalid_request_error"
    default_code = "constraint_unmet"


class NumericalError(RequestError):
    """The model gave NaN or infinity for this row, so that no token can be sampled and no vector be made."""

    default_code = "numerical"


MEMORY_REMEDY = "Try again later; the operator can lower --max-num-batched-tokens or --kv-cache-bytes."


class PlanMemoryError(RequestError):
    """A stage had no memory left for a plan: the requests of the plan end, and the stage goes on."""

    http_status = 503
    error_type = "service_unavailable"
    default_code = "out_of_memory"


class QuarantinedError(RequestError):
    """A stage was lost twice while it ran this request, which got no token between; it is not tried again."""

    default_code = "quarantined"


def _descendants(cls: type[PenstockError]) -> dict[str, type[PenstockError]]:
    classes = {cls.__name__: cls}
    for child in cls.__subclasses__():
        classes |= _descendants(child)
    return classes


def error_from_info(info: ErrorInfo) -> PenstockError:
    """Rebuild the error that another process described; an unknown kind becomes a `PenstockError`."""
    cls = _descendants(PenstockError).get(info.kind, PenstockError)
    error = cls.__new__(cls)
    PenstockError.__init__(
        error, info.message, remedy=info.remedy, param=info.param, code=info.code, stage=info.stage
    )
    return error


_MAX_NAMED = 8  # requests, in one message


def concerned(requests: Sequence[str]) -> str:
    """Return the end of an error message about a step: the requests of the step; empty if there are none.

    At most `_MAX_NAMED` requests are named; of the others the number is given.
    """
    named, more = ", ".join(requests[:_MAX_NAMED]), len(requests) - _MAX_NAMED
    if more > 0:
        named += f" and {more} more"
    return f" Requests of the step: {named}." if requests else ""


def describe(error: BaseException) -> ErrorInfo:
    """Return any exception as an `ErrorInfo`.

    A `PenstockError` keeps its class name as the kind. Any other exception becomes the kind `PenstockError`,
    and its class is named in the message.
    """
    if isinstance(error, PenstockError):
        return error.info()
    return ErrorInfo(kind="PenstockError", message=f"{type(error).__name__}: {error}", code="internal_error")
