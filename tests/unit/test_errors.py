"""The error tree: what a user reads, and what crosses a process boundary."""

from __future__ import annotations

import re

import msgspec
import pytest

from penstock import errors
from penstock.errors import (
    CheckpointError,
    ErrorInfo,
    InvalidRequestError,
    OverloadedError,
    PartitionError,
    PenstockError,
    StageLostError,
    UsageError,
    WaitTimeoutError,
    describe,
    error_from_info,
)

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, PenstockError)]


def test_the_drawn_tree_is_the_real_one() -> None:
    assert errors.__doc__ is not None
    names = set(re.findall(r"\w+Error\b", errors.__doc__))
    assert names == {cls.__name__ for cls in ALL}


def test_a_message_carries_the_remedy() -> None:
    error = UsageError("--pp is 8.", remedy="Use at most 5.", param="pp", code="out_of_range", stage=2)
    assert str(error) == "--pp is 8. Use at most 5."
    assert error.info() == ErrorInfo(
        kind="UsageError",
        message="--pp is 8.",
        remedy="Use at most 5.",
        param="pp",
        code="out_of_range",
        stage=2,
    )
    assert str(UsageError("no remedy.")) == "no remedy."


def test_a_message_that_ends_with_another_sentence_ends_in_one_full_stop() -> None:
    """Issue 25, point 18. Reasons, of lost stages and of chat templates, bring a full stop, and what quotes
    them sets one too."""
    cause = StageLostError("stage 1 was lost.")
    error = UsageError(f"it failed: {cause}.", remedy=f"See {cause}.")
    assert (error.message, error.remedy) == ("it failed: stage 1 was lost.", "See stage 1 was lost.")
    assert str(error) == "it failed: stage 1 was lost. See stage 1 was lost."
    assert str(error_from_info(ErrorInfo(kind="UsageError", message="lost.."))) == "lost."
    assert str(UsageError("and so on...")) == "and so on..."


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_error_survives_the_wire(cls: type[PenstockError]) -> None:
    info = ErrorInfo(kind=cls.__name__, message="what and why.", remedy="Do this.", param="p", stage=1)
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=ErrorInfo)
    error = error_from_info(wire)
    assert type(error) is cls
    assert str(error) == "what and why. Do this."
    assert (error.param, error.stage, error.code) == ("p", 1, cls.default_code)
    assert describe(error).kind == cls.__name__


def test_a_kind_nobody_knows_becomes_the_base() -> None:
    error = error_from_info(ErrorInfo(kind="FutureError", message="something new."))
    assert type(error) is PenstockError
    assert str(error) == "something new."


@pytest.mark.parametrize(
    ("cls", "exit_code", "http_status"),
    [
        (PenstockError, 70, 500),
        (PartitionError, 2, 400),
        (errors.UnsupportedModelError, 3, 500),
        (errors.NotEnoughMemoryError, 4, 500),
        (errors.PortInUseError, 5, 503),
        (StageLostError, 5, 503),
        (InvalidRequestError, 2, 400),
        (errors.AuthenticationError, 70, 401),
        (errors.NotFoundError, 70, 404),
        (errors.TooLargeError, 70, 413),
        (OverloadedError, 70, 429),
        (errors.UnavailableError, 70, 503),
        (errors.AbortedError, 70, 499),
        (errors.NumericalError, 70, 500),
    ],
)
def test_exit_codes_and_http_statuses(cls: type[PenstockError], exit_code: int, http_status: int) -> None:
    assert (cls.exit_code, cls.http_status) == (exit_code, http_status)


def test_errors_are_also_what_python_code_expects() -> None:
    assert issubclass(PartitionError, ValueError)
    assert issubclass(InvalidRequestError, ValueError)
    assert issubclass(WaitTimeoutError, TimeoutError)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        ("lm_head.weight", "m.safetensors: tensor lm_head.weight: expected F32, found F16. "),
        ("", "m.safetensors: expected F32, found F16. "),
    ],
)
def test_a_checkpoint_error_names_file_tensor_expected_and_found(tensor: str, text: str) -> None:
    error = CheckpointError(file="m.safetensors", tensor=tensor, expected="F32", found="F16")
    assert str(error) == text + "Download the checkpoint again or convert it again."
    assert (error.file, error.tensor, error.expected, error.found) == ("m.safetensors", tensor, "F32", "F16")
    assert CheckpointError(file="m", expected="1", found="2", remedy="Other.").remedy == "Other."


def test_describe_names_a_foreign_exception() -> None:
    info = describe(ZeroDivisionError("division by zero"))
    assert (info.kind, info.code) == ("PenstockError", "internal_error")
    assert info.message == "ZeroDivisionError: division by zero"
