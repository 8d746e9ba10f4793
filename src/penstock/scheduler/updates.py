"""Builds the updates that a client gets of its request, and the errors that end one."""

from __future__ import annotations

from penstock.batch import BuiltGrammar
from penstock.errors import ConstraintError, ErrorInfo, NumericalError, QuarantinedError, UnavailableError
from penstock.request import FinishReason, RequestUpdate, TokenLogprobs
from penstock.scheduler.queues import RequestState


def tokens_came(
    request: RequestState,
    num_tokens: int,
    logprobs: list[TokenLogprobs] | None,
    reason: FinishReason | None,
    drafts: tuple[int, int],
) -> RequestUpdate:
    """Return the update for the newest tokens of a request, which are appended already.

    Args:
        reason: why the last of them ends the request; None if it does not.
        drafts: how many of these tokens were guessed before, and how many guesses were wrong.
    """
    token_ids, is_first = request.token_ids[-num_tokens:], request.num_outputs == num_tokens
    return RequestUpdate(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=None if logprobs is None else logprobs[:num_tokens],
        finish_reason=reason,
        stop_token_id=token_ids[-1] if reason == "stop" else None,
        queue_seconds=request.queue_seconds if is_first else None,
        num_cached_tokens=request.num_cached_tokens if is_first else 0,
        num_accepted_drafts=drafts[0],
        num_rejected_drafts=drafts[1],
    )


def scores_came(request: RequestState, scores: list[TokenLogprobs]) -> RequestUpdate:
    """Return the update with the scores (log-probabilities) of the next tokens of a request's prompt."""
    return RequestUpdate(
        request_id=request.request_id,
        prompt_logprobs=scores,
        queue_seconds=request.queue_seconds,
        num_cached_tokens=request.num_cached_tokens,
    )


def ended_without_tokens(request: RequestState, vector: bytes) -> RequestUpdate:
    """Return the last update of a request whose prompt is computed and that wanted no token.

    Args:
        vector: the vector that the request wanted of its prompt, as float32 in bytes; b"" if it wanted none.
    """
    return RequestUpdate(
        request_id=request.request_id,
        logprobs=None if request.sampling.num_logprobs < 0 else [],
        finish_reason="stop" if vector else "length",
        vector=vector,
        queue_seconds=request.queue_seconds,
        num_cached_tokens=request.num_cached_tokens,
    )


def failed(request: RequestState, error: ErrorInfo) -> RequestUpdate:
    return RequestUpdate(
        request_id=request.request_id,
        finish_reason="error",
        error=error,
        queue_seconds=None if request.num_outputs else request.queue_seconds,
    )


def quarantined(request: RequestState) -> ErrorInfo:
    return QuarantinedError(
        f"a stage was lost twice while it ran request {request.request_id}, at {_place(request)}; the "
        "request is not retried."
    ).info()


def row_error(request: RequestState, step_id: int, unmet: str | None) -> ErrorInfo:
    """Return the error of a request for which a step could sample no token.

    Args:
        unmet: why the request's constraints allowed no token; None: the logits were not finite.
    """
    if unmet is None:
        return numerical_error(request, step_id)
    names = _constraints(request)
    return ConstraintError(
        f"no token is allowed as {_place(request)} of request {request.request_id} (step {step_id}): "
        f"{unmet}.",
        remedy=f"Loosen {' or '.join(names) or 'the constraints on tokens'}.",
        param=names[0] if len(names) == 1 else None,
    ).info()


def _constraints(request: RequestState) -> list[str]:
    """Return the fields of the request that forbid tokens where it stands."""
    sampling, changes = request.sampling, request.sampling.changes
    in_force = {
        "structured_outputs": sampling.structured is not None,
        "allowed_token_ids": changes is not None and changes.allowed_ids is not None,
        "bad_words": changes is not None and bool(changes.bad_words),
        "min_tokens": bool(sampling.suppressed_ids) and request.num_outputs < sampling.min_tokens,
    }
    return [name for name, is_there in in_force.items() if is_there]


def grammar_error(request: RequestState, report: BuiltGrammar) -> ErrorInfo:
    """Return the error of a request whose grammar the last stage could not build.

    If the report does not blame the grammar itself, the same request may succeed a moment later.
    """
    message = f"the last stage could not build the grammar of request {request.request_id}: {report.why}."
    if report.may_be_good:
        return UnavailableError(
            message,
            remedy="Try again later: the stage is short of time, memory or threads.",
            code="grammar_not_built",
        ).info()
    return ConstraintError(message, remedy="Make the grammar smaller.", param="structured_outputs").info()


def numerical_error(request: RequestState, step_id: int) -> ErrorInfo:
    where = "in the vector" if request.pooling is not None else f"at {_place(request)}"
    return NumericalError(
        f"the model gave NaN or infinity {where} of request {request.request_id} (step {step_id}).",
        remedy="Try --dtype float32, or check the weights.",
    ).info()


def _place(request: RequestState) -> str:
    """Return the token that the request would have got next, in words."""
    num_scores = request.prompt_len - 1 if request.sampling.num_prompt_logprobs >= 0 else 0
    if request.num_scores < num_scores:
        return f"token {request.num_scores + 1} of the prompt"
    return f"output token {request.num_outputs}"
