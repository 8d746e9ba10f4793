"""Requests to the hub: which files a repository has, and the bytes of one file from some position on.

This is the only module that imports huggingface_hub, and it does so only when a client is opened. The
library's session obeys the user's proxies, certificates and `HF_HUB_OFFLINE`, and the library finds the token
that `hf auth login` has kept. This module writes the requests itself, so that the hub is asked nothing else.
Faults become errors of ours with a remedy. The module does not touch the cache (`hub.transfer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

from penstock.errors import (
    HubAccessError,
    HubContentError,
    HubError,
    HubMissingError,
    HubUnreachableError,
    PenstockError,
    UsageError,
)
from penstock.hub.repository import HubFile, HubRepository, repository_of

PUBLIC_HUB = "https://huggingface.co"
TIMEOUT_S = 20.0  # most time to connect, and between two pieces of an answer
_MAX_INFO_BYTES = 64 << 20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TOKEN_REMEDY = "set HF_TOKEN, name a file with --token-file, or run `hf auth login`"


class TransferCutError(Exception):
    """A transfer ended too early, or could not begin; it may be tried again from the byte that is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAddress:
    """The address of a hub, and the account to use.

    Attributes:
        endpoint: base address of the hub or of a mirror, without a slash at its end.
        token: token of an account. None takes the token that huggingface_hub finds, if any, but only for the
            public hub and the hub of HF_ENDPOINT. No token is sent over plain HTTP to another host.
        timeout_s: most seconds to connect, and between two pieces of an answer.
    """

    endpoint: str = PUBLIC_HUB
    token: str | None = None
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if not _is_base_address(self.endpoint):
            raise UsageError(
                f"--endpoint {self.endpoint[:200]!r} is not the address of a hub.",
                remedy=f"Give a base address such as {PUBLIC_HUB}.",
                param="endpoint",
            )
        if self.token and not self.is_private:
            raise UsageError(
                f"--endpoint {self.endpoint[:200]!r} would get the token over plain HTTP.",
                remedy="Give an https:// address, or no token.",
                param="endpoint",
            )

    @property
    def is_private(self) -> bool:
        """Whether what is sent cannot be read on the way: HTTPS is used, or the hub is on this host."""
        parts = urlsplit(self.endpoint)
        return parts.scheme == "https" or parts.hostname in _LOOPBACK


def _is_base_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises where it is none
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)


class HubClient:
    """A session with the hub, as a context manager that closes the connections.

    Every method raises a kind of `HubError` if the hub refuses. If it cannot be reached, `repository` raises
    a `HubUnreachableError`, and `content` a `TransferCutError`, after which a caller may try again.
    """

    def __init__(self, address: HubAddress) -> None:
        from huggingface_hub import get_session

        self._address = address
        self._session: Any = get_session()
        self._headers = {"user-agent": "penstock"}
        if token := address.token or _kept_token(address):
            self._headers["authorization"] = f"Bearer {token}"

    def __enter__(self) -> HubClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from huggingface_hub import close_session

        close_session()

    def repository(self, name: str, revision: str) -> HubRepository:
        """Return the files of a model at a branch, tag or commit."""
        url = f"{self._address.endpoint}/api/models/{name}/revision/{quote(revision, safe='')}"
        with self._answering(name, revision, ""), self._stream(f"{url}?blobs=true", {}) as response:
            answer = b"".join(_bounded(response.iter_bytes(), url))
        return repository_of(answer, url)

    @contextmanager
    def content(
        self, name: str, commit: str, file: HubFile, begin: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Open a file on the hub; yield the position of the first byte that comes, and the bytes in pieces.

        Args:
            begin: position of the first byte that is wanted. A server that cannot begin there sends the whole
                file, and the position that is yielded is 0.

        Raises:
            TransferCutError: the transfer could not begin, or has ended too early.
        """
        url = f"{self._address.endpoint}/{name}/resolve/{commit}/{quote(file.path)}"
        headers = {"accept-encoding": "identity"}
        if begin:
            headers["range"] = f"bytes={begin}-"
        with self._answering(name, commit, file.path):
            try:
                with self._stream(url, headers) as response:
                    # Without a size of pieces. With one, the library holds back bytes until they fill a
                    # piece, and drops them if the connection ends before.
                    yield _first_byte(response, begin), response.iter_bytes()
            except Exception as error:
                if _is_of_transport(error) and not _is_offline(error):
                    raise TransferCutError(_words(error)) from error
                raise

    @contextmanager
    def _stream(self, url: str, headers: Mapping[str, str]) -> Iterator[Any]:
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

        with self._session.stream(
            "GET",
            url,
            headers={**self._headers, **headers},
            timeout=self._address.timeout_s,
            follow_redirects=True,
        ) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            yield response

    @contextmanager
    def _answering(self, name: str, revision: str, file: str) -> Iterator[None]:
        try:
            yield
        except (PenstockError, TransferCutError):
            raise
        except Exception as error:
            translated = _translated(error, self._address.endpoint, name, revision, file)
            if translated is None:
                raise
            raise translated from error


def _kept_token(address: HubAddress) -> str | None:
    from huggingface_hub import constants, get_token

    is_for_it = address.is_private and address.endpoint in (PUBLIC_HUB, constants.ENDPOINT)
    return get_token() if is_for_it else None


def _bounded(chunks: Iterator[bytes], url: str) -> Iterator[bytes]:
    total = 0
    for chunk in chunks:
        total += len(chunk)
        if total > _MAX_INFO_BYTES:
            raise HubContentError(
                f"{url} sent more than {_MAX_INFO_BYTES >> 20} MiB.", remedy="Check --endpoint."
            )
        yield chunk


def _first_byte(response: Any, begin: int) -> int:
    """Return the position of an answer's first byte: 0 from a server that does not support ranges."""
    if response.status_code != 206:
        return 0
    stated = str(response.headers.get("content-range", "")).removeprefix("bytes ").partition("-")[0]
    if stated != str(begin):
        raise TransferCutError(f"the server sent a range that does not begin at {begin}")
    return begin


def _translated(error: Exception, endpoint: str, name: str, revision: str, file: str) -> HubError | None:
    """Return our error for an error of the library, or None if that is not about the hub."""
    from huggingface_hub import errors

    if _is_offline(error):
        return HubUnreachableError(
            f"{name} is not downloaded: HF_HUB_OFFLINE forbids connections to the hub.",
            remedy="Unset HF_HUB_OFFLINE, or give the directory of a model that is here.",
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _refused(error, endpoint, name, revision, file)
    if not _is_of_transport(error):
        return None
    return HubUnreachableError(
        f"the hub {endpoint} cannot be reached: {_words(error)}.",
        remedy="Check the network and the proxy, or name a mirror with --endpoint. The same command "
        "continues where it stopped.",
    )


def _refused(error: Any, endpoint: str, name: str, revision: str, file: str) -> HubError:
    """Return our error for an answer of the hub that is not a success."""
    from huggingface_hub import errors

    status = error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        return HubAccessError(
            f"{name} is gated: {endpoint} gives it only to accounts that have accepted its terms ({status}).",
            remedy=f"Accept them at {endpoint}/{name}, and give a token of that account: {_TOKEN_REMEDY}.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubMissingError(
            f"{name} has no branch, tag or commit {revision}.", remedy=f"Look at {endpoint}/{name}/tree/main."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubMissingError(
            f"{endpoint} has no model {name} for this account ({status}).",
            remedy=f"Check the name at {endpoint}. If the model is private, give a token: {_TOKEN_REMEDY}.",
        )
    if status in (401, 403):
        return HubAccessError(
            f"{endpoint} refuses {name}{f', file {file}' if file else ''} to this account ({status}).",
            remedy=f"Give a token that may read it: {_TOKEN_REMEDY}.",
        )
    if status in (404, 410):
        return HubMissingError(
            f"{endpoint} does not have {file or name} of {name} at {revision} ({status}).",
            remedy="Run the command again: the model may have changed in the meantime.",
        )
    if status == 416:
        return HubContentError(
            f"{endpoint} sent fewer bytes of {file} of {name} than announced.",
            remedy="Run the command again. If it happens again, check --endpoint.",
        )
    if status == 429 or status >= 500:
        return HubUnreachableError(
            f"{endpoint} does not serve {name} at present ({status}).",
            remedy="Try again later: the same command continues where it stopped.",
        )
    return HubError(f"{endpoint} answered {status} for {file or name}.", remedy="Check --endpoint.")


def _is_offline(error: Exception) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled)


def _is_of_transport(error: Exception) -> bool:
    """Return whether no answer came, or not all of it: an error of the HTTP library below huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    base = HfHubHTTPError.__mro__[
        1
    ]  # `HTTPError` of httpx or httpx2, as the version of huggingface_hub has it
    return isinstance(error, base) and not isinstance(error, HfHubHTTPError)


def _words(error: Exception) -> str:
    if "Timeout" in type(error).__name__:
        return "it did not answer in time"
    return str(error)[:200].rstrip(".") or type(error).__name__
