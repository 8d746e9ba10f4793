"""`chat`, `complete`, `trace` and `bench serve` over HTTPS: whom they trust, and what they say otherwise."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from certificates import Certificate
from fake_engine import VOCAB_SIZE
from live_server import LiveServer
from penstock.cli.bench.http_stream import Target, post_stream
from penstock.cli.client_tls import client_context, is_trusted
from penstock.cli.http_client import served_model
from penstock.cli.program import run
from penstock.cli.terminal import Invocation
from penstock.config.server import ServerConfig
from penstock.errors import LinkClosedError, UsageError, WaitTimeoutError
from penstock.process.tls import server_context


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("certificate"), "127.0.0.1")


@pytest.fixture(scope="module")
def live(certificate: Certificate) -> Iterator[LiveServer]:
    config = ServerConfig(drain_s=5.0, ssl_certfile=certificate.certfile, ssl_keyfile=certificate.keyfile)
    with LiveServer(config=config) as server:
        yield server


def penstock(*words: str, **environ: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    code = run([*words], Invocation(stdout=out, stderr=err, stdin=StringIO(), environ=environ))
    return code, out.getvalue(), err.getvalue()


def commands(url: str, directory: Path) -> dict[str, list[str]]:
    load = [
        "--num-prompts",
        "3",
        "--random-input-len",
        "4",
        "--random-output-len",
        "3",
        "--stall-seconds",
        "20",
    ]
    return {
        "chat": ["chat", "--url", url, "--quick", "hello", "--max-tokens", "4"],
        "complete": ["complete", "hello", "--url", url, "--max-tokens", "3"],
        "trace": ["trace", "--url", url, "--out", str(directory / "trace.json")],
        "bench": ["bench", "serve", "--url", url, "--vocab-size", str(VOCAB_SIZE), *load],
    }


NAMES = ["chat", "complete", "trace", "bench"]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_trusts_the_authority_that_it_is_given(
    live: LiveServer, certificate: Certificate, tmp_path: Path, name: str
) -> None:
    words = commands(live.url, tmp_path)[name]
    code, out, err = penstock(*words, "--ca-file", certificate.ca_file)
    assert (code, err) == (0, ""), out
    code, _, err = penstock(*words, PENSTOCK_CA_FILE=certificate.ca_file)
    assert (code, err) == (0, "")


def test_a_server_that_says_no_farewell_leaves_no_connection_open(certificate: Certificate) -> None:
    answered, looked = threading.Event(), threading.Event()

    def serve(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate.certfile, certificate.keyfile)
        with context.wrap_socket(accepted, server_side=True) as connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            answered.set()
            assert looked.wait(20)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        target = Target.parse(url, ca_file=Path(certificate.ca_file))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert asyncio.run(post_stream(target, "/", b"", lambda status, piece: None, stall_s=20)) == 200
            gc.collect()
        looked.set()
        server.join()
    assert answered.is_set()
    assert [str(warning.message) for warning in found if warning.category is ResourceWarning] == []


def test_a_servers_own_certificate_is_enough(
    live: LiveServer, certificate: Certificate, tmp_path: Path
) -> None:
    words = commands(live.url, tmp_path)["complete"]
    assert penstock(*words, "--ca-file", certificate.certfile)[0] == 0


def test_the_systems_store_can_be_another_file(
    live: LiveServer, certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certificate.ca_file)
    assert penstock(*commands(live.url, tmp_path)["complete"])[0] == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_certificate_of_nobody_known_is_refused_with_a_remedy(
    live: LiveServer, tmp_path: Path, name: str
) -> None:
    code, _, err = penstock(*commands(live.url, tmp_path)[name])
    assert code == 5
    assert f"the certificate of {live.url} is not trusted: unable to get local issuer certificate." in err
    assert "--ca-file" in err
    assert "SSL_CERT_FILE" in err


def test_a_name_that_the_certificate_does_not_have_is_refused(
    live: LiveServer, certificate: Certificate, tmp_path: Path
) -> None:
    url = live.url.replace("127.0.0.1", "localhost")
    code, _, err = penstock(*commands(url, tmp_path)["complete"], "--ca-file", certificate.ca_file)
    assert code == 5
    assert "is not trusted: Hostname mismatch, certificate is not valid for 'localhost'." in err
    assert "Use a host name that is in the certificate" in err


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_a_file_that_cannot_be_trusted_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"--ca-file .* cannot be used: ") as raised:
        client_context(path)
    assert raised.value.param == "ca_file"
    Target.parse("http://127.0.0.1:1", ca_file=path)  # where it is not needed it is not read


def test_plain_http_where_tls_is_meant_and_the_other_way_round(
    live: LiveServer, certificate: Certificate
) -> None:
    with (
        LiveServer() as plain,
        pytest.raises(LinkClosedError, match=r"did not complete the TLS handshake: .* Use http://"),
    ):
        served_model(
            Target.parse(plain.url.replace("http:", "https:"), ca_file=Path(certificate.ca_file)), None
        )
    with pytest.raises(LinkClosedError, match="no server at http://"):
        served_model(Target.parse(live.url.replace("https:", "http:")), None)


def test_the_client_of_many_streams_says_the_same(live: LiveServer) -> None:
    async def post() -> None:
        await post_stream(Target.parse(live.url), "/v1/completions", b"{}", lambda *_: None, stall_s=20)

    with pytest.raises(LinkClosedError, match="is not trusted") as raised:
        asyncio.run(post())
    assert raised.value.code == "certificate_not_trusted"


def test_a_server_that_never_finishes_the_handshake_is_given_up(certificate: Certificate) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        target = Target.parse(url, ca_file=Path(certificate.ca_file))
        with pytest.raises(WaitTimeoutError):
            served_model(target, None, timeout_s=0.2)
        with pytest.raises(WaitTimeoutError):
            asyncio.run(post_stream(target, "/", b"{}", lambda *_: None, stall_s=0.2))


@pytest.mark.parametrize(
    ("url", "host", "port", "shown"),
    [
        ("https://a.example", "a.example", 443, "https://a.example:443"),
        ("https://a.example:8443/v1", "a.example", 8443, "https://a.example:8443"),
        ("https://[::1]:1/x/v1/", "::1", 1, "https://[::1]:1/x"),
        ("a.example:81", "a.example", 81, "http://a.example:81"),
    ],
)
def test_urls_of_both_schemes(url: str, host: str, port: int, shown: str) -> None:
    target = Target.parse(url, "key")
    assert (target.host, target.port, target.url) == (host, port, shown)
    assert "SSLContext" not in repr(target)


def test_other_schemes_are_refused() -> None:
    with pytest.raises(UsageError, match="https://HOST:PORT"):
        Target.parse("ftp://a.example")


def test_a_certificate_is_trusted_where_its_authority_is_known(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its name: that is the client's affair."""
    config = ServerConfig(ssl_certfile=certificate.certfile, ssl_keyfile=certificate.keyfile)
    context = server_context(config)
    assert context is not None
    assert not is_trusted(context)
    monkeypatch.setenv("SSL_CERT_FILE", certificate.ca_file)
    assert is_trusted(context)
